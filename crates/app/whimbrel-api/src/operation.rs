//! Operations: work that continues in the daemon after the request was answered.
//!
//! An operation runs until it has succeeded, failed or was cancelled, and then never changes again. The
//! daemon retains ended operations for a while, so that a caller who lost the connection can still query the
//! result.

use crate::openapi_names::Name;
use crate::{ApiError, DowntimeInfo, EvacuateReport, ThrottleReport, TransferReport};
use serde::{Deserialize, Serialize};
use std::{fmt, num::ParseIntError, path::PathBuf, str::FromStr};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, RefName, WitnessAddress};

/// Number of an operation, unique while the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct OperationId(pub u64);

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for OperationId {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        text.parse().map(Self)
    }
}

/// State of an operation at one instant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Number of the operation.
    pub id: OperationId,
    /// Kind of the operation.
    pub kind: OperationKind,
    /// Machine, capsule or path that it works on, as the caller named it.
    pub subject: String,
    /// Time of the start.
    pub started_ms: u64,
    /// Progress of the operation.
    pub progress: Progress,
    /// Whether it runs, and the result if it has ended.
    #[serde(flatten)]
    pub state: OperationState,
}

/// Kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperationKind {
    /// Takes a capsule of a machine that keeps running.
    Checkpoint,
    /// Takes a capsule of a machine and ends the machine.
    Suspend,
    /// Takes a machine back to an earlier capsule.
    Rewind,
    /// Creates a machine from a capsule.
    Resume,
    /// Creates several machines from a capsule.
    Clone,
    /// Migrates a machine to another host.
    Migrate,
    /// Migrates all machines to other hosts.
    Evacuate,
    /// Creates a standby of a machine.
    Protect,
    /// Switches a machine over to its standby.
    Failover,
    /// Deletes objects that no ref needs.
    Gc,
    /// Reads and checks everything in the store.
    Verify,
    /// Fetches damaged and missing objects of capsules.
    Repair,
    /// Encrypts what the store had before it was encrypted.
    Seal,
    /// Writes a capsule or an image to a file.
    Export,
    /// Reads a capsule or a disk from a file.
    Import,
    /// Fetches a capsule.
    Pull,
    /// Sends a machine or a capsule to another host.
    Push,
    /// Lists a bucket, or removes something there.
    Bucket,
    /// Indexes a file for the hash cache.
    Cache,
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// Phase of an operation. In JSON, the field `state` has the kind, and the other fields stand beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum OperationState {
    /// Operation is running.
    Running,
    /// Operation has ended without an error.
    Succeeded {
        /// Result of the operation.
        result: OperationResult,
    },
    /// Operation has ended with an error.
    Failed {
        /// Cause of the failure, and the state that is left.
        error: ApiError,
    },
    /// Operation was cancelled.
    Cancelled {
        /// State that is left, like `the machine runs on, nothing was stored`.
        left: String,
    },
}

impl OperationState {
    /// Whether the operation has ended.
    pub fn is_ended(&self) -> bool {
        !matches!(self, Self::Running)
    }
}

/// Progress of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// Current stage, like `copying round 2` or `writing the index`.
    pub stage: String,
    /// Units of this stage that are done.
    pub done: u64,
    /// Units of this stage in total, once that is known. The number may grow.
    pub total: Option<u64>,
    /// Unit of the counts.
    pub unit: Unit,
    /// Recent rate in units per second.
    pub rate_per_s: Option<f64>,
    /// Further information as text.
    pub detail: Option<String>,
    /// Rounds of a migration that have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<RoundInfo>,
    /// Progress of the page fetch, once the machine runs on the target of a postcopy migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyInfo>,
}

impl Progress {
    /// Progress at the start of a stage of unknown length.
    pub fn stage(stage: impl Into<String>, unit: Unit) -> Self {
        Self {
            stage: stage.into(),
            done: 0,
            total: None,
            unit,
            rate_per_s: None,
            detail: None,
            rounds: vec![],
            postcopy: None,
        }
    }
}

/// Unit of the progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Bytes of data.
    Bytes,
    /// Pages of 4 KiB.
    Pages,
    /// Things: machines, capsules, packs.
    Items,
}

