//! Devices of disks and network ports, in the words of QEMU's option `-device` and of its monitor's command
//! `device_add`. Pure.
//!
//! A device that was added while the machine ran is on the bridge for that, with the slot number that it
//! would have elsewhere.

use super::spec::{MAX_DISKS, sata_disks};
use whimbrel_core::{DeviceModel, HotplugBridge, MachineConfig};

/// Seconds for which a disk tries to reconnect to its NBD server while requests wait: the server is the
/// daemon, which may restart.
pub(crate) const RECONNECT_DELAY: u32 = 3600;
/// Selects the older of the two register layouts for every virtio device. The newer one adds the location of
/// 1,024 possible queues to the state of each device: 45 KB and 0.4 ms at every pause. It has the same
/// features except some of no use here (packed rings, an IOMMU).
pub(super) const LEGACY: &str = "disable-modern=on,disable-legacy=off";
/// Guests do not leave UDP fragments to the network: a packet socket cannot say them. Linux has given them up
/// as well (4.14).
const NO_FRAGMENTS: &str = "host_ufo=off,guest_ufo=off";
/// The bridge is in the state of every pause, with 350 bytes. It is a conventional one, which Linux and
/// Windows know without a driver: ACPI tells them of devices that come and go.
pub(super) const BRIDGE: &str = "pci-bridge,id=hotplug0,chassis_nr=1,addr=0x6";
const FIRST_NIC_SLOT: usize = 0x08;
const FIRST_DISK_SLOT: usize = 0x10;

/// Words of network port `index`.
pub(crate) fn nic(config: &MachineConfig, index: usize) -> String {
    let is_plugged = |bridge: &HotplugBridge| bridge.has_nic(index);
    let slot = slot(config.hotplug.as_ref().is_some_and(is_plugged), FIRST_NIC_SLOT + index);
    let mac = &config.nics[index].mac;
    let (model, features) = match config.devices {
        DeviceModel::Virtio => ("virtio-net-pci", format!(",{NO_FRAGMENTS},{LEGACY}")),
        DeviceModel::Emulated => ("e1000", String::new()),
    };
    // No boot ROM: it would add 256 KiB of memory outside RAM to every state.
    format!("{model},id=nic{index},netdev=net{index},mac={mac},{slot},romfile={features}")
}

/// Words of disk `index`, which is one of the guest.
pub(crate) fn disk(config: &MachineConfig, index: usize) -> String {
    let is_cdrom = config.cdroms.has(index);
    // The guest never sees storage errors of the host: the machine pauses and its owner is notified.
    let common = format!("id=disk{index},drive=disk{index},werror=stop,rerror=stop");
    let boot = match &config.boot {
        None => format!(",bootindex={}", boot_place(config, index)),
        Some(_) => String::new(),
    };
    match sata_disks(config).position(|disk| disk == index) {
        Some(port) if is_cdrom => format!("ide-cd,{common},bus=ide.{port}{boot}"),
        Some(port) => format!("ide-hd,{common},bus=ide.{port}{boot}"),
        None => {
            let is_plugged = |bridge: &HotplugBridge| bridge.has_disk(index);
            let slot = slot(config.hotplug.as_ref().is_some_and(is_plugged), FIRST_DISK_SLOT + index);
            format!("virtio-blk-pci,{common},{slot},{LEGACY}{boot}")
        }
    }
}

fn slot(is_plugged: bool, number: usize) -> String {
    let bus = if is_plugged { "bus=hotplug0," } else { "" };
    format!("{bus}addr={number:#x}")
}

/// Place of a disk in the order in which the firmware tries them: media of CD-ROM drives come after all
/// others, or before.
fn boot_place(config: &MachineConfig, index: usize) -> usize {
    let cdroms = &config.cdroms;
    if cdroms.has(index) == cdroms.first { index } else { index + MAX_DISKS }
}
