//! What a machine is made of. The capsule carries this, so a machine can be built again anywhere.

use crate::{ByteSize, Digest};
use serde::{Deserialize, Serialize};

/// The configuration of a machine: everything both ends of a move must agree on, nothing about a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    /// Guest memory, a multiple of 1 MiB.
    pub memory: ByteSize,
    /// Virtual CPUs.
    pub cpus: u32,
    /// QEMU machine type. Versioned (`pc-q35-7.2`) once the machine has run, so that another QEMU can load
    /// it.
    pub machine: String,
    /// QEMU CPU model.
    pub cpu: String,
    /// What executes guest instructions.
    pub accel: Accel,
    /// Disks, in the order of their device ids `disk0`, `disk1`, …
    pub disks: Vec<DiskConfig>,
    /// Network ports, in the order of their device ids `net0`, `net1`, …
    pub nics: Vec<NicConfig>,
    /// A kernel that QEMU loads directly; none boots from `disk0`.
    pub boot: Option<Boot>,
}

/// What executes guest instructions. State does not load under the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// QEMU's own translator; works everywhere.
    Tcg,
    /// Hardware virtualisation.
    Kvm,
}

/// One disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Size of the virtual disk, a multiple of 4 KiB.
    pub size: ByteSize,
}

/// One network port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicConfig {
    /// Hardware address, as six hexadecimal bytes with colons.
    pub mac: String,
    /// Bridge on the host that the port joins; none leaves it unplugged.
    pub bridge: Option<String>,
}

/// A kernel that QEMU loads without a boot loader. The files travel with the capsule as blobs.
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
