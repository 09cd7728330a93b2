//! Description of a host, of its store and of the hosts that it trusts.

use crate::{MachineInfo, openapi_names::Name};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::{Accel, ByteSize, HostName};

/// Answer of `GET /v1/host`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    /// Name of the host, by which other hosts trust it.
    #[schema(value_type = Name)]
    pub name: HostName,
    /// Version of the daemon.
    pub version: String,
    /// Public ed25519 key, in the form that `whimbrel trust add` reads.
    pub public_key: String,
    /// Address for other hosts; none if they cannot connect.
    pub listen: Option<String>,
    /// Directory with the store and the machines.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// Process id of the daemon.
    pub pid: u32,
    /// Version of QEMU; none if it is not installed.
    pub qemu_version: Option<String>,
    /// Default executor of guest instructions.
    #[schema(value_type = String)]
    pub accel: Accel,
    /// Number of machines.
    pub machines: u32,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Usage of the store.
    pub store: StoreUsage,
    /// Memory for machines; not told by earlier daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<HostMemory>,
}

/// Host with its machines. Also the answer of `GET /v1/hosts`, of which the first is the host that was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostMachines {
    /// Name of the host.
    #[schema(value_type = Name)]
    pub name: HostName,
    /// Memory for machines, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<HostMemory>,
    /// Machines of the host; of another one those whose capsules the asked host may read.
    pub machines: Vec<MachineInfo>,
    /// Why another host has not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Memory of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostMemory {
    /// All memory of the host.
    #[schema(value_type = u64)]
    pub total: ByteSize,
    /// What is left for new machines: neither used nor promised to a machine.
    #[schema(value_type = u64)]
    pub spare: ByteSize,
}

/// Content and size of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct StoreUsage {
    /// Number of capsules.
    pub capsules: u64,
    /// Bytes used on disk.
    #[schema(value_type = u64)]
    pub stored: ByteSize,
    /// Size of the images of all capsules without sharing and compression.
    #[schema(value_type = u64)]
    pub logical: ByteSize,
    /// Free bytes of the file system.
    #[schema(value_type = u64)]
    pub free: ByteSize,
}

/// Trusted host. Also the body of `POST /v1/trust`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrustEntry {
    /// Name of the host.
    #[schema(value_type = Name)]
    pub name: HostName,
    /// Public key, as `whimbrel key` prints it there. Optional for a host that is reached over ssh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Address `address:port` of its daemon, or `ssh:destination`. Without one, machines can arrive from that
    /// host but not be sent to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Patterns with `*` and `?` of the refs that it may read. Without this and `write` it may use all refs;
    /// with one of them, only those that match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Vec<String>>,
    /// Patterns of the refs that it may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Vec<String>>,
}

/// Body of `POST /v1/cpu/baseline`: the CPU model that hosts have in common.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CpuBaselineRequest {
    /// Trusted hosts to compare with this one.
    #[serde(default)]
    #[schema(value_type = Vec<Name>)]
    pub hosts: Vec<HostName>,
}

/// CPU model that hosts have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuBaseline {
    /// The model, as `cpu` of `POST /v1/machines` takes it.
    pub model: String,
    /// Features that all hosts have.
    pub features: Vec<String>,
    /// The hosts, this one first.
    pub hosts: Vec<CpuHost>,
}

/// Processor of a host, as its QEMU gives it to guests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuHost {
    /// Name of the host.
    #[schema(value_type = Name)]
    pub name: HostName,
    /// Executor of guest instructions.
    #[schema(value_type = String)]
    pub accel: Accel,
    /// Version of its QEMU.
    pub qemu_version: String,
    /// Features that another host of the group has and this one does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}
