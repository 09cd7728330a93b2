//! Machine configuration. Every capsule contains it, so any host can build the machine again.

use crate::{ByteSize, Digest};
use serde::{Deserialize, Serialize};

/// The configuration of a machine: what source and target must agree on, nothing about a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    /// Guest memory, a multiple of 1 MiB.
    pub memory: ByteSize,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// QEMU machine type. Versioned (`pc-q35-7.2`) after the first run, so that another QEMU can load it.
    pub machine: String,
    /// QEMU CPU model with its features, as [`crate::cpu_model()`] writes it.
    pub cpu: String,
    /// The accelerator that executes guest instructions.
    pub accel: Accel,
    /// Disks, in the order of their device ids `disk0`, `disk1`, …
    pub disks: Vec<DiskConfig>,
    /// Network ports, in the order of their device ids `net0`, `net1`, …
    pub nics: Vec<NicConfig>,
    /// A kernel that QEMU loads directly; without one the machine boots from `disk0`.
    pub boot: Option<Boot>,
    /// Whether the machine has a port for qemu-ga. Those of before it existed have none, and their device
    /// state loads only without it. Not in messages between hosts, whose form is fixed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", with = "agent_port")]
    pub agent_port: bool,
}

impl MachineConfig {
    /// A machine with `memory` and one virtual CPU, translated, without disks, network ports and kernel.
    pub fn minimal(memory: ByteSize) -> Self {
        Self {
            memory,
            cpus: 1,
            machine: "pc-q35-7.2".to_owned(),
            cpu: crate::cpu_model::ALL_FEATURES.to_owned(),
            accel: Accel::Tcg,
            disks: Vec::new(),
            nics: Vec::new(),
            boot: None,
            agent_port: false,
        }
    }
}

/// The form of [`MachineConfig::agent_port`]: a member in JSON, and nothing in messages, where fields have no
/// names and a new one would change the meaning of those after it. An offer says it in its own way.
mod agent_port {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes the member.
    pub(super) fn serialize<S: Serializer>(has_port: &bool, serializer: S) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => has_port.serialize(serializer),
            false => ().serialize(serializer),
        }
    }

    /// Reads the member.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        match deserializer.is_human_readable() {
            true => bool::deserialize(deserializer),
            false => Ok(false),
        }
    }
}

/// The accelerator that executes guest instructions. Device state loads only under the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// QEMU's own binary translator; works everywhere.
    Tcg,
    /// Hardware virtualisation by the kernel.
    Kvm,
}

/// One disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Size of the virtual disk, a multiple of 4 KiB.
    pub size: ByteSize,
}

/// One network port of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// Hardware address, as six hexadecimal bytes with colons.
    pub mac: String,
    /// Bridge on the host that the port joins; without one the port is unplugged.
    pub bridge: Option<String>,
}

/// A kernel that QEMU loads without a boot loader. The files are stored in the capsule as blobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// Digest of the kernel file.
    pub kernel: Digest,
    /// Digest of the initial RAM disk.
    pub initrd: Option<Digest>,
    /// Kernel command line.
    pub append: String,
}

impl MachineConfig {
    /// Pages of guest memory.
    pub fn memory_pages(&self) -> u64 {
        self.memory.0 / crate::PAGE_SIZE as u64
    }
}
