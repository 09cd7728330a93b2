//! Parts of a machine that hosts of earlier versions do not give it: a port for qemu-ga, firmware other than
//! a BIOS, a TPM, a screen, CD-ROM drives, emulated devices, a bridge for devices that come later.

use crate::core::error::DaemonError;
use whimbrel_core::{CdromDrives, DeviceModel, Firmware, HostName, MachineConfig};
use whimbrel_migrate::protocol::{
    AGENT_PORT_VERSION, DEVICES_VERSION, DISPLAY_VERSION, FIRMWARE_VERSION, HOTPLUG_VERSION, PROTOCOL,
};
use whimbrel_wire::Connection;

/// Refuses a host of an earlier version if the machine has such a part. It would refuse the offer as well, by
/// a machine type that it does not know; this says why.
pub(crate) fn check(peer: &Connection, host: &HostName, config: &MachineConfig) -> Result<(), DaemonError> {
    match unknown_part(peer.peer().version_of(&PROTOCOL), config) {
        Some(what) => Err(DaemonError::OlderHost { host: host.clone(), what }),
        None => Ok(()),
    }
}

/// A part that a host does not know which has this version in common with us for messages of moves.
fn unknown_part(common: Option<u16>, config: &MachineConfig) -> Option<&'static str> {
    let parts = [
        (config.agent_port, AGENT_PORT_VERSION, "a port for qemu-ga"),
        (config.firmware != Firmware::Bios, FIRMWARE_VERSION, "this firmware of the machine"),
        (config.tpm.is_some(), FIRMWARE_VERSION, "a TPM"),
        (config.display, DISPLAY_VERSION, "a screen"),
        (config.firmware.uefi().is_some_and(|uefi| uefi.secure), DEVICES_VERSION, "Secure Boot"),
        (config.cdroms != CdromDrives::default(), DEVICES_VERSION, "a CD-ROM drive"),
        (config.devices != DeviceModel::Virtio, DEVICES_VERSION, "SATA disks and e1000 ports"),
        (config.hotplug.is_some(), HOTPLUG_VERSION, "a bridge for devices that are added while it runs"),
    ];
    let is_unknown = |(has, since, _): &(bool, u16, _)| *has && common.is_none_or(|version| version < *since);
    parts.into_iter().find(is_unknown).map(|(_, _, what)| what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::{ByteSize, HotplugBridge};

    #[test]
    fn what_a_host_does_not_know_is_named_before_anything_is_offered() {
        let plain = MachineConfig::minimal(ByteSize(1 << 20));
        let with_port = MachineConfig { agent_port: true, ..plain.clone() };
        let micro = MachineConfig { firmware: Firmware::Micro, ..plain.clone() };
        let newest = Some(PROTOCOL.range().newest);
        let with_tpm = MachineConfig { tpm: Some(1), ..plain.clone() };
        let with_display = MachineConfig { display: true, ..plain.clone() };
        let cdroms = CdromDrives { disks: vec![0], first: false };
        let with_cdrom = MachineConfig { cdroms, ..plain.clone() };
        let emulated = MachineConfig { devices: DeviceModel::Emulated, ..plain.clone() };
        let with_bridge = MachineConfig { hotplug: Some(HotplugBridge::default()), ..plain.clone() };
        let all =
            [&plain, &with_port, &micro, &with_tpm, &with_display, &with_cdrom, &emulated, &with_bridge];
        for config in all {
            assert_eq!(unknown_part(newest, config), None);
        }
        assert_eq!(unknown_part(None, &plain), None);
        assert_eq!(unknown_part(Some(AGENT_PORT_VERSION - 1), &with_port), Some("a port for qemu-ga"));
        assert!(unknown_part(None, &with_port).is_some() && unknown_part(None, &micro).is_some());
        assert!(unknown_part(Some(FIRMWARE_VERSION - 1), &micro).is_some());
        assert_eq!(unknown_part(Some(FIRMWARE_VERSION - 1), &with_tpm), Some("a TPM"));
        assert_eq!(unknown_part(Some(DISPLAY_VERSION - 1), &with_display), Some("a screen"));
        let before = Some(DEVICES_VERSION - 1);
        assert_eq!(unknown_part(before, &with_cdrom), Some("a CD-ROM drive"));
        assert!(unknown_part(Some(HOTPLUG_VERSION - 1), &with_bridge).is_some());
        assert!(unknown_part(before, &emulated).is_some() && unknown_part(before, &with_display).is_none());
    }
}