/// Result of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OperationResult {
    /// Capsule that was taken of a machine that keeps running.
    Checkpoint(CaptureReport),
    /// Capsule that was taken of a machine that was ended.
    Suspend(CaptureReport),
    /// Machine that was taken back to an earlier capsule.
    Rewind {
        /// Name of the machine.
        #[schema(value_type = Name)]
        machine: MachineName,
        /// Capsule that the machine was taken back to.
        #[schema(value_type = String)]
        capsule: CapsuleId,
        /// Capsule of the machine as it was before.
        #[schema(value_type = String)]
        before: CapsuleId,
        /// Tag of the capsule `before`, which keeps it.
        #[schema(value_type = Name)]
        tag: RefName,
        /// Time from the request until its CPUs ran.
        to_running_ms: f64,
    },
    /// Machine that was resumed.
    Resume {
        /// Name of the machine, in a list as for clones.
        #[schema(value_type = Vec<Name>)]
        machines: Vec<MachineName>,
        /// Time from the request until its CPUs ran.
        to_running_ms: f64,
    },
    /// Machines that were cloned.
    Clone {
        /// Names of the machines.
        #[schema(value_type = Vec<Name>)]
        machines: Vec<MachineName>,
        /// Time from the request until the CPUs of the last one ran.
        to_running_ms: f64,
    },
    /// Machine that was migrated.
    Migrate {
        /// Target of the migration.
        #[schema(value_type = Name)]
        host: HostName,
        /// Downtime as the hosts measured it.
        downtime_ms: f64,
        /// Parts of the downtime.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pause: Option<Box<DowntimeInfo>>,
        /// Time from the request to the end.
        total_ms: f64,
        /// Total bytes on the wire.
        wire_bytes: u64,
        /// Rounds; the machine was paused during the last one.
        rounds: Vec<RoundInfo>,
        /// Outcome for the network ports.
        network: NetworkHandover,
        /// Cost of the page fetch, if it was a postcopy migration.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        postcopy: Option<PostcopyInfo>,
        /// Measures that slowed down the machine.
        #[serde(default, skip_serializing_if = "ThrottleReport::is_nothing")]
        slowed: ThrottleReport,
        /// Memory that the guest released before the first round.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<u64>)]
        freed: Option<ByteSize>,
        /// Whether the machine was paused by its user and still is.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        paused: bool,
    },
    /// Outcome for each machine of a host.
    Evacuate(EvacuateReport),
    /// Machine that is protected from now on.
    Protect {
        /// Host of the standby.
        #[schema(value_type = Name)]
        host: HostName,
        /// Witness; none if a person decides about a takeover.
        #[schema(value_type = Option<String>)]
        witness: Option<WitnessAddress>,
        /// Time for which the machine was paused at the end of seeding.
        pause_ms: f64,
        /// Time from the request until the machine was protected.
        total_ms: f64,
        /// Bytes on the wire for seeding.
        wire_bytes: u64,
    },
    /// Machine that was switched over to its standby.
    Failover {
        /// Host of the standby, where the machine runs now.
        #[schema(value_type = Name)]
        host: HostName,
        /// Time from the last instruction here until the machine ran there; on a standby, from the request.
        downtime_ms: f64,
    },
    /// Garbage collection of the store.
    Gc {
        /// Bytes that were freed on disk.
        #[schema(value_type = u64)]
        freed: ByteSize,
        /// Bytes that the store uses now.
        #[schema(value_type = u64)]
        stored: ByteSize,
        /// Bytes that were moved to new packs.
        #[schema(value_type = u64)]
        moved: ByteSize,
        /// Packs that are deleted once earlier writers have ended.
        packs_waiting: u64,
    },
    /// Check of the store. There is no damage if `damaged` is empty.
    Verify {
        /// Number of capsules that were checked.
        capsules: u64,
        /// Number of pages and other objects that were checked.
        objects: u64,
        /// Bytes that were read.
        #[schema(value_type = u64)]
        bytes: ByteSize,
        /// Places with damage.
        damaged: Vec<Damage>,
    },
    /// Content that is encrypted now.
    Seal {
        /// Bytes that were not encrypted and are gone.
        #[schema(value_type = u64)]
        sealed: ByteSize,
        /// Bytes that are not encrypted still.
        #[schema(value_type = u64)]
        plain: ByteSize,
    },
    /// Capsules that were damaged; none if the list is empty.
    Repair {
        /// Capsules with damaged or missing objects.
        capsules: Vec<RepairedCapsule>,
        /// Damaged places that nothing needs any more; the next garbage collections free them.
        dropped: u64,
        /// Where the objects were looked for.
        asked: Vec<String>,
        /// First reason why an object did not come.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
    /// File that was written.
    Export {
        /// Path of the file.
        #[schema(value_type = String)]
        path: PathBuf,
        /// Length of the file.
        #[schema(value_type = u64)]
        bytes: ByteSize,
    },
    /// Capsule that was read from a file.
    Import {
        /// Id of the new capsule.
        #[schema(value_type = String)]
        capsule: CapsuleId,
        /// Bytes that were added to the store.
        #[schema(value_type = u64)]
        added: ByteSize,
    },
    /// Capsules of a bucket.
    Bucket {
        /// Bytes that were freed there.
        #[schema(value_type = u64)]
        freed: ByteSize,
        /// What has a name there.
        capsules: Vec<crate::BucketCapsule>,
    },
    /// Capsule that was fetched.
    Pull(TransferReport),
    /// Machine or capsule that was sent to another host.
    Push {
        /// Cost of the transfer.
        #[serde(flatten)]
        report: TransferReport,
        /// Machine that was handed off: it is resumed there from now on, and no longer here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<Name>)]
        machine: Option<MachineName>,
    },
    /// Upload of the capsules of a machine that was started or stopped.
    Follow {
        /// Target, a host or a pool; none if the upload was stopped.
        host: Option<String>,
    },
    /// File that was indexed for the hash cache, or removed from it.
    Cache {
        /// Number of its pages that are not zero.
        pages: u64,
    },
}

