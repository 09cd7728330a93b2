//! Guests: programs and files inside, the operations that a guest may request, and the report about a machine
//! that was slowed down.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::HostName;

/// Operations that a guest may request for its own machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SelfService {
    /// Hosts to which the guest may request a migration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Name>)]
    pub migrate: Vec<HostName>,
    /// Whether the guest may request a checkpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoint: bool,
}

impl SelfService {
    /// Whether no operation is permitted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Measures that slowed down a machine which wrote faster than it could be copied.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ThrottleReport {
    /// Processes that the guest agent suspended, as `name (pid)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stunned: Vec<String>,
    /// Processes that wrote as fast and were not suspended, because the settings of the guest forbid it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spared: Vec<String>,
    /// Share of time for which the virtual CPUs ran, in percent, if it was limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<u8>,
    /// Disk writes that went to both hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirrored: Option<Box<MirroredWrites>>,
}

/// Disk writes that were mirrored to the target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct MirroredWrites {
    /// Number of writes.
    pub writes: u64,
    /// Bytes of these writes, in whole pages.
    pub bytes: u64,
    /// Average time for which a write waited for the target.
    pub waited_us: u64,
    /// Longest time for which a write waited.
    pub longest_us: u64,
}

impl ThrottleReport {
    /// Whether the machine was not slowed down.
    pub fn is_nothing(&self) -> bool {
        self.stunned.is_empty() && self.cpu_percent.is_none() && self.mirrored.is_none()
    }
}

/// Body of `POST /v1/machines/{name}/exec`. The answer comes when the program has ended.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program of the guest and its arguments; no shell reads them.
    pub command: Vec<String>,
    /// Environment, as `NAME=VALUE` [default: that of qemu-ga].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Input of the program, in Base64.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub input: String,
    /// Seconds to wait for its end, at most an hour [default: 60]. After that the request fails, and the
    /// program runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
}

/// End of a program in a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Exit code, if it ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Output, in Base64.
    pub stdout: String,
    /// Error output, in Base64.
    pub stderr: String,
    /// Whether output is missing, because it was longer than the 16 MiB that qemu-ga keeps.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// Body of `POST /v1/machines/{name}/files/read`: a part of a file in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FileReadRequest {
    /// Path in the guest.
    pub path: String,
    /// Place of the first byte to read.
    #[serde(default)]
    pub offset: u64,
    /// Most bytes, up to 512 KiB.
    pub length: u32,
}

/// Part of a file in a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileContent {
    /// Bytes, in Base64.
    pub data: String,
    /// Whether the file ends after them.
    pub end: bool,
}

/// Body of `POST /v1/machines/{name}/files/write`: a part of a file in the guest. The one at the beginning
/// creates the file, or empties it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FileWriteRequest {
    /// Path in the guest.
    pub path: String,
    /// Place of the first byte.
    #[serde(default)]
    pub offset: u64,
    /// Bytes in Base64, up to 512 KiB.
    pub data: String,
}
