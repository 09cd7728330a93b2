//! Operations: work that goes on in the daemon after the request was answered.
//!
//! An operation runs until it is succeeded, failed or cancelled, and then never changes again. The daemon
//! keeps ended ones for a while, so that a caller who lost its connection can still ask how it ended.

use crate::{ApiError, DowntimeInfo, EvacuateReport, ThrottleReport, TransferReport};
use serde::{Deserialize, Serialize};
use std::{fmt, num::ParseIntError, path::PathBuf, str::FromStr};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, WitnessAddress};

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

/// One operation at one instant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Its number.
    pub id: OperationId,
    /// What it does.
    pub kind: OperationKind,
    /// What it works on: a machine, a capsule, a path; as the caller named it.
    pub subject: String,
    /// When it began.
    pub started_ms: u64,
    /// How far it is.
    pub progress: Progress,
    /// Whether it goes on, and how it ended.
    #[serde(flatten)]
    pub state: OperationState,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperationKind {
    /// Keeps the state of a machine that runs on.
    Checkpoint,
    /// Keeps the state of a machine and ends it.
    Suspend,
    /// Makes a machine from a capsule.
    Resume,
    /// Makes several.
    Clone,
    /// Moves a machine to another host.
    Migrate,
    /// Moves all machines to other hosts.
    Evacuate,
    /// Makes a standby of a machine.
    Protect,
    /// Lets a standby have its machine.
    Failover,
    /// Frees what no ref reaches.
    Gc,
    /// Reads everything in the store and checks it.
    Verify,
    /// Writes a capsule or an image to a file.
    Export,
    /// Reads one from a file.
    Import,
    /// Brings a capsule here.
    Pull,
    /// Brings a machine or a capsule to another host.
    Push,
    /// Reads a file for the cache of pages.
    Cache,
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Checkpoint => "checkpoint",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Clone => "clone",
            Self::Migrate => "migrate",
            Self::Evacuate => "evacuate",
            Self::Protect => "protect",
            Self::Failover => "failover",
            Self::Gc => "gc",
            Self::Verify => "verify",
            Self::Export => "export",
            Self::Import => "import",
            Self::Pull => "pull",
            Self::Push => "push",
            Self::Cache => "cache",
        })
    }
}

/// Whether an operation goes on, and how it ended. In JSON: a field `state` and, beside it, what belongs to
/// it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum OperationState {
    /// It goes on.
    Running,
    /// It did what it was asked.
    Succeeded {
        /// What came of it.
        result: OperationResult,
    },
    /// It could not.
    Failed {
        /// Why, and in which state things are now.
        error: ApiError,
    },
    /// Somebody cancelled it.
    Cancelled {
        /// What is left: `the machine runs on, nothing was stored`.
        left: String,
    },
}

impl OperationState {
    /// Whether nothing will change any more.
    pub fn is_ended(&self) -> bool {
        !matches!(self, Self::Running)
    }
}

/// How far an operation is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// What it does now: `copying round 2`, `writing the index`.
    pub stage: String,
    /// How much of this stage is done.
    pub done: u64,
    /// How much there is to do, once that is known. It may grow.
    pub total: Option<u64>,
    /// What is counted.
    pub unit: Unit,
    /// Units a second lately.
    pub rate_per_s: Option<f64>,
    /// Something worth knowing beside the numbers.
    pub detail: Option<String>,
    /// Rounds that have ended, of a migration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<RoundInfo>,
    /// What the machine still lacks, of a migration that has let it run on the target before all of it was
    /// there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyInfo>,
}

