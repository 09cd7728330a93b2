//! Machines: the description of one, and the requests that change one.

use crate::openapi_names::Name;
use crate::{
    BootOrder, CapsuleRef, CloudInit, DiskSource, MachineSettings, NicRequest, OperationId, Profile,
    ProtectionInfo, RestartInfo, SelfService, TakeoverInfo, Uploads,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};
use utoipa::ToSchema;
use whimbrel_core::{Accel, ByteSize, CapsuleId, DeviceModel, HostName, MachineName, RefName};

/// Description of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineInfo {
    /// Name of the machine on this host.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Current state of the machine.
    pub state: MachineState,
    /// Size of the guest memory.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Executor of guest instructions.
    #[schema(value_type = String)]
    pub accel: Accel,
    /// Disks, in the order of their device ids.
    pub disks: Vec<DiskInfo>,
    /// Network ports, in the order of their device ids.
    pub nics: Vec<NicInfo>,
    /// Whether it has a screen, a keyboard and a pointer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub display: bool,
    /// Process id of the QEMU process, if there is one.
    pub pid: Option<u32>,
    /// Process of its own that serves it, while it is at rest; none while the daemon serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<MachineProcess>,
    /// Time at which the machine got into this state.
    pub since_ms: u64,
    /// Capsule that it was resumed or cloned from.
    #[schema(value_type = Option<String>)]
    pub origin: Option<CapsuleId>,
    /// Parent of its next capsule: the last one taken from it, or the one that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub follows: Option<CapsuleId>,
    /// Operation that has the machine lock.
    pub operation: Option<OperationId>,
    /// Generation id (a UUID), new for every clone and resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmgenid: Option<String>,
    /// Tunnel between the network ports and the home network, if one of its ends is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<TunnelInfo>,
    /// Protection of the machine, or of the machine whose standby this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionInfo>,
    /// Last takeover by this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<TakeoverInfo>,
    /// Upload of its capsules in the background.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploads: Option<Uploads>,
    /// Settings on this host.
    #[serde(default, skip_serializing_if = "MachineSettings::is_empty")]
    pub settings: MachineSettings,
    /// Restarts after it had ended by itself, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<RestartInfo>,
    /// Schedules for it whose last runs failed, with the causes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_care: Vec<String>,
}

/// Process that serves one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineProcess {
    /// Process id on the host.
    pub pid: u32,
    /// Version of Whimbrel that it is of.
    pub version: String,
}

/// One end of the tunnel between a machine that runs away from home and its home network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TunnelInfo {
    /// Home: the host whose network the machine uses.
    #[schema(value_type = Name)]
    pub home: HostName,
    /// Away: the host where the machine runs, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub away: Option<HostName>,
    /// Whether the tunnel is connected.
    pub connected: bool,
    /// Cause if it is not connected, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// State of a machine. The aliases are the names of version 0.1, read for one release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MachineState {
    /// QEMU is being started.
    Starting,
    /// CPUs run, and all pages are here.
    Running,
    /// CPUs are paused.
    Paused,
    /// CPUs run, and some pages are still in the store or on another host.
    #[serde(alias = "lazy")]
    Loading {
        /// Number of pages that are here.
        resident_pages: u64,
        /// Number of all pages.
        total_pages: u64,
        /// Cause if no pages arrive at the moment.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stalled: Option<String>,
        /// Source of a postcopy migration, which has the missing pages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<Name>)]
        from: Option<HostName>,
    },
    /// Machine runs on another host, which fetches missing pages from this one.
    #[serde(alias = "giving")]
    ServingPages {
        /// Target of the migration.
        #[schema(value_type = Name)]
        to: HostName,
        /// Number of missing pages, if it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        missing_pages: Option<u64>,
        /// Cause if the target cannot fetch pages at the moment.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stalled: Option<String>,
    },
    /// Machine is migrating to another host, and still runs here.
    Migrating,
    /// Machine is a capsule in the store, without a QEMU process.
    Suspended,
    /// Suspended machine was handed off to another host, which may resume it.
    #[serde(alias = "given")]
    HandedOff {
        /// Host that may resume it.
        #[schema(value_type = Name)]
        to: HostName,
    },
    /// Machine runs on another host and uses the network of this one through a tunnel.
    #[serde(alias = "away")]
    Remote,
    /// Machine is switched off.
    Stopped,
    /// QEMU ended unexpectedly.
    Crashed {
        /// Cause as far as it is known.
        reason: String,
    },
    /// Record of the machine cannot be read; only its name is known, and nothing of it is touched.
    Unreadable {
        /// Defect of the record.
        reason: String,
    },
}

