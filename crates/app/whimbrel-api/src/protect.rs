//! Protection by a standby: what is asked for, and what is told about it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, HostName, WitnessAddress};

/// Body of `POST /v1/machines/{name}/protect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectRequest {
    /// The host that keeps the standby.
    #[schema(value_type = String)]
    pub host: HostName,
    /// Who decides who may run the machine when the two lose each other: a third host, or an etcd as
    /// `etcd://HOST:PORT[,HOST:PORT]`. Without one nothing is taken over by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub witness: Option<WitnessAddress>,
    /// How what has changed travels.
    #[serde(default)]
    pub mode: ProtectMode,
    /// Time between two cuts, 25 to 1000; 50 if absent. In mode replay 100 to 10000; 1000 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch_ms: Option<u64>,
    /// How many times as long an epoch may last while nothing that the machine sent waits for it, 1 to 20,
    /// though never over a second: 4 if absent, 1 in a group and in the other modes. It is cut the moment
    /// something waits and the usual length has passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stretch: Option<u32>,
    /// The unit in which changes are found; 64 bytes if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<ProtectBlock>,
    /// How long a lease lasts, 200 to 60000; 400 if absent. A standby takes over no earlier than that after
    /// the last word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// Steps of the code that are left out, to see what each brings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<CodeStep>,
    /// What blocks go through that no cheaper step has shrunk.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub codec: ProtectCodec,
    /// Where whoever takes the machine over protects it, with the same settings. May be the host that it is
    /// taken from, once that is back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub then: Option<HostName>,
    /// Which epochs the standby's host keeps as capsules; none if absent. `NAME@-5m` names one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<SnapshotRule>,
    /// Machines of this host that are protected in a group of one name stand still at one instant for each
    /// epoch, and what any of them sends leaves when the standbys of all have it. The slowest of them sets
    /// the pace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Bytes a second that go to the standby at most; as many as the link takes if absent. Output waits for
    /// epochs that take longer so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
}

/// Which epochs of a protected machine are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRule {
    /// One in so many milliseconds, 1000 to a week.
    pub every_ms: u64,
    /// The newest so many, 1 to 10,000. Older ones are let go, unless a tag names them.
    pub count: u32,
}

/// How what has changed travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectMode {
    /// Changed blocks, each distinct one once, each as small as is cheap.
    #[default]
    Epoch,
    /// Whole pages as they are: the base line.
    Remus,
    /// As the first, but seldom; what the machine sends waits only for what reached it before to be at the
    /// standby, where it is played again after a takeover.
    Replay,
}

/// The unit in which changes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub enum ProtectBlock {
    /// 64 bytes.
    #[default]
    #[serde(rename = "64")]
    B64,
    /// 128 bytes.
    #[serde(rename = "128")]
    B128,
    /// 256 bytes.
    #[serde(rename = "256")]
    B256,
    /// Whole pages.
    #[serde(rename = "page")]
    Page,
}

fn is_usual(codec: &ProtectCodec) -> bool {
    *codec == ProtectCodec::default()
}

/// What blocks go through that no cheaper step has shrunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectCodec {
    /// zstd, fast.
    #[default]
    Zstd,
    /// gzip, as in the paper that the steps are from.
    Gzip,
}

/// A step of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CodeStep {
    /// Identical blocks travel once.
    Share,
    /// Blocks of mostly zeros as offsets and values.
    Sparse,
    /// Blocks of similar words by a dictionary.
    Wkdm,
    /// All others by zstd, or by gzip where that is asked for.
    Zstd,
}

/// Body of `POST /v1/machines/{name}/failover`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FailoverRequest {
    /// On the standby, without a witness: whoever asks answers for it that the other host does not run the
    /// machine any more.
    #[serde(default)]
    pub primary_is_dead: bool,
}

/// Which side of a protection a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectRole {
    /// The machine runs here.
    Primary,
    /// The machine waits here.
    Standby,
}

/// How well a machine is protected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ProtectState {
    /// The first copy is on its way: not yet.
    Filling,
    /// The standby has a whole machine, not older than the last epoch.
    Protected,
    /// Nobody would take over.
    Unprotected {
        /// Why.
        reason: String,
    },
    /// Whose the machine is, is not known here at the moment; nothing of it is seen.
    Fenced {
        /// What is waited for.
        reason: String,
    },
}

/// A protection as one of its sides sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProtectionInfo {
    /// Which side this is.
    pub role: ProtectRole,
    /// The other side.
    #[schema(value_type = String)]
    pub host: HostName,
    /// Who decides when they lose each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub witness: Option<WitnessAddress>,
    /// Whether the witness has answered lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness_answers: Option<bool>,
    /// The group that it is cut with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How what has changed travels, and what output waits for.
    #[serde(default)]
    pub mode: ProtectMode,
    /// How well it is protected.
    pub state: ProtectState,
    /// The last epoch that the standby has.
    pub epoch: u64,
    /// Figures of the epochs, on the side of the primary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<ProtectFigures>,
    /// Milliseconds since the standby last got a whole epoch.
    pub lag_ms: u64,
}

/// What a pause went to, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EpochPauseParts {
    /// Until the machine stood still.
    pub stop_ms: f64,
    /// Finding out what was written.
    pub scan_ms: f64,
    /// Copying that aside.
    pub copy_ms: f64,
    /// Waiting for the device state, which is taken beside finding and copying, after those.
    pub devices_ms: f64,
    /// Until the machine went on.
    pub go_on_ms: f64,
}

/// A machine that was taken over from a host that had died, or that gave it up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TakeoverInfo {
    /// From whom.
    #[schema(value_type = String)]
    pub from: HostName,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
}

/// What protection costs. Times are of the last 1,200 epochs, bytes of all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProtectFigures {
    /// Epochs that the standby has.
    pub epochs: u64,
    /// Time between two cuts, median.
    pub epoch_ms: f64,
    /// Epochs that had to wait for the one before.
    pub stretched: u64,
    /// How long the machine stood still at each, median.
    pub pause_p50_ms: f64,
    /// The same, of 99 in 100 at most.
    pub pause_p99_ms: f64,
    /// What that went to, medians.
    pub pause_parts: EpochPauseParts,
    /// From a cut until its output left, median.
    pub output_delay_p50_ms: f64,
    /// The same, of 99 in 100 at most.
    pub output_delay_p99_ms: f64,
    /// Pages of an epoch, on average.
    pub dirty_pages: f64,
    /// Bytes of all dirty pages.
    #[schema(value_type = u64)]
    pub dirty_bytes: ByteSize,
    /// Bytes of their blocks that had changed.
    #[schema(value_type = u64)]
    pub changed_bytes: ByteSize,
    /// Bytes of those that were not shared with others of their piece.
    #[schema(value_type = u64)]
    pub unshared_bytes: ByteSize,
    /// Bytes that were sent, the device states included.
    #[schema(value_type = u64)]
    pub sent_bytes: ByteSize,
    /// Bytes of device states among them.
    #[schema(value_type = u64)]
    pub device_bytes: ByteSize,
    /// Pages that the standby asked for again.
    pub again_pages: u64,
    /// Memory that protecting takes on this side, beside a cut.
    #[schema(value_type = u64)]
    pub hash_bytes: ByteSize,
}