/// Cost of a capsule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CaptureReport {
    /// Id of the new capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Time for which the machine was paused; for a suspend, until the capsule was durable.
    pub pause_ms: f64,
    /// Time from the request until the capsule was durable.
    pub total_ms: f64,
    /// Bytes that were added to the store.
    pub bytes_added: u64,
    /// Rounds; the machine was paused during the last one.
    pub rounds: Vec<RoundInfo>,
    /// Memory that the guest released through its balloon, if that was requested.
    #[serde(default, alias = "squeezed", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub balloon_freed: Option<ByteSize>,
}

/// Round: one pass over the dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct RoundInfo {
    /// Number of pages that were read.
    pub pages: u64,
    /// Bytes that were sent or stored, after pages that are there already were left out, and after
    /// compression.
    pub bytes: u64,
    /// Time that the round took.
    pub ms: f64,
    /// Start of the round, since the start of the first one.
    #[serde(default)]
    pub begun_ms: f64,
    /// Limit for the rate in bytes per second [default: none].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub limit: Option<ByteSize>,
    /// Pages that were written again before the round reached them, and were left for a later round.
    #[serde(default)]
    pub skipped: u64,
    /// Pages that were dirtied during the round and remained after it.
    #[serde(default)]
    pub left: u64,
    /// Predicted downtime if the machine had been paused after the round, once it could be predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<f64>,
}

/// Page fetch of a postcopy migration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct PostcopyInfo {
    /// Missing pages at the start of the fetch; none if the daemon was restarted since.
    #[serde(default, alias = "owed_pages", skip_serializing_if = "Option::is_none")]
    pub initial_missing_pages: Option<u64>,
    /// Pages that are missing now, as far as it is known.
    pub missing_pages: u64,
    /// Number of times that the guest waited for a page.
    pub faults: u64,
    /// Total time of these waits.
    pub waited_ms: f64,
    /// Longest of these waits.
    pub longest_ms: f64,
    /// Bytes on the wire since the start of the fetch.
    pub bytes: u64,
    /// Cause if no pages arrive at the moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
}

/// Outcome for the network ports of a migrated machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum NetworkHandover {
    /// Machine has no ports that are plugged in.
    NoPorts,
    /// Ports joined their bridges and were announced to the network.
    Announced {
        /// Number of ports.
        ports: u32,
    },
    /// Ports stay in the network of the home host, through a tunnel.
    Tunnelled {
        /// Number of ports.
        ports: u32,
        /// Home of the machine.
        #[schema(value_type = Name)]
        home: HostName,
    },
    /// Some ports are unplugged, because the target has no such bridge.
    Unplugged {
        /// Bridges that the target does not have.
        missing: Vec<String>,
    },
}

/// Damage in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Damage {
    /// Pack, index or capsule with the damage, as the store names it.
    pub place: String,
    /// Description of the damage.
    pub problem: String,
}

/// Outcome of a repair for one capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RepairedCapsule {
    /// Id of the capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Refs that name it.
    #[schema(value_type = Vec<Name>)]
    pub names: Vec<RefName>,
    /// Objects that were stored again. One that several capsules share counts for one of them.
    pub healed: u64,
    /// Objects that are known to be missing still.
    pub missing: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorCode;

    fn operation(state: OperationState) -> Operation {
        let progress = Progress::stage("copying round 1", Unit::Pages);
        Operation {
            id: OperationId(7),
            kind: OperationKind::Checkpoint,
            subject: "web".into(),
            started_ms: 1,
            progress,
            state,
        }
    }

    #[test]
    fn every_end_of_an_operation_survives_its_json() {
        let result = OperationResult::Checkpoint(CaptureReport {
            capsule: "ab".repeat(32).parse().unwrap(),
            pause_ms: 1.7,
            total_ms: 900.0,
            bytes_added: u64::MAX,
            balloon_freed: None,
            rounds: vec![RoundInfo { pages: 3, bytes: 4, ms: 0.5, ..RoundInfo::default() }],
        });
        let error = ApiError::new(ErrorCode::NoSpace, "the store is full");
        for state in [
            OperationState::Running,
            OperationState::Succeeded { result },
            OperationState::Failed { error },
            OperationState::Cancelled { left: "the machine runs on".into() },
        ] {
            let before = operation(state);
            let json = serde_json::to_string(&before).unwrap();
            assert_eq!(serde_json::from_str::<Operation>(&json).unwrap(), before, "{json}");
        }
    }

    #[test]
    fn the_state_stands_beside_the_other_fields() {
        let json =
            serde_json::to_value(operation(OperationState::Cancelled { left: "nothing".into() })).unwrap();
        assert_eq!((&json["state"], &json["left"]), (&"cancelled".into(), &"nothing".into()));
    }
}
