//! Capsules that travel between hosts, and the cache of pages that need not travel.

use crate::{BalloonTarget, CapsuleRef};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, RefName};

/// Body of `POST /v1/pull`: bring a capsule here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// What, as it is called there.
    pub capsule: CapsuleRef,
    /// From where; any trusted host that has it if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// The pool that has it instead, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// A tag for it here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<RefName>,
    /// Bring only what describes it; its pages come when something here reads them.
    #[serde(default)]
    pub lazy: bool,
}

/// Body of `POST /v1/push`: bring a machine or a capsule to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushRequest {
    /// A machine, which is suspended first and belongs to the other host afterwards, or a capsule, which is
    /// copied.
    pub subject: CapsuleRef,
    /// Where to; the one host that is trusted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// Where to instead: a folder of a pool, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`.
    /// What the newest capsule of the machine is, or the capsule, is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// How far the guest is squeezed before it is suspended.
    #[serde(default)]
    pub balloon: BalloonTarget,
    /// Do not suspend the machine: upload every capsule that is taken of it from now on, in the background,
    /// also after the daemon was restarted.
    #[serde(default)]
    pub follow: bool,
    /// End the following.
    #[serde(default)]
    pub unfollow: bool,
}

/// What a transfer cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TransferReport {
    /// What travelled.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// The other host, or the pool.
    pub host: String,
    /// Bytes on the wire, both ways.
    pub wire_bytes: u64,
    /// Pages that came over it.
    pub pages: u64,
    /// Whether all of the capsule is there now.
    pub whole: bool,
    /// From the request to the end.
    pub total_ms: f64,
}

/// A capsule that another host offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteCapsule {
    /// The host.
    #[schema(value_type = String)]
    pub host: HostName,
    /// What it is called there.
    #[schema(value_type = String)]
    pub name: RefName,
    /// The machine whose newest capsule it is, if the name says that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub machine: Option<MachineName>,
    /// Digest of its manifest.
    #[schema(value_type = String)]
    pub id: CapsuleId,
    /// When it was taken.
    pub time_ms: u64,
    /// Guest memory, zeros included; 0 if it has none.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Its disks, zeros included.
    #[schema(value_type = u64)]
    pub disks: ByteSize,
    /// Whether all of it is there.
    pub whole: bool,
}

/// Body of `POST /v1/cache`: remember the pages of a file, so that they need not travel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheAddRequest {
    /// A disk image (raw or qcow2) or any other file on the host, absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// A running machine instead: its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub machine: Option<MachineName>,
    /// Forget the file instead.
    #[serde(default)]
    pub forget: bool,
}

/// The cache of pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheInfo {
    /// Bytes of its table.
    #[schema(value_type = u64)]
    pub table: ByteSize,
    /// Pages it has room for.
    pub slots: u64,
    /// Pages it knows.
    pub used: u64,
    /// Entries that made room for others.
    pub evictions: u64,
    /// The files it points into.
    pub sources: Vec<CacheSource>,
}

/// A file that the cache points into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheSource {
    /// Where it is.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// `raw`, `qcow2`, `memory`.
    pub kind: String,
    /// Pages of it in the cache when it was scanned.
    pub pages: u64,
    /// Pages it gave.
    pub hits: u64,
    /// Entries that turned out wrong, because the file had changed.
    pub dropped: u64,
}
