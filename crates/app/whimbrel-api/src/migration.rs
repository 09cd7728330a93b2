//! Past migrations: the records of a source about the migrations that it started.

use crate::openapi_names::Name;
use crate::{MigrateRequest, NetworkHandover, RoundInfo};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;
use whimbrel_core::{HostName, MachineName};

/// Id of a migration: eight hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct MigrationId(pub String);

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Record of a migration that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationRecord {
    /// Id of the migration.
    pub id: MigrationId,
    /// Name of the machine.
    #[schema(value_type = Name)]
    pub machine: MachineName,
    /// Source of the migration.
    #[schema(value_type = Name)]
    pub from: HostName,
    /// Time of the start.
    pub started_ms: u64,
    /// Request for the migration.
    pub request: MigrateRequest,
    /// Time from the request to the end.
    pub total_ms: f64,
    /// Rounds that ended. If the machine moved, it was paused during the last one.
    pub rounds: Vec<RoundInfo>,
    /// End of the migration.
    #[serde(flatten)]
    pub end: MigrationEnd,
}

/// End of a migration. In JSON, the field `end` has the kind, and the other fields stand beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "end", rename_all = "lowercase")]
pub enum MigrationEnd {
    /// Machine runs on the target.
    Moved {
        /// Time in which no CPU of the machine ran.
        downtime_ms: f64,
        /// Parts of the downtime.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pause: Option<DowntimeInfo>,
        /// Total bytes on the wire.
        wire_bytes: u64,
        /// Reason for the end of the rounds.
        stopped_by: RoundsEnd,
        /// Outcome for the network ports.
        network: NetworkHandover,
    },
    /// Migration failed or was cancelled.
    Failed {
        /// Cause of the failure.
        reason: String,
    },
}

/// Parts of a downtime in milliseconds, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct DowntimeInfo {
    /// Time until the CPUs were stopped.
    pub stop_ms: f64,
    /// Time to find the pages that were left.
    pub scan_ms: f64,
    /// Time to save the state of CPUs and devices, while pages are sent.
    pub devices_ms: f64,
    /// Time to send the last pages, at the same time.
    pub pages_ms: f64,
    /// Time to load that state on the target and to make the disks durable there.
    pub load_ms: f64,
    /// Time to send that state, and to receive the answer.
    pub link_ms: f64,
    /// Time to record the handover durably, which is the commit point.
    pub commit_ms: f64,
    /// Time to notify the target and to start the CPUs.
    pub start_ms: f64,
}

impl DowntimeInfo {
    /// Parts with their names.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
        let Self { stop_ms, scan_ms, devices_ms, pages_ms, load_ms, link_ms, commit_ms, start_ms } = *self;
        [
            ("stop", stop_ms),
            ("scan", scan_ms),
            ("devices", devices_ms),
            ("pages", pages_ms),
            ("load", load_ms),
            ("link", link_ms),
            ("commit", commit_ms),
            ("start", start_ms),
        ]
    }
}

/// Reason to pause the machine for the last round of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RoundsEnd {
    /// Less than 256 KiB were left.
    LittleLeft,
    /// Predicted downtime was within the limit.
    WithinDowntime,
    /// Next round would have exceeded the maximum rate.
    RateAboveMax,
    /// More rounds would not have helped.
    Plateau,
    /// Limit of rounds was reached, or the machine was to be paused for the whole copy.
    RoundsOver,
}

impl fmt::Display for RoundsEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LittleLeft => "little was left",
            Self::WithinDowntime => "the predicted downtime was within the limit",
            Self::RateAboveMax => "the next round would have exceeded the maximum rate",
            Self::Plateau => "more rounds would not have helped",
            Self::RoundsOver => "the limit of rounds was reached",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_its_json_and_says_how_it_ended() {
        let request = r#"{"host": "beta", "rate_min": 12500000, "adaptive": true}"#;
        let moved = MigrationEnd::Moved {
            downtime_ms: 12.5,
            pause: Some(DowntimeInfo { stop_ms: 0.5, load_ms: 4.0, ..DowntimeInfo::default() }),
            wire_bytes: 1,
            stopped_by: RoundsEnd::RateAboveMax,
            network: NetworkHandover::NoPorts,
        };
        for (end, name) in [(moved, "moved"), (MigrationEnd::Failed { reason: "cancelled".into() }, "failed")]
        {
            let before = MigrationRecord {
                id: MigrationId("00c0ffee".into()),
                machine: "web".parse().unwrap(),
                from: "alpha".parse().unwrap(),
                started_ms: 7,
                request: serde_json::from_str(request).unwrap(),
                total_ms: 1.0,
                rounds: vec![RoundInfo { pages: 3, downtime_ms: Some(4.0), ..RoundInfo::default() }],
                end,
            };
            let json = serde_json::to_value(&before).unwrap();
            assert_eq!(json["end"], name);
            assert_eq!(serde_json::from_value::<MigrationRecord>(json).unwrap(), before);
        }
    }
}
