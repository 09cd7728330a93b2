//! Scheduled care: work that the daemon does by itself, and which of its capsules stay.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{HostName, MachineName};

/// Body of `POST /v1/schedules`: work to do at an interval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleRequest {
    /// Name for the schedule: up to 30 letters, digits and `-_`.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Work to do.
    pub work: ScheduledWork,
    /// Interval, at least a minute. Runs begin at its multiples since the beginning of 1970 (UTC).
    pub every_ms: u64,
    /// Shift of the runs: with an interval of a day, their time of the day.
    #[serde(default)]
    pub offset_ms: u64,
}

/// Work of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum ScheduledWork {
    /// Take a capsule of a running machine, and remove old ones of the schedule.
    Checkpoint {
        /// Name of the machine.
        #[schema(value_type = Name)]
        machine: MachineName,
        /// Take a disk-only capsule.
        #[serde(default)]
        disks_only: bool,
        /// Capsules to retain [default: all].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retain: Option<Retention>,
    },
    /// Copy the newest capsule of a machine to a host, a pool or a bucket.
    Push {
        /// Name of the machine.
        #[schema(value_type = Name)]
        machine: MachineName,
        /// Target host; none for a pool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<Name>)]
        host: Option<HostName>,
        /// Target folder of a pool, or a bucket, as for a push.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pool: Option<String>,
        /// Copies to retain at the host [default: all] or in the bucket [default: the newest]; a pool has a
        /// policy of its own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retain: Option<Retention>,
    },
    /// Read and check everything in the store.
    Verify {
        /// Bucket that is checked [default: the store of the host].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bucket: Option<String>,
    },
    /// Delete objects that no ref needs.
    Gc {
        /// Bucket in which to do so [default: the store of the host].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bucket: Option<String>,
    },
}

impl ScheduledWork {
    /// Machine that the work is about; none for the whole store.
    pub fn machine(&self) -> Option<&MachineName> {
        match self {
            Self::Checkpoint { machine, .. } | Self::Push { machine, .. } => Some(machine),
            Self::Verify { .. } | Self::Gc { .. } => None,
        }
    }

    /// Like [`Self::machine`], to change it.
    pub fn machine_mut(&mut self) -> Option<&mut MachineName> {
        match self {
            Self::Checkpoint { machine, .. } | Self::Push { machine, .. } => Some(machine),
            Self::Verify { .. } | Self::Gc { .. } => None,
        }
    }
}

/// Capsules of a schedule that stay: the newest ones, and the newest of each of the last hours, days, weeks
/// and months (UTC) that have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Number of newest capsules.
    #[serde(default)]
    pub last: u32,
    /// Number of hours.
    #[serde(default)]
    pub hourly: u32,
    /// Number of days.
    #[serde(default)]
    pub daily: u32,
    /// Number of weeks, from Monday.
    #[serde(default)]
    pub weekly: u32,
    /// Number of months.
    #[serde(default)]
    pub monthly: u32,
    /// Remove even the newest capsule if the numbers say so.
    #[serde(default)]
    pub may_empty: bool,
}

/// A schedule and its last runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleInfo {
    /// Definition of the schedule.
    #[serde(flatten)]
    pub schedule: ScheduleRequest,
    /// Time of its creation.
    pub created_ms: u64,
    /// Time of the next run.
    pub next_ms: u64,
    /// Whether it runs now.
    pub running: bool,
    /// Last runs, oldest first.
    pub runs: Vec<ScheduledRun>,
    /// Capsules of the schedule that are retained, oldest first; those of a push are at the other host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
}

/// A run of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduledRun {
    /// Time of its beginning.
    pub started_ms: u64,
    /// Time of its end.
    pub ended_ms: u64,
    /// Whether it has done its work.
    pub succeeded: bool,
    /// What it did, or why it failed.
    pub text: String,
}

/// Body of `POST /v1/schedules/{name}/run`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleRunRequest {
    /// Change nothing; say which capsules would be removed.
    #[serde(default)]
    pub dry_run: bool,
}

/// Answer to a run of a schedule on request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleReport {
    /// The run; none after a dry run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<ScheduledRun>,
    /// Tags that stay.
    pub retained: Vec<String>,
    /// Tags that were removed, or would be.
    pub removed: Vec<String>,
}