impl MachineState {
    /// Name of the state, as it is written, without its details.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Loading { .. } => "loading",
            Self::ServingPages { .. } => "serving_pages",
            Self::Migrating => "migrating",
            Self::Suspended => "suspended",
            Self::HandedOff { .. } => "handed_off",
            Self::Remote => "remote",
            Self::Stopped => "stopped",
            Self::Crashed { .. } => "crashed",
            Self::Unreadable { .. } => "unreadable",
        }
    }
}

/// Description of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskInfo {
    /// Size of the virtual disk.
    #[schema(value_type = u64)]
    pub size: ByteSize,
    /// Base of the disk: a path, or the id of a capsule.
    pub base: String,
    /// Bytes of allocated pages in the overlay.
    #[schema(value_type = u64)]
    pub owned: ByteSize,
    /// Whether it is the medium of a CD-ROM drive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cdrom: bool,
}

/// Description of a network port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicInfo {
    /// Hardware address of the port.
    pub mac: String,
    /// Bridge of the port; none if it is unplugged.
    pub bridge: Option<String>,
    /// Addresses in its managed network, and those that qemu-ga in the guest says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
}

/// Body of `POST /v1/machines`: create a machine and start it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Name for the machine, not in use on this host.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Disks, in the order of their device ids. The files are read, never written.
    #[serde(default)]
    pub disks: Vec<DiskSource>,
    /// Sizes of empty disks, which come after the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<u64>)]
    pub new_disks: Vec<ByteSize>,
    /// Absolute paths of media for CD-ROM drives, on the host. The files are read, never written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub cdroms: Vec<PathBuf>,
    /// Order in which it tries what it can boot from.
    #[serde(default, skip_serializing_if = "BootOrder::is_disk")]
    pub boot_order: BootOrder,
    /// Size of the guest memory, a multiple of 1 MiB.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Hardware of the machine.
    #[serde(default, skip_serializing_if = "Profile::is_default")]
    pub profile: Profile,
    /// Whether it starts only programs that are signed [default: as the profile].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
    /// Kind of its disks and network ports [default: as the profile].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub devices: Option<DeviceModel>,
    /// Whether it has a TPM 2.0.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
    /// Whether it has a screen, a keyboard and a pointer, for viewers of VNC.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub display: bool,
    /// Number of virtual CPUs.
    #[serde(default = "one")]
    pub cpus: u32,
    /// CPU model: `x86-64-v2`, `x86-64-v3`, `host` (KVM only), `max`, `baseline` (of all trusted hosts), or a
    /// name of QEMU, with features to add or leave out (`Haswell,-hle`) [default: max].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Absolute path of a kernel to load directly, instead of booting from the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Absolute path of the initial RAM disk of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Command line of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
    /// Network ports, in the order of their device ids.
    #[serde(default)]
    pub nics: Vec<NicRequest>,
    /// What cloud-init in the guest does at the first boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// Ports of the host that lead to the machine; it needs a port in a managed network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub publish: Vec<crate::PortRequest>,
    /// Executor of guest instructions [default: kvm if it works on the host, else tcg].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub accel: Option<Accel>,
    /// Operations that the guest may request.
    #[serde(default, skip_serializing_if = "SelfService::is_empty")]
    pub self_service: SelfService,
    /// Settings on this host.
    #[serde(default, skip_serializing_if = "MachineSettings::is_empty")]
    pub settings: MachineSettings,
}

