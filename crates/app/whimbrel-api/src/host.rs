//! The host itself: who it is, what it has, whom it trusts.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::{Accel, ByteSize, HostName};

/// What `GET /v1/host` answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    /// Its name among those who trust each other.
    #[schema(value_type = String)]
    pub name: HostName,
    /// Version of the daemon.
    pub version: String,
    /// Its ed25519 public key, in the form `whimbrel trust add` reads.
    pub public_key: String,
    /// Address it takes other hosts' connections on; none if it takes none.
    pub listen: Option<String>,
    /// Directory with its store and its machines.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// Process id of the daemon.
    pub pid: u32,
    /// Version of the QEMU it starts; none if it found none.
    pub qemu_version: Option<String>,
    /// What executes guest instructions unless a machine asks for something else.
    #[schema(value_type = String)]
    pub accel: Accel,
    /// How many machines it has.
    pub machines: u32,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// What its store holds.
    pub store: StoreUsage,
}

/// What a store holds and what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct StoreUsage {
    /// How many capsules.
    pub capsules: u64,
    /// Bytes on disk.
    #[schema(value_type = u64)]
    pub stored: ByteSize,
    /// Bytes the images of all capsules would take if nothing were shared or compressed.
    #[schema(value_type = u64)]
    pub logical: ByteSize,
    /// Bytes left on the file system.
    #[schema(value_type = u64)]
    pub free: ByteSize,
}

/// Another host that this one trusts. Also the body of `POST /v1/trust`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrustEntry {
    /// Its name.
    #[schema(value_type = String)]
    pub name: HostName,
    /// Its public key, as `whimbrel key` prints it there. A host that is reached over ssh may do without: ssh
    /// vouches for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Where it listens, `address:port`, or how ssh reaches it, `ssh:destination`. Without one it can come
    /// here but not be sent to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Refs of this host that it may read, patterns with `*` and `?`. Without this and `write` it may use
    /// all; with one of them only what they say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Vec<String>>,
    /// Refs of this host that it may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Vec<String>>,
}
