//! Evacuation: the migration of all machines of a host to other hosts.

use crate::openapi_names::Name;
use crate::{ApiError, MachineState};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, HostName, MachineName};

/// Body of `POST /v1/evacuate`: migrate every machine that runs on a host to other hosts, those that write
/// least first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EvacuateRequest {
    /// Host to empty, which the daemon trusts [default: the host of the daemon].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Targets, by the names that the host to empty has for them; if empty, every host that it trusts and
    /// reaches.
    #[serde(default)]
    #[schema(value_type = Vec<Name>)]
    pub to: Vec<HostName>,
    /// Machines that migrate at the same time, 1 to 16 [default: 1].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<u32>,
    /// Move nothing, and report where each machine would go.
    #[serde(default)]
    pub dry_run: bool,
    /// Start no further migration after one has failed.
    #[serde(default)]
    pub stop_on_failure: bool,
    /// Milliseconds to sample the dirty pages, which decide the order, 10 to 60,000 [default: 1000].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_ms: Option<u64>,
    /// Limit for the rate of each migration, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
}

/// Result of an evacuation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvacuateReport {
    /// Whether no machine runs on the host any more; for a dry run, whether none would.
    pub empty: bool,
    /// Whether this was a dry run.
    pub dry_run: bool,
    /// Machines in the order of their migrations, then those that stay.
    pub machines: Vec<EvacuatedMachine>,
    /// Number of machines that still run there because the asking host may not read and write them.
    #[serde(default, skip_serializing_if = "is_none")]
    pub withheld: u32,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// Machine of a host that is evacuated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvacuatedMachine {
    /// Name of the machine.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Size of the guest memory.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Pages that it dirtied during the sample; none if it was not sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirtied_pages: Option<u64>,
    /// Target of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Outcome for the machine.
    pub outcome: MoveOutcome,
}

/// Outcome of an evacuation for one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MoveOutcome {
    /// Machine that would move, in a dry run.
    Planned,
    /// Machine that runs on its target.
    Moved {
        /// Downtime as the hosts measured it.
        downtime_ms: f64,
        /// Time from the request to the end.
        total_ms: f64,
    },
    /// Machine for which no host has capacity.
    NoRoom {
        /// Reason of each host, one line each.
        reasons: Vec<String>,
    },
    /// Machine whose migration failed.
    Failed {
        /// Cause, and the state of the machine.
        error: ApiError,
    },
    /// Machine that was not tried, because another migration had failed.
    NotBegun,
    /// Machine that does not run here, or is migrating already.
    Left {
        /// State of the machine.
        state: MachineState,
    },
}