fn one() -> u32 {
    1
}

/// Way to stop a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StopMode {
    /// Press the power button and wait for the guest.
    #[default]
    Powerdown,
    /// Cut the power at once.
    Kill,
}

/// Body of `POST /v1/machines/{name}/stop`. It answers once the machine has stopped.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Way to stop the machine.
    #[serde(default)]
    pub mode: StopMode,
    /// Seconds to wait for the guest [default: 60]. After that the request fails, and the machine keeps
    /// running, unless `force` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
    /// Cut the power if the guest does not shut down in time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Body of `POST /v1/machines/{name}/balloon`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonRequest {
    /// Memory that the guest may use from now on.
    #[schema(value_type = u64)]
    pub size: ByteSize,
}

/// Shrinking of guest memory before a capsule is taken. Released memory is zero in the capsule; the guest
/// gets it back when it continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BalloonTarget {
    /// Do not shrink the memory.
    #[default]
    Off,
    /// Shrink until the guest would swap, or can release little more.
    Auto,
    /// Shrink to a size.
    To {
        /// Memory that the guest still has.
        #[schema(value_type = u64)]
        size: ByteSize,
    },
}

/// Body of `POST /v1/machines/{name}/checkpoint`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// Tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub tag: Option<RefName>,
    /// Labels for the new capsule.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Take a disk-only capsule, with all disks as of one instant. The machine may be switched off.
    #[serde(default)]
    pub disks_only: bool,
    /// Have qemu-ga freeze the guest's file systems for the pause; for disk-only capsules.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quiesce: bool,
    /// Shrinking of guest memory before the capsule is taken.
    #[serde(default)]
    pub balloon: BalloonTarget,
}

/// Body of `POST /v1/machines/{name}/suspend`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendRequest {
    /// Tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub tag: Option<RefName>,
    /// Shrinking of guest memory before the capsule is taken.
    #[serde(default)]
    pub balloon: BalloonTarget,
}

/// Body of `POST /v1/machines/{name}/rewind`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RewindRequest {
    /// Capsule that the machine goes back to: an earlier one of this machine, or one that it comes from.
    pub capsule: CapsuleRef,
}

/// Network of a machine after a migration or a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MoveNetwork {
    /// Bridges of the host where the machine runs.
    Local,
    /// Bridges of the home host, through a tunnel.
    Home,
}

/// Mode of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MigrateMode {
    /// Precopy: copy while the machine runs, and pause it for the last round.
    #[default]
    Live,
    /// Offline: pause the machine, copy it, and run it on the target.
    Stop,
    /// Postcopy: run the machine on the target at once, which fetches pages when they are touched, and in the
    /// background.
    Lazy,
    /// Hybrid: copy as many rounds as `rounds`, then continue as `lazy`.
    Hybrid,
}