impl Progress {
    /// The beginning of a stage of unknown length.
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

/// What progress counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Pages of 4 KiB.
    Pages,
    /// Things: machines, capsules, packs.
    Items,
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OperationResult {
    /// A capsule was taken; the machine runs on.
    Checkpoint(CaptureReport),
    /// A capsule was taken; the machine is gone.
    Suspend(CaptureReport),
    /// A machine runs.
    Resume {
        /// Its name, in a list because a clone is the same thing several times.
        #[schema(value_type = Vec<String>)]
        machines: Vec<MachineName>,
        /// From the request until its CPUs ran.
        to_running_ms: f64,
    },
    /// Several machines run.
    Clone {
        /// Their names.
        #[schema(value_type = Vec<String>)]
        machines: Vec<MachineName>,
        /// From the request until the CPUs of the last one ran.
        to_running_ms: f64,
    },
    /// The machine runs on another host, or is paused there if it was paused here.
    Migrate {
        /// Which.
        #[schema(value_type = String)]
        host: HostName,
        /// How long no CPU of it ran, as the hosts measured it.
        downtime_ms: f64,
        /// What that time went to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pause: Option<Box<DowntimeInfo>>,
        /// From the request to the end.
        total_ms: f64,
        /// Bytes on the wire, all of them.
        wire_bytes: u64,
        /// The rounds, the last one with the machine stopped.
        rounds: Vec<RoundInfo>,
        /// What became of its network ports.
        network: NetworkHandover,
        /// How the rest of it came there, if it ran before all of it had.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        postcopy: Option<PostcopyInfo>,
        /// What was done because it wrote faster than it could be copied.
        #[serde(default, skip_serializing_if = "ThrottleReport::is_nothing")]
        slowed: ThrottleReport,
        /// Memory that its guest freed ahead, so that it was not copied.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<u64>)]
        freed: Option<ByteSize>,
        /// Its user had paused it, and it still is.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        paused: bool,
    },
    /// The machines that could be moved are on other hosts.
    Evacuate(EvacuateReport),
    /// The machine has a standby, which follows it from now on.
    Protect {
        /// Where.
        #[schema(value_type = String)]
        host: HostName,
        /// Who decides when the two hosts lose each other; none if a person does.
        #[schema(value_type = Option<String>)]
        witness: Option<WitnessAddress>,
        /// How long the machine stood still for the end of the first copy.
        pause_ms: f64,
        /// From the request until it was protected.
        total_ms: f64,
        /// Bytes of the first copy on the wire.
        wire_bytes: u64,
    },
    /// The machine runs on the host that was its standby.
    Failover {
        /// Which.
        #[schema(value_type = String)]
        host: HostName,
        /// From the last instruction here until it ran there, or from the request where the primary was gone.
        downtime_ms: f64,
    },
    /// The store was cleaned.
    Gc {
        /// Bytes freed on disk.
        #[schema(value_type = u64)]
        freed: ByteSize,
        /// Bytes on disk now.
        #[schema(value_type = u64)]
        stored: ByteSize,
        /// Bytes that were moved to new packs, away from their garbage.
        #[schema(value_type = u64)]
        moved: ByteSize,
        /// Packs that go once writers that began before have ended.
        packs_waiting: u64,
    },
    /// The store was read and checked. It is sound if `damaged` is empty.
    Verify {
        /// Capsules checked.
        capsules: u64,
        /// Pages and other objects checked.
        objects: u64,
        /// Bytes read.
        #[schema(value_type = u64)]
        bytes: ByteSize,
        /// What does not verify.
        damaged: Vec<Damage>,
    },
    /// A file was written.
    Export {
        /// Where.
        #[schema(value_type = String)]
        path: PathBuf,
        /// Its length.
        #[schema(value_type = u64)]
        bytes: ByteSize,
    },
    /// A capsule was read from a file.
    Import {
        /// The new capsule.
        #[schema(value_type = String)]
        capsule: CapsuleId,
        /// Bytes added to the store.
        #[schema(value_type = u64)]
        added: ByteSize,
    },
    /// A capsule came here.
    Pull(TransferReport),
    /// A machine or a capsule went to another host.
    Push {
        /// What it cost.
        #[serde(flatten)]
        report: TransferReport,
        /// The machine that may be resumed there from now on, and no longer here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>)]
        machine: Option<MachineName>,
    },
    /// From now on the capsules of the machine are uploaded in the background, or no longer.
    Follow {
        /// Where to, a host or a pool; none if no longer.
        host: Option<String>,
    },
    /// A file is in the cache of pages.
    Cache {
        /// Pages of it that are not zero.
        pages: u64,
    },
}

/// What taking a capsule cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CaptureReport {
    /// The new capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// How long the machine was stopped (for a suspend: from its stop until the capsule was durable).
    pub pause_ms: f64,
    /// From the request until the capsule was durable.
    pub total_ms: f64,
    /// Bytes added to the store.
    pub bytes_added: u64,
    /// The rounds, the last one with the machine stopped.
    pub rounds: Vec<RoundInfo>,
    /// Memory that the guest gave up for it, if it was squeezed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub squeezed: Option<ByteSize>,
}

/// One pass over the pages that changed.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct RoundInfo {
    /// Pages read.
    pub pages: u64,
    /// Bytes handed on, after everything known was left out and the rest compressed.
    pub bytes: u64,
    /// How long it took.
    pub ms: f64,
    /// When it began, since the copying began.
    #[serde(default)]
    pub begun_ms: f64,
    /// Bytes a second it was held to; as fast as it could if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub limit: Option<ByteSize>,
    /// Pages that were written again before their turn came, and waited for a later round.
    #[serde(default)]
    pub skipped: u64,
    /// Pages that were written while it ran: what remained after it.
    #[serde(default)]
    pub left: u64,
    /// How long what remained would have travelled with the machine stopped, once that could be said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<f64>,
}

/// How a machine that runs on the target gets what was not there when it began to.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct PostcopyInfo {
    /// Pages that stayed behind when it was stopped; none if a daemon before this one knew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owed_pages: Option<u64>,
    /// Pages that it lacks now, as far as is known.
    pub missing_pages: u64,
    /// Reads of the guest that waited for a page.
    pub faults: u64,
    /// How long they waited altogether.
    pub waited_ms: f64,
    /// The longest of these waits.
    pub longest_ms: f64,
    /// Bytes on the wire since it ran there.
    pub bytes: u64,
    /// Why it gets none at the moment; none while it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
}

/// What became of a machine's network ports on the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum NetworkHandover {
    /// It has none, or none that was plugged in.
    NoPorts,
    /// Its ports joined their bridges and were announced to the network.
    Announced {
        /// How many.
        ports: u32,
    },
    /// Its ports stay in the network of its home host, through a tunnel.
    Tunnelled {
        /// How many.
        ports: u32,
        /// The home host.
        #[schema(value_type = String)]
        home: HostName,
    },
    /// Some ports found no bridge and are unplugged.
    Unplugged {
        /// The bridges that do not exist there.
        missing: Vec<String>,
    },
}

/// Something in the store that does not verify.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Damage {
    /// A pack, an index, a capsule; as the store names it.
    pub place: String,
    /// What is wrong with it.
    pub problem: String,
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
            squeezed: None,
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
