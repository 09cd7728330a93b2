//! Lineage of capsules: derived machines, the tree of capsules, the history of refs, and outdated children.

use crate::openapi_names::Name;
use crate::{CapsuleInfo, CapsuleRef, CloudInit, MachineSettings, NicRequest, PortRequest, Profile};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, MachineName, RefName};

/// Body of `POST /v1/derive`: a new machine that boots from the disks of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeriveRequest {
    /// Parent, of which only the disks and the configuration are used.
    pub capsule: CapsuleRef,
    /// Name for the machine, not in use on this host.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Size of the guest memory [default: that of the parent].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub memory: Option<ByteSize>,
    /// Number of virtual CPUs [default: that of the parent].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// CPU model, as for a new machine [default: that of the parent].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Hardware [default: that of the parent].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// Whether it starts only programs that are signed, if the profile gives it UEFI [default: as the
    /// profile].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
    /// Whether it gets a TPM 2.0 if its parent has none. The TPM of a parent stays, with what is in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
    /// Whether it gets a screen, a keyboard and a pointer if its parent has none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub display: bool,
    /// Network ports [default: those of the parent with new hardware addresses].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nics: Option<Vec<NicRequest>>,
    /// Command line of the kernel, if the parent loads one directly [default: that of the parent].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
    /// Size of the first disk, if larger than that of the parent; the rest reads as zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub disk_size: Option<ByteSize>,
    /// Settings for cloud-init in the guest, on one more disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// Ports of the host that lead to the machine, which needs a port in a managed network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub publish: Vec<PortRequest>,
    /// Settings on this host.
    #[serde(default, skip_serializing_if = "MachineSettings::is_empty")]
    pub settings: MachineSettings,
}

impl DeriveRequest {
    /// A machine that is as its parent was, without the state of what ran in it.
    pub fn new(capsule: CapsuleRef, name: MachineName) -> Self {
        Self {
            capsule,
            name,
            memory: None,
            cpus: None,
            cpu: None,
            profile: None,
            secure_boot: None,
            tpm: false,
            display: false,
            nics: None,
            append: None,
            disk_size: None,
            cloud_init: None,
            publish: Vec::new(),
            settings: MachineSettings::default(),
        }
    }
}

/// Capsule in the tree of capsules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GraphNode {
    /// Description of the capsule.
    #[serde(flatten)]
    pub capsule: CapsuleInfo,
    /// Bytes of distinct pages that its nearest parent does not have, before compression. Without a parent in
    /// the store all pages count. None for a partial capsule.
    #[schema(value_type = Option<u64>)]
    pub adds: Option<ByteSize>,
    /// Parents in this store, or else the capsule that its machine was derived from.
    #[schema(value_type = Vec<String>)]
    pub under: Vec<CapsuleId>,
    /// Children in this store, oldest first.
    #[schema(value_type = Vec<String>)]
    pub children: Vec<CapsuleId>,
    /// Machines of this host whose next capsule will be a child of this one.
    pub machines: Vec<MachineOnCapsule>,
}

/// Machine that is based on a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineOnCapsule {
    /// Name of the machine.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Whether it has a QEMU process.
    pub live: bool,
}

/// Body of `POST /v1/promote`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteRequest {
    /// Capsule to detach from its parents. A ref that is given here moves to the new capsule, unless `tag` is
    /// set.
    pub capsule: CapsuleRef,
    /// Tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub tag: Option<RefName>,
    /// Move all refs of the old capsule to the new one.
    #[serde(default)]
    pub all_refs: bool,
}

/// Result of a promotion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PromoteReport {
    /// Capsule without parents.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Old capsule; equal to the new one if it had no parents.
    #[schema(value_type = String)]
    pub was: CapsuleId,
    /// Parents of the old capsule.
    #[schema(value_type = Vec<String>)]
    pub parents: Vec<CapsuleId>,
    /// Refs of the new capsule.
    #[schema(value_type = Vec<Name>)]
    pub refs: Vec<RefName>,
    /// Bytes of pages that were copied.
    pub bytes_copied: u64,
    /// Bytes added to the store.
    pub bytes_added: u64,
    /// Time that the promotion took.
    pub ms: f64,
}

/// Entry in the history of a ref.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefVersion {
    /// Capsule that the ref named from then on.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Capsule that it named before; none for the first entry, or if that is no longer stored.
    #[schema(value_type = Option<String>)]
    pub previous: Option<CapsuleId>,
    /// Time of the change; 0 if it is not known.
    pub time_ms: u64,
    /// Whether the capsule is still in the store.
    pub here: bool,
}

/// Capsule that a tag names now, with the one that it named before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tagged {
    /// Capsule that the tag names now.
    #[serde(flatten)]
    pub capsule: CapsuleInfo,
    /// Capsule that it named before, if that was another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<PreviousCapsule>,
}

/// Capsule that lost a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreviousCapsule {
    /// Id of the capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Names that it still has.
    #[schema(value_type = Vec<Name>)]
    pub names: Vec<RefName>,
    /// Children in this store, which do not depend on it.
    #[schema(value_type = Vec<String>)]
    pub children: Vec<CapsuleId>,
    /// Machines of this host that need it, so that it is retained without a name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Name>)]
    pub machines: Vec<MachineName>,
}

/// Machines and capsules that are based on old versions of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutdatedReport {
    /// New version of the capsule.
    #[schema(value_type = String)]
    pub onto: CapsuleId,
    /// Old versions, newest first.
    pub old: Vec<RefVersion>,
    /// Descendants of an old version that do not descend from the new one.
    pub standing: Vec<OutdatedChild>,
}

/// Machine or capsule that is based on an old version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutdatedChild {
    /// Outdated capsule, or the capsule that the machine is based on.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Names of the capsule.
    #[schema(value_type = Vec<Name>)]
    pub names: Vec<RefName>,
    /// Outdated machine; none for a capsule.
    #[schema(value_type = Option<Name>)]
    pub machine: Option<MachineName>,
    /// Old version that it is based on.
    #[schema(value_type = String)]
    pub old: CapsuleId,
    /// Changes of each disk. Empty if they are not known.
    pub disks: Vec<DiskRebase>,
    /// Reason why the changes are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// Changes of a disk since the old version by the child and by the new version, in pages of 4 KiB.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRebase {
    /// Name of the disk: `disk0`, …
    pub name: String,
    /// Pages that the child changed.
    pub changed: u64,
    /// Pages that the new version changed.
    pub updated: u64,
    /// Pages that both changed to different content; for a machine, all that both changed.
    pub conflicts: u64,
    /// First conflicts, as runs of pages (start, length).
    pub conflict_runs: Vec<(u64, u64)>,
}

/// Body of `PUT /v1/trust/{name}`: the refs of this host that a trusted host may use.
///
/// The lists have patterns with `*` and `?`. Without both lists the host may use all refs; if only one list
/// is set, the other one is empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RefRights {
    /// Patterns of refs that it may read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Vec<String>>,
    /// Patterns of refs that it may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Vec<String>>,
}
