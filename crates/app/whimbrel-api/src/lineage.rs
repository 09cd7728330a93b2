//! Parents and children: machines derived from capsules, the tree of capsules, what refs named before, and
//! which children still stand on an old version.

use crate::{CapsuleInfo, CapsuleRef, NicRequest};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, MachineName, RefName};

/// Body of `POST /v1/derive`: a new machine that boots from the disks of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeriveRequest {
    /// The parent, active or not: only its disks and its configuration are used.
    pub capsule: CapsuleRef,
    /// Name for the machine, not in use on this host.
    #[schema(value_type = String)]
    pub name: MachineName,
    /// Guest memory; as the parent has if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub memory: Option<ByteSize>,
    /// Virtual CPUs; as the parent has if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Network ports; if absent those of the parent, with new hardware addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nics: Option<Vec<NicRequest>>,
    /// Command line for the kernel, if the parent loads one directly; as the parent has if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
}

/// One capsule in the tree of capsules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GraphNode {
    /// The capsule.
    #[serde(flatten)]
    pub capsule: CapsuleInfo,
    /// Bytes of pages that it has and its nearest parent does not, equal ones counted once, before
    /// compression. Without a parent that is still here all of it counts. None if not all of it is on this
    /// host.
    #[schema(value_type = Option<u64>)]
    pub adds: Option<ByteSize>,
    /// Capsules of this host that it belongs under: its parents, or where they are gone the one that its
    /// machine was derived from.
    #[schema(value_type = Vec<String>)]
    pub under: Vec<CapsuleId>,
    /// Capsules of this host that belong under it, oldest first.
    #[schema(value_type = Vec<String>)]
    pub children: Vec<CapsuleId>,
    /// Machines of this host whose next capsule will be its child.
    pub machines: Vec<MachineOnCapsule>,
}

/// A machine that stands on a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineOnCapsule {
    /// Its name.
    #[schema(value_type = String)]
    pub name: MachineName,
    /// Whether it has a QEMU now.
    pub live: bool,
}

/// Body of `POST /v1/promote`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteRequest {
    /// What to detach from its parents. A ref that is named here moves to the new capsule, unless `tag` is
    /// given.
    pub capsule: CapsuleRef,
    /// A tag for the new capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<RefName>,
    /// Move every ref that names the old capsule.
    #[serde(default)]
    pub all_refs: bool,
}

/// What came of a promotion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PromoteReport {
    /// The capsule without parents.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// The one it was made of; the same if that had no parents.
    #[schema(value_type = String)]
    pub was: CapsuleId,
    /// The parents it had.
    #[schema(value_type = Vec<String>)]
    pub parents: Vec<CapsuleId>,
    /// Refs that name the new capsule now.
    #[schema(value_type = Vec<String>)]
    pub refs: Vec<RefName>,
    /// Bytes of pages that were copied for it.
    pub bytes_copied: u64,
    /// Bytes that the store grew by.
    pub bytes_added: u64,
    /// How long it took.
    pub ms: f64,
}

/// One version of a ref.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefVersion {
    /// What it named from then on.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// What it named before; none for its first version, or if that is no longer remembered.
    #[schema(value_type = Option<String>)]
    pub previous: Option<CapsuleId>,
    /// When it was pointed there; 0 if that was not written down.
    pub time_ms: u64,
    /// Whether the capsule is still in the store.
    pub here: bool,
}

/// A tag that was written: the capsule it names now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tagged {
    /// What it names now.
    #[serde(flatten)]
    pub capsule: CapsuleInfo,
    /// What it named before, if that was something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<PreviousCapsule>,
}

/// A capsule that a name was taken from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreviousCapsule {
    /// The capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Names that it still has.
    #[schema(value_type = Vec<String>)]
    pub names: Vec<RefName>,
    /// Capsules of this host that have it as a parent. They need nothing of it.
    #[schema(value_type = Vec<String>)]
    pub children: Vec<CapsuleId>,
}

/// Who still stands on old versions of a capsule, after it was updated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutdatedReport {
    /// The new version.
    #[schema(value_type = String)]
    pub onto: CapsuleId,
    /// The old versions, newest first.
    pub old: Vec<RefVersion>,
    /// Everything that descends from an old version and not from the new one.
    pub standing: Vec<OutdatedChild>,
}

/// Something that stands on an old version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutdatedChild {
    /// The capsule that stands there, or that the machine stands on.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Names of the capsule.
    #[schema(value_type = Vec<String>)]
    pub names: Vec<RefName>,
    /// The machine, where a machine and not a capsule stands there.
    #[schema(value_type = Option<String>)]
    pub machine: Option<MachineName>,
    /// The old version.
    #[schema(value_type = String)]
    pub old: CapsuleId,
    /// Disk by disk what it and the update changed. Empty if that cannot be told.
    pub disks: Vec<DiskRebase>,
    /// Why it cannot be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// What two sides changed on a disk since the old version, in pages of 4 KiB.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRebase {
    /// `disk0`, …
    pub name: String,
    /// Changed by the child.
    pub changed: u64,
    /// Changed by the update.
    pub updated: u64,
    /// Changed by both, and not to the same. Of a machine: changed by both.
    pub conflicts: u64,
    /// The first of these, as runs of pages (start, length).
    pub conflict_runs: Vec<(u64, u64)>,
}

/// Body of `PUT /v1/trust/{name}`: which refs of this host a trusted host may use.
///
/// Patterns with `*` and `?` over names as people see them. Without both lists it may use all refs; as soon
/// as one is there, the other one being absent means none.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RefRights {
    /// Refs it may read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Vec<String>>,
    /// Refs it may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Vec<String>>,
}
