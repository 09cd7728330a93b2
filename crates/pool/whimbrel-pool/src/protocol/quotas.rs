//! Headers and answers of the calls about quotas.

use super::NodeId;
use serde::{Deserialize, Serialize};

/// Whose bytes a quota limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuotaSubject {
    /// All that is in a folder and below it.
    Folder(NodeId),
    /// All that the member with this name has written.
    Member(String),
}

/// A quota, and what counts against it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaInfo {
    /// Path of the folder, or none.
    pub folder: Option<String>,
    /// Name of the member, or none.
    pub member: Option<String>,
    /// Most bytes of all versions together.
    pub bytes: u64,
    /// Bytes of all versions now.
    pub used: u64,
}
