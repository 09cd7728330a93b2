//! Protection: the request for a standby, and the state and figures of a protection.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, HostName, WitnessAddress};

/// Body of `POST /v1/machines/{name}/protect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectRequest {
    /// Host of the standby.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Witness, which decides who runs the machine if the hosts lose contact: a third host, or an etcd as
    /// `etcd://HOST:PORT[,HOST:PORT]`. Without one there is no automatic takeover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub witness: Option<WitnessAddress>,
    /// Encoding of changes, and the event that output waits for.
    #[serde(default)]
    pub mode: ProtectMode,
    /// Length of an epoch in milliseconds, 25 to 1000 [default: 50]; in mode replay 100 to 10000 [default:
    /// 1000].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch_ms: Option<u64>,
    /// Longest epoch of a machine that sends nothing, as a multiple of `epoch_ms`, and never over a second [1
    /// to 20, default 4; 1 in a group and in the other modes]. Such an epoch ends as soon as output waits and
    /// the usual length has passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stretch: Option<u32>,
    /// Unit in which changes are found [default: 64 bytes].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<ProtectBlock>,
    /// Lease in milliseconds, 200 to 60000 [default: 400]: how long the primary may be silent before the
    /// standby may take over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// Host of the next standby, set up automatically after a takeover with the same settings. May be the
    /// primary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub then: Option<HostName>,
    /// Spare hosts, 16 at most. If the standby is lost while the machine runs here, the first of them becomes
    /// the standby, and the lost one becomes the last spare; after a takeover, the machine's old host does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Name>)]
    pub spares: Vec<HostName>,
    /// Epochs that the standby's host stores as capsules [default: none]. `NAME@-5m` names one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<SnapshotRule>,
    /// Consistency group: epochs of all its machines on this host end at one instant, and their output leaves
    /// when all standbys have the epoch. The slowest machine determines the length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Limit for the rate to the standby, in bytes per second. A lower rate makes epochs longer and delays
    /// output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
}

/// Rule for epoch snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRule {
    /// Milliseconds between two snapshots, 1000 to a week.
    pub every_ms: u64,
    /// Number of newest snapshots to retain, 1 to 10,000. Older ones without a tag lose their names.
    pub count: u32,
}

/// Mode of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectMode {
    /// Changed blocks only, in a compact encoding.
    #[default]
    Epoch,
    /// Complete pages without encoding, as in Remus.
    Remus,
    /// Long epochs. Output waits only until the standby has the inputs, which it replays after a takeover.
    Replay,
}

/// Unit in which changes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub enum ProtectBlock {
    /// Blocks of 64 bytes.
    #[default]
    #[serde(rename = "64")]
    B64,
    /// Blocks of 128 bytes.
    #[serde(rename = "128")]
    B128,
    /// Blocks of 256 bytes.
    #[serde(rename = "256")]
    B256,
    /// Blocks of one page.
    #[serde(rename = "page")]
    Page,
}

/// Body of `POST /v1/machines/{name}/failover`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FailoverRequest {
    /// Confirmation, on a standby without a witness, that the primary no longer runs the machine.
    #[serde(default)]
    pub primary_is_dead: bool,
    /// Take over although the host of the primary answers: whatever runs there is stopped later.
    #[serde(default)]
    pub force: bool,
}

/// Side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectRole {
    /// Host that runs the machine.
    Primary,
    /// Host where the standby waits.
    Standby,
}

/// State of a protection. The alias is the name of version 0.1, read for one release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ProtectState {
    /// First copy to the standby, which cannot take over yet.
    #[serde(alias = "filling")]
    Seeding,
    /// Standby has the complete machine as of the last epoch.
    Protected,
    /// No standby can take over.
    Unprotected {
        /// Cause of that state.
        reason: String,
    },
    /// Machine is cut off until its ownership is known.
    Fenced {
        /// Event that the host waits for.
        reason: String,
    },
}

/// Protection as one of its sides sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProtectionInfo {
    /// Side of this host.
    pub role: ProtectRole,
    /// Host of the other side.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Witness of the protection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub witness: Option<WitnessAddress>,
    /// Whether the witness has answered recently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness_answers: Option<bool>,
    /// Spare hosts, the next standby first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Name>)]
    pub spares: Vec<HostName>,
    /// Consistency group of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Encoding of changes, and the event that output waits for.
    #[serde(default)]
    pub mode: ProtectMode,
    /// State of the protection.
    pub state: ProtectState,
    /// Last epoch that the standby has.
    pub epoch: u64,
    /// Figures of the epochs, on the primary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<ProtectFigures>,
    /// Milliseconds since the standby got the last epoch.
    pub lag_ms: u64,
}

/// Parts of the pause of an epoch, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EpochPauseParts {
    /// Time until the CPUs were stopped.
    pub stop_ms: f64,
    /// Time to find the dirty pages.
    pub scan_ms: f64,
    /// Time to copy the dirty pages.
    pub copy_ms: f64,
    /// Time to wait for the device state after that. It is saved in parallel.
    pub devices_ms: f64,
    /// Time until the CPUs ran again.
    pub go_on_ms: f64,
}

/// Takeover of a machine from another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TakeoverInfo {
    /// Host that was the primary.
    #[schema(value_type = Name)]
    pub from: HostName,
    /// Time in milliseconds since 1970.
    pub at_ms: u64,
}

/// Figures of a protection. Times are of the last 1,200 epochs, bytes of all epochs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProtectFigures {
    /// Number of epochs that the standby has.
    pub epochs: u64,
    /// Median length of an epoch.
    pub epoch_ms: f64,
    /// Number of epochs that had to wait for the previous one.
    pub stretched: u64,
    /// Median pause of an epoch.
    pub pause_p50_ms: f64,
    /// Pause that 99 % of the epochs do not exceed.
    pub pause_p99_ms: f64,
    /// Medians of the parts of the pause.
    pub pause_parts: EpochPauseParts,
    /// Median time from the end of an epoch until its output left.
    pub output_delay_p50_ms: f64,
    /// Time until output left that 99 % of the epochs do not exceed.
    pub output_delay_p99_ms: f64,
    /// Average number of dirty pages of an epoch.
    pub dirty_pages: f64,
    /// Bytes of all dirty pages.
    #[schema(value_type = u64)]
    pub dirty_bytes: ByteSize,
    /// Bytes of the blocks that had changed in them.
    #[schema(value_type = u64)]
    pub changed_bytes: ByteSize,
    /// Bytes of the changed blocks without duplicates.
    #[schema(value_type = u64)]
    pub unshared_bytes: ByteSize,
    /// Bytes that were sent, including device states.
    #[schema(value_type = u64)]
    pub sent_bytes: ByteSize,
    /// Bytes of device states that were sent.
    #[schema(value_type = u64)]
    pub device_bytes: ByteSize,
    /// Pages that the standby requested again.
    pub again_pages: u64,
    /// Memory that block hashes use on this host.
    #[schema(value_type = u64)]
    pub hash_bytes: ByteSize,
}
