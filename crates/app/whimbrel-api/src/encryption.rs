//! Encryption of the store.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::ByteSize;

/// How the store of a host is encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreEncryption {
    /// Name of the master key, with which the daemon has to be started; none if the store is not encrypted.
    pub master_key: Option<String>,
    /// Name of the data key, which the master key wraps and which encrypts the content.
    pub data_key: Option<String>,
    /// Bytes that are not encrypted.
    #[schema(value_type = u64)]
    pub plain: ByteSize,
}

/// Request for another master key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyChangeRequest {
    /// File of the host with the new key: 64 hexadecimal digits, for its owner only.
    #[schema(value_type = String)]
    pub key_file: PathBuf,
}