/// Body of `POST /v1/machines/{name}/migrate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Target, a trusted host with an address.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Mode of the migration.
    #[serde(default)]
    pub mode: MigrateMode,
    /// Keep copying until the predicted downtime is at most this. The machine runs on here if the downtime
    /// before the handover exceeds it by more than a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_max_ms: Option<u64>,
    /// Give up, with the machine running here, if it was not handed over within this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_max_ms: Option<u64>,
    /// Limit for the rate, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_max: Option<ByteSize>,
    /// Rate of the first round, in bytes per second. Each later round runs at the dirty rate plus
    /// `rate_step`, but not above `rate_max`. Without this and `adaptive`, all rounds run at the rate of the
    /// link or `rate_max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_min: Option<ByteSize>,
    /// Step above the dirty rate, in bytes per second [default: 50 Mbit/s].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate_step: Option<ByteSize>,
    /// Most rounds of the mode `hybrid` before the machine runs on the target [default: 2]. Fewer if the
    /// downtime would be short enough earlier, or if rounds do not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Use a `rate_min` of 100 Mbit/s, or of `rate_max` if that is less.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adaptive: bool,
    /// Network on the target [default: local; a machine that uses a tunnel keeps it, except on its way home].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<MoveNetwork>,
    /// Least share of time, 20 to 100 percent, for which the virtual CPUs of a machine run that writes faster
    /// than it can be copied [default: 20; 100 does not slow it down].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<u8>,
    /// Backup host of the mode `lazy`: a third host that gets the complete machine before the pause ends, and
    /// all changes while pages are missing on the target. No output is lost if one of the three hosts fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub safe: Option<HostName>,
    /// Do not let the guest agent suspend processes that write too fast.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_stun: bool,
    /// Let the guest drop clean caches before the first round.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free_caches: bool,
}

/// Body of `POST /v1/machines/{name}/resolve`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// The decision; without one, the error says what is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<HandoverDecision>,
}

/// Decision of a person about a machine between two hosts, one of which is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HandoverDecision {
    /// Run the machine here. If the other host runs it too, there are two.
    RunHere,
    /// Delete what is here of the machine. If the other host does not have it, it is lost.
    Discard,
}

/// Time at which the pages of a resumed machine are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResumeMode {
    /// When they are touched, so that the machine runs at once and is slower at first.
    #[default]
    Lazy,
    /// Before the machine runs.
    Full,
}

/// Body of `POST /v1/resume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Capsule to resume. A disk-only capsule boots.
    pub capsule: CapsuleRef,
    /// Host that has the capsule and sends pages when they are touched [default: this host, or any trusted
    /// one].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Pool that has the capsule, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or a bucket,
    /// as `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Resume a machine that was handed off to another host, although that host may run it.
    #[serde(default, alias = "take_back")]
    pub reclaim: bool,
    /// Name for the machine [default: the name that it had].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub name: Option<MachineName>,
    /// Time at which pages are loaded.
    #[serde(default)]
    pub mode: ResumeMode,
    /// Load the remaining pages in the background after a lazy start.
    #[serde(default)]
    pub then_full: bool,
    /// Network of the machine [default: local, or home if it used a tunnel when it was suspended here].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<MoveNetwork>,
}

/// Network of clones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CloneNetwork {
    /// Unplugged, because each guest has the address of the original.
    #[default]
    Isolated,
    /// Bridges of the original, with new hardware addresses.
    Same,
}

/// Body of `POST /v1/clone`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneRequest {
    /// Capsule to clone.
    pub capsule: CapsuleRef,
    /// Number of clones, at least 1.
    pub count: u32,
    /// Prefix of the names `PREFIX-1`, `PREFIX-2`, … [default: the name of the machine].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub prefix: Option<MachineName>,
    /// Time at which pages are loaded.
    #[serde(default)]
    pub mode: ResumeMode,
    /// Network of the clones.
    #[serde(default)]
    pub network: CloneNetwork,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_names_of_states_are_read_and_new_ones_are_written() {
        for (old, new) in [
            (r#"{"kind":"lazy","resident_pages":1,"total_pages":2}"#, "loading"),
            (r#"{"kind":"giving","to":"beta"}"#, "serving_pages"),
            (r#"{"kind":"given","to":"beta"}"#, "handed_off"),
            (r#"{"kind":"away"}"#, "remote"),
        ] {
            let state: MachineState = serde_json::from_str(old).unwrap();
            let json = serde_json::to_value(&state).unwrap();
            assert_eq!(json["kind"], new);
            assert_eq!(serde_json::from_value::<MachineState>(json).unwrap(), state);
        }
        let request: ResumeRequest = serde_json::from_str(r#"{"capsule":"web","take_back":true}"#).unwrap();
        assert!(request.reclaim);
    }
}
