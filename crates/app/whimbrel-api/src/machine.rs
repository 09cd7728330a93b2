//! Machines: what the daemon says about one, and every request that changes one.

use crate::{CapsuleRef, OperationId, ProtectionInfo, SelfService, TakeoverInfo};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};
use utoipa::ToSchema;
use whimbrel_core::{Accel, ByteSize, CapsuleId, HostName, MachineName, RefName};

/// One machine of a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineInfo {
    /// Its name on this host.
    #[schema(value_type = String)]
    pub name: MachineName,
    /// What it does now.
    pub state: MachineState,
    /// Guest memory.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Virtual CPUs.
    pub cpus: u32,
    /// What executes its instructions.
    #[schema(value_type = String)]
    pub accel: Accel,
    /// Disks, in the order of their device ids.
    pub disks: Vec<DiskInfo>,
    /// Network ports, in the order of their device ids.
    pub nics: Vec<NicInfo>,
    /// Process id of its QEMU, while it has one.
    pub pid: Option<u32>,
    /// When it got into this state.
    pub since_ms: u64,
    /// The capsule it was resumed or cloned from.
    #[schema(value_type = Option<String>)]
    pub origin: Option<CapsuleId>,
    /// The capsule that its next one will be a child of: the last one taken from it, or the one it was made
    /// from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub follows: Option<CapsuleId>,
    /// The operation that works on it now.
    pub operation: Option<OperationId>,
    /// Its generation id (a UUID), new for every clone and resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmgenid: Option<String>,
    /// The tunnel between its ports and its network, if one of its ends is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<TunnelInfo>,
    /// How it is protected by a standby, or which machine this is a standby of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionInfo>,
    /// The last time that it was taken over by this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<TakeoverInfo>,
    /// Where its capsules are uploaded in the background.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploads: Option<Uploads>,
}

/// Where the capsules of a machine go by themselves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Uploads {
    /// A host, or a folder of a pool.
    pub to: String,
    /// Why the last attempt failed; none while all is there, or on its way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
}

/// One end of the tunnel between a machine that runs away from home and the network it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TunnelInfo {
    /// The host that has the machine's network.
    #[schema(value_type = String)]
    pub home: HostName,
    /// The host that has its other end: where the machine runs, as far as is known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub away: Option<HostName>,
    /// Whether frames pass at the moment.
    pub connected: bool,
    /// Why not, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a machine does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MachineState {
    /// Its QEMU is being started.
    Starting,
    /// Its CPUs run and all of it is here.
    Running,
    /// Its CPUs are stopped.
    Paused,
    /// It runs, and part of it is still in the store or on another host.
    Lazy {
        /// Pages that are here.
        resident_pages: u64,
        /// Pages it has.
        total_pages: u64,
        /// Why pages do not arrive at the moment; none while they do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stalled: Option<String>,
        /// The host that keeps what is not here, if the machine came from there and was not copied whole.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>)]
        from: Option<HostName>,
    },
    /// It runs on another host, which fetches from here what it lacks of it.
    Giving {
        /// The host.
        #[schema(value_type = String)]
        to: HostName,
        /// Pages that it lacks, as far as is known here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        missing_pages: Option<u64>,
        /// Why it does not fetch any at the moment; none while it may.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stalled: Option<String>,
    },
    /// It is on its way to another host; it still runs here.
    Migrating,
    /// It lies in the store and has no QEMU.
    Suspended,
    /// It was given to another host, which may resume it.
    Given {
        /// The host.
        #[schema(value_type = String)]
        to: HostName,
    },
    /// It runs on another host; this one keeps its network for it.
    Away,
    /// It was switched off.
    Stopped,
    /// Its QEMU died.
    Crashed {
        /// What is known about why.
        reason: String,
    },
}

/// One disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskInfo {
    /// Size of the virtual disk.
    #[schema(value_type = u64)]
    pub size: ByteSize,
    /// What it was made from: a path, or the id of a capsule.
    pub base: String,
    /// Bytes written since, which belong to this machine alone.
    #[schema(value_type = u64)]
    pub owned: ByteSize,
}

/// One network port of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicInfo {
    /// Hardware address.
    pub mac: String,
    /// The bridge it is in; none leaves it unplugged.
    pub bridge: Option<String>,
}

/// Body of `POST /v1/machines`: a new machine, started at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Its name, not in use on this host.
    #[schema(value_type = String)]
    pub name: MachineName,
    /// Disks, in the order of their device ids. The files are read, never written.
    #[serde(default)]
    pub disks: Vec<DiskSource>,
    /// Guest memory, a multiple of 1 MiB.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Virtual CPUs.
    #[serde(default = "one")]
    pub cpus: u32,
    /// Kernel to load directly instead of booting from the first disk; a path on the host, absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Command line for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
    /// Network ports, in the order of their device ids.
    #[serde(default)]
    pub nics: Vec<NicRequest>,
    /// What executes its instructions; the host's choice if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub accel: Option<Accel>,
    /// What it may ask for from inside.
    #[serde(default, skip_serializing_if = "SelfService::is_empty")]
    pub self_service: SelfService,
}

fn one() -> u32 {
    1
}

/// A file that a disk begins as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSource {
    /// A raw image on the host, absolute.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of the virtual disk if it is to be larger than the file; the rest reads as zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub size: Option<ByteSize>,
}

