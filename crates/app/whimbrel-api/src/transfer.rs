//! Transfers of capsules between hosts, pools and buckets, and the hash cache that avoids sending pages.

use crate::openapi_names::Name;
use crate::{BalloonTarget, CapsuleRef};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, RefName};

/// Whether a place for capsules is a bucket, and not a pool.
pub fn is_bucket(place: &str) -> bool {
    place.starts_with("s3://")
}

/// Body of `POST /v1/pull`: fetch a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// Name of the capsule on the other side.
    pub capsule: CapsuleRef,
    /// Host to fetch from [default: any trusted host with the capsule].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Pool to fetch from, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or a bucket, as
    /// `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Tag for the capsule on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub tag: Option<RefName>,
    /// Fetch only the description; pages are fetched when they are read.
    #[serde(default)]
    pub lazy: bool,
}

/// Body of `POST /v1/store/repair`: fetch the damaged and missing objects of capsules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RepairRequest {
    /// Capsule to repair [default: all].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<CapsuleRef>)]
    pub capsule: Option<CapsuleRef>,
    /// Host that is asked first [default: the nearest trusted host].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Pool folder with a file of the capsule's name to fetch from, as `MANAGER[,MANAGER][/FOLDER]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
}

/// Body of `POST /v1/push`: send a machine or a capsule to another host or to a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushRequest {
    /// Machine, which is suspended and handed off to the other host, or capsule, which is copied.
    pub subject: CapsuleRef,
    /// Target [default: the trusted host, if there is only one].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Target folder of a pool, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or a bucket,
    /// as `s3://BUCKET[/PREFIX][?endpoint=URL]`. The newest capsule of the machine, or the capsule, is
    /// copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Shrinking of guest memory before the suspend.
    #[serde(default)]
    pub balloon: BalloonTarget,
    /// Leave the machine running, and upload every new capsule of it in the background, also after a restart
    /// of the daemon.
    #[serde(default)]
    pub follow: bool,
    /// Stop that upload.
    #[serde(default)]
    pub unfollow: bool,
}

/// Cost of a transfer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TransferReport {
    /// Id of the capsule.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Host or pool on the other side.
    pub host: String,
    /// Bytes on the wire, both ways.
    pub wire_bytes: u64,
    /// Pages that were sent.
    pub pages: u64,
    /// Whether the capsule is complete at the receiver.
    pub whole: bool,
    /// Time from the request to the end.
    pub total_ms: f64,
}

/// Capsule that another host offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteCapsule {
    /// Name of the host.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Name of the capsule there.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// Machine whose newest capsule it is, if the name is that of a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub machine: Option<MachineName>,
    /// Digest of the manifest.
    #[schema(value_type = String)]
    pub id: CapsuleId,
    /// Time at which the capsule was taken.
    pub time_ms: u64,
    /// Size of the guest memory; 0 for a disk-only capsule.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Size of all disks.
    #[schema(value_type = u64)]
    pub disks: ByteSize,
    /// Whether the capsule is complete there.
    pub whole: bool,
}

/// Body of `POST /v1/buckets`: list the capsules of a bucket, after something was removed there if requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BucketRequest {
    /// Location of the store, as `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    pub bucket: String,
    /// Name to remove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub untag: Option<RefName>,
    /// Delete objects that no name needs, and no host that runs a machine from there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gc: bool,
    /// Read everything there and check its digests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
}

/// Capsule in a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BucketCapsule {
    /// Name of the capsule there.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// Digest of the manifest.
    #[schema(value_type = String)]
    pub id: CapsuleId,
    /// Time at which the capsule was taken.
    pub time_ms: u64,
    /// Size of memory and disks.
    #[schema(value_type = u64)]
    pub size: ByteSize,
}

/// Body of `POST /v1/cache`: index the pages of a file, so that transfers can skip them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheAddRequest {
    /// Absolute path of a disk image (raw or qcow2) or of any other file on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// Running machine whose memory is indexed, instead of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub machine: Option<MachineName>,
    /// Remove the file from the cache.
    #[serde(default)]
    pub forget: bool,
}

/// State of the hash cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheInfo {
    /// Size of the table.
    #[schema(value_type = u64)]
    pub table: ByteSize,
    /// Number of entries.
    pub slots: u64,
    /// Number of used entries.
    pub used: u64,
    /// Number of entries that were evicted.
    pub evictions: u64,
    /// Files that are indexed.
    pub sources: Vec<CacheSource>,
}

/// File that is indexed in the hash cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheSource {
    /// Path of the file.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Kind of the file: `raw`, `qcow2` or `memory`.
    pub kind: String,
    /// Number of its pages in the cache after the last scan.
    pub pages: u64,
    /// Number of pages that were read from it.
    pub hits: u64,
    /// Number of entries that were wrong because the file had changed.
    pub dropped: u64,
}

/// Upload of the capsules of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Uploads {
    /// Name of a host, or folder of a pool.
    pub to: String,
    /// Cause of the last failure; none if everything was uploaded or is being uploaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
}
