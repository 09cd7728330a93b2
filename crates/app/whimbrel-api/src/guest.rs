//! What concerns the optional program inside a guest: what a guest may ask for, and what was done to a
//! machine that wrote faster than it could be copied.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::HostName;

/// What a machine may ask for from inside, for itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SelfService {
    /// To be moved to one of these hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub migrate: Vec<HostName>,
    /// To have its state kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoint: bool,
}

impl SelfService {
    /// Whether it may ask for nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What was done to a machine that wrote faster than it could be copied, until it had moved.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ThrottleReport {
    /// Processes that its guest held, as `name (pid)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stunned: Vec<String>,
    /// Processes that wrote as fast and were not held, because the guest's settings forbid it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spared: Vec<String>,
    /// The part of the time for which its virtual CPUs ran, in percent, if that was limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<u8>,
    /// What it wrote to its disks that went to both hosts at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirrored: Option<Box<MirroredWrites>>,
}

/// What a machine wrote to its disks on both hosts at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct MirroredWrites {
    /// Writes.
    pub writes: u64,
    /// Bytes of theirs, in whole pages.
    pub bytes: u64,
    /// How long each of them waited for the other host, on average.
    pub waited_us: u64,
    /// How long one of them did at most.
    pub longest_us: u64,
}

impl ThrottleReport {
    /// Whether nothing was done.
    pub fn is_nothing(&self) -> bool {
        self.stunned.is_empty() && self.cpu_percent.is_none() && self.mirrored.is_none()
    }
}
