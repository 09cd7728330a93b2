//! Headers and answers of the calls about groups of files.

use serde::{Deserialize, Serialize};

/// A group that is begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewGroup {
    /// Files that it must have to be committed.
    pub files: u32,
    /// Job that it belongs to; empty for none.
    pub job: String,
    /// Permission bits of its folder.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
}

/// A group of files that appear together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupInfo {
    /// Name of its folder, which is hidden while it is open.
    pub name: String,
    /// Whether its files are visible under that name.
    pub is_committed: bool,
    /// Files that it must have to be committed.
    pub expected: u64,
    /// Files that it has.
    pub files: u64,
    /// Bytes of these.
    pub size: u64,
    /// Whether a version of one is pinned, so that it is not removed.
    pub pinned: bool,
    /// Job that it belongs to; empty for none.
    pub job: String,
    /// Time of its commit, or of its beginning, in nanoseconds since 1970.
    pub created: i64,
}