/// A network port to make.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicRequest {
    /// Bridge on the host to join; none leaves the port unplugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Hardware address; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// How to stop a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StopMode {
    /// Press its power button and wait for the guest.
    #[default]
    Powerdown,
    /// Pull the plug.
    Kill,
}

/// Body of `POST /v1/machines/{name}/stop`. It answers once the machine has stopped.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// How.
    #[serde(default)]
    pub mode: StopMode,
    /// Seconds to wait for the guest before giving up (the machine then runs on); 60 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
}

/// Body of `POST /v1/machines/{name}/balloon`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonRequest {
    /// Memory the guest is to be left with.
    #[schema(value_type = u64)]
    pub size: ByteSize,
}

/// How far a guest is squeezed before its state is kept. What it gives up is zero in the capsule; it gets all
/// of it back when it runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BalloonTarget {
    /// Not at all.
    #[default]
    Off,
    /// Until it would have to swap, or has little left to give.
    Auto,
    /// Until it is left with so much.
    To {
        /// Memory it is left with.
        #[schema(value_type = u64)]
        size: ByteSize,
    },
}

/// Body of `POST /v1/machines/{name}/checkpoint`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// A tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<RefName>,
    /// Labels to write on it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Disks and configuration only, as of one instant: an inactive capsule. The machine may be switched off.
    #[serde(default)]
    pub disks_only: bool,
    /// Squeeze the guest before.
    #[serde(default)]
    pub balloon: BalloonTarget,
}

/// Body of `POST /v1/machines/{name}/suspend`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendRequest {
    /// A tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<RefName>,
    /// Squeeze the guest before.
    #[serde(default)]
    pub balloon: BalloonTarget,
}

/// What the network ports of a machine join after it was moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MoveNetwork {
    /// The bridges of the host it runs on.
    Local,
    /// The bridges of its home host, through a tunnel.
    Home,
}

/// How a machine moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MigrateMode {
    /// Copy while it runs, stop for the last round only.
    #[default]
    Live,
    /// Stop, copy, start there.
    Stop,
    /// Stop, start there at once, and let it fetch its pages from here when it touches them and in the
    /// background.
    Lazy,
    /// Copy rounds while it runs, as many as `rounds`; then like `lazy` with what is left.
    Hybrid,
}

/// Body of `POST /v1/machines/{name}/migrate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Where to, a host that is trusted and has an address.
    #[schema(value_type = String)]
    pub host: HostName,
    /// How.
    #[serde(default)]
    pub mode: MigrateMode,
    /// Go on copying until the machine would be stopped no longer than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_max_ms: Option<u64>,
    /// Bytes a second to use at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
    /// Bytes a second of the first round; each next goes as fast as the machine writes, and a step faster,
    /// but not above `rate_max`. If absent and not `adaptive`, every round goes as fast as the link and
    /// `rate_max` let it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_min: Option<ByteSize>,
    /// How much faster than the machine writes; 50 Mbit/s if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_step: Option<ByteSize>,
    /// Rounds of the mode `hybrid` before it runs there; 2 if absent. Fewer if the machine would stand still
    /// no longer than allowed before that, or if rounds do not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Rates that follow the machine also without a `rate_min`: 100 Mbit/s then, or `rate_max` if that is
    /// less.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adaptive: bool,
    /// What its ports join there. If absent, a machine whose network is tunnelled keeps its tunnel unless it
    /// moves home, and any other is local.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<MoveNetwork>,
    /// The least part of the time, 20 to 100 percent, for which its virtual CPUs run while it writes faster
    /// than it can be copied. 20 if absent; 100 never slows it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<u8>,
    /// In mode `lazy`: a third host that gets all of it before the pause ends, and what it writes while pages
    /// are missing on the target. Then the death of any one of the three loses nothing that left the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub safe: Option<HostName>,
    /// Have its guest hold no process, however fast it writes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_stun: bool,
    /// Have its guest drop clean caches before the first round.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free_caches: bool,
}

/// When the pages of a resumed machine are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResumeMode {
    /// When they are touched: running at once, slower at first.
    #[default]
    Lazy,
    /// Before the machine runs.
    Full,
}

/// Body of `POST /v1/resume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// What to resume. An inactive capsule boots instead.
    pub capsule: CapsuleRef,
    /// The host that has it: pages come from there when they are touched. Here, or any trusted one, if
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// The pool that has it instead, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Resume a machine that was given to another host, although that host may run it.
    #[serde(default)]
    pub take_back: bool,
    /// Name for the machine; the one it had if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub name: Option<MachineName>,
    /// When pages are read.
    #[serde(default)]
    pub mode: ResumeMode,
    /// After a lazy start go on reading in the background until all of it is here.
    #[serde(default)]
    pub then_full: bool,
    /// What its ports join. If absent, a machine that was suspended here with its network elsewhere has it
    /// there again, and any other is local.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<MoveNetwork>,
}

/// What the network ports of clones join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CloneNetwork {
    /// Nothing: every clone still believes it has the address of the original.
    #[default]
    Isolated,
    /// The same bridges, with new hardware addresses.
    Same,
}

/// Body of `POST /v1/clone`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneRequest {
    /// What to clone.
    pub capsule: CapsuleRef,
    /// How many, at least 1.
    pub count: u32,
    /// The clones are called `PREFIX-1`, `PREFIX-2`, …; the machine's name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub prefix: Option<MachineName>,
    /// When pages are read.
    #[serde(default)]
    pub mode: ResumeMode,
    /// What their ports join.
    #[serde(default)]
    pub network: CloneNetwork,
}
