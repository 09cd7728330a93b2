//! Machine configuration. Every capsule contains it, so any host can build the machine again.

use crate::{ByteSize, CdromDrives, DeviceModel, Digest, Firmware, HotplugBridge};
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not", with = "named_member")]
    pub agent_port: bool,
    /// What starts the guest. Not in messages between hosts either.
    #[serde(default, skip_serializing_if = "Firmware::is_bios", with = "named_member")]
    pub firmware: Firmware,
    /// Index of the disk with the state of its TPM, if it has one. The guest has no such disk. Not in
    /// messages between hosts either.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "named_member")]
    pub tpm: Option<u32>,
    /// Whether it has a screen, a keyboard and a pointer. Not in messages between hosts either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", with = "named_member")]
    pub display: bool,
    /// Kind of its disks and network ports. Not in messages between hosts either.
    #[serde(default, skip_serializing_if = "DeviceModel::is_virtio", with = "named_member")]
    pub devices: DeviceModel,
    /// CD-ROM drives. Not in messages between hosts either.
    #[serde(default, skip_serializing_if = "CdromDrives::is_empty", with = "named_member")]
    pub cdroms: CdromDrives,
    /// Bridge for disks and network ports that are added while it runs. Machines of before it existed have
    /// none, and their device state loads only without it. Not in messages between hosts either.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "named_member")]
    pub hotplug: Option<HotplugBridge>,
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
            firmware: Firmware::Bios,
            tpm: None,
            display: false,
            devices: DeviceModel::Virtio,
            cdroms: CdromDrives::default(),
            hotplug: None,
        }
    }
}

/// The form of fields that came later: a member in JSON, and nothing in messages, where fields have no names
/// and a new one would change the meaning of those after it. An offer says them in its own way.
mod named_member {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes the member.
    pub(super) fn serialize<T: Serialize, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => value.serialize(serializer),
            false => ().serialize(serializer),
        }
    }

    /// Reads the member.
    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: Deserialize<'de> + Default,
        D: Deserializer<'de>,
    {
        match deserializer.is_human_readable() {
            true => T::deserialize(deserializer),
            false => Ok(T::default()),
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
    /// Files that QEMU reads before the guest runs, which go wherever the machine goes: a kernel, its initial
    /// RAM disk, a firmware.
    pub fn boot_files(&self) -> impl Iterator<Item = Digest> + use<> {
        let kernel = self.boot.as_ref().map(|boot| boot.kernel);
        let initrd = self.boot.as_ref().and_then(|boot| boot.initrd);
        [kernel, initrd, self.firmware.uefi().map(|uefi| uefi.code)].into_iter().flatten()
    }

    /// Pages of guest memory.
    pub fn memory_pages(&self) -> u64 {
        self.memory.0 / crate::PAGE_SIZE as u64
    }
}
