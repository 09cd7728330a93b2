//! Moving all machines of a host away.

use crate::{ApiError, MachineState};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, HostName, MachineName};

/// Body of `POST /v1/evacuate`: move every machine that runs on a host to other hosts, those that dirty least
/// first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EvacuateRequest {
    /// The host to empty, which the one that is asked trusts; that one itself if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// Where to, by the names that the host to empty has for them; every host that it trusts and can reach if
    /// empty.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub to: Vec<HostName>,
    /// Machines that move at the same time, 1 to 16; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<u32>,
    /// Move nothing, say what would be moved where.
    #[serde(default)]
    pub dry_run: bool,
    /// Begin no further migration after one has failed.
    #[serde(default)]
    pub stop_on_failure: bool,
    /// How long the dirty sets are looked at to put the machines in order, 10 to 60,000; 1,000 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_ms: Option<u64>,
    /// Bytes a second that each migration uses at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
}

/// What became of the machines of a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvacuateReport {
    /// Whether no machine runs here any more; of a dry run, whether none would.
    pub empty: bool,
    /// Whether nothing was to be moved.
    pub dry_run: bool,
    /// In the order in which they were to move; then those that were not to.
    pub machines: Vec<EvacuatedMachine>,
    /// Machines that run there still, since the host that was asked may not read and write them there. It
    /// does not learn which.
    #[serde(default, skip_serializing_if = "is_none")]
    pub withheld: u32,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// What became of one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvacuatedMachine {
    /// Its name.
    #[schema(value_type = String)]
    pub name: MachineName,
    /// Guest memory.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Pages it dirtied while it was looked at; none if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirtied_pages: Option<u64>,
    /// Where it was to go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// What became of it.
    pub outcome: MoveOutcome,
}

/// What became of a machine of a host that was to be emptied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MoveOutcome {
    /// It would be moved; nothing was, on request.
    Planned,
    /// It runs on its new host.
    Moved {
        /// How long no CPU of it ran, as the hosts measured it.
        downtime_ms: f64,
        /// From the request to the end.
        total_ms: f64,
    },
    /// No host has room for it.
    NoRoom {
        /// Why not, a line a host.
        reasons: Vec<String>,
    },
    /// It could not be moved.
    Failed {
        /// Why, and in which state it is now.
        error: ApiError,
    },
    /// Its turn did not come, because another one had failed.
    NotBegun,
    /// Nothing of it runs here, or it is on its way already.
    Left {
        /// What it is.
        state: MachineState,
    },
}
