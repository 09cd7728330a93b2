//! How machines moved: what a host remembers of the migrations it began.

use crate::{MigrateRequest, NetworkHandover, RoundInfo};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;
use whimbrel_core::{HostName, MachineName};

/// Names a migration: eight hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct MigrationId(pub String);

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// A migration that has ended, one way or the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationRecord {
    /// Its name.
    pub id: MigrationId,
    /// The machine.
    #[schema(value_type = String)]
    pub machine: MachineName,
    /// The host it was on.
    #[schema(value_type = String)]
    pub from: HostName,
    /// When it began.
    pub started_ms: u64,
    /// What was asked.
    pub request: MigrateRequest,
    /// From the request to the end.
    pub total_ms: f64,
    /// The rounds that ended. If the machine moved, the last one was with the machine stopped.
    pub rounds: Vec<RoundInfo>,
    /// How it ended.
    #[serde(flatten)]
    pub end: MigrationEnd,
}

/// How a migration ended. In JSON: a field `end` and, beside it, what belongs to it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "end", rename_all = "lowercase")]
pub enum MigrationEnd {
    /// The machine runs on the other host.
    Moved {
        /// How long no CPU of it ran.
        downtime_ms: f64,
        /// What that time went to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pause: Option<DowntimeInfo>,
        /// Bytes on the wire, all of them.
        wire_bytes: u64,
        /// What ended the rounds.
        stopped_by: RoundsEnd,
        /// What became of its network ports.
        network: NetworkHandover,
    },
    /// It failed or was cancelled.
    Failed {
        /// Why.
        reason: String,
    },
}

/// What the time went to in which no CPU of a machine ran that moved: its parts, in this order, in
/// milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct DowntimeInfo {
    /// Until the CPUs stood still.
    pub stop_ms: f64,
    /// Until it was known which pages are left.
    pub scan_ms: f64,
    /// Taking the state of CPUs and devices, while pages are on their way.
    pub devices_ms: f64,
    /// The last pages, beside that.
    pub pages_ms: f64,
    /// The target: loading that state, making disks durable.
    pub load_ms: f64,
    /// Between the hosts: that state on the wire, the answer.
    pub link_ms: f64,
    /// Writing the handover down, which is the commit point.
    pub commit_ms: f64,
    /// From there until the CPUs ran on the target.
    pub start_ms: f64,
}

impl DowntimeInfo {
    /// The parts with their names.
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

/// What ended the rounds of a migration, so that the machine was stopped for the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RoundsEnd {
    /// Under 256 KiB were left.
    LittleLeft,
    /// What was left would travel within the downtime that was allowed.
    WithinDowntime,
    /// The next round would have needed more than the maximum rate.
    RateAboveMax,
    /// Rounds no longer helped.
    Plateau,
    /// There were as many rounds as there may be; none, if the machine was to stand still.
    RoundsOver,
}

impl fmt::Display for RoundsEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LittleLeft => "little was left",
            Self::WithinDowntime => "the rest would travel within the allowed downtime",
            Self::RateAboveMax => "the next round would have needed more than the maximum rate",
            Self::Plateau => "rounds no longer helped",
            Self::RoundsOver => "there were as many rounds as there may be",
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
