//! Sessions of a host: directories of servers that are mounted there.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Session that is mounted on the host, by its root user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionInfo {
    /// Name of the session.
    pub name: String,
    /// Place where it is mounted.
    #[schema(value_type = String)]
    pub mount: PathBuf,
    /// Address of the server.
    pub server: String,
    /// Directory of the server.
    pub directory: String,
    /// Whether there is a connection.
    pub connected: bool,
    /// Round trip in milliseconds; none without a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// Number of times the connection broke.
    pub broken: u64,
    /// Capacity of the cache in bytes.
    pub cache_capacity: u64,
    /// Bytes of the cache in use.
    pub cache_used: u64,
    /// Reads that the cache answered, as a fraction of all; none before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_ratio: Option<f64>,
    /// Bytes that the server does not have yet.
    pub unsent_bytes: u64,
    /// Files with such bytes.
    pub unsent_files: u64,
    /// Changes of names that the server has yet to make.
    pub unsent_names: u64,
    /// What has happened last, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
}
