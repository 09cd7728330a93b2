//! The configuration of a machine in an offer. Parts that came later (a port for qemu-ga, a firmware, a TPM,
//! a screen, CD-ROM drives, emulated devices, a bridge for devices that come later) are words after the
//! machine type, each behind a `+`, which no type of QEMU has: a target that does not know one refuses the
//! offer, and the form is that of earlier versions.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use whimbrel_core::{CdromDrives, DeviceModel, Firmware, HotplugBridge, MachineConfig};

const AGENT_PORT: &str = "agent";
const TPM: &str = "tpm.";
const DISPLAY: &str = "display";

pub(crate) fn serialize<S: Serializer>(config: &MachineConfig, to: S) -> Result<S::Ok, S::Error> {
    let words = words_of(config).into_iter().flatten();
    let machine = words.fold(config.machine.clone(), |machine, word| format!("{machine}+{word}"));
    // The parts of which the form has no words are left out of it anyway.
    MachineConfig { machine, ..config.clone() }.serialize(to)
}

/// In the order in which earlier versions take them away again: the last first.
fn words_of(config: &MachineConfig) -> [Option<String>; 7] {
    [
        config.hotplug.as_ref().map(HotplugBridge::word),
        config.firmware.word(),
        config.tpm.map(|disk| format!("{TPM}{disk}")),
        config.devices.word().map(str::to_owned),
        config.cdroms.word(),
        config.display.then(|| DISPLAY.to_owned()),
        config.agent_port.then(|| AGENT_PORT.to_owned()),
    ]
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<MachineConfig, D::Error> {
    let plain = MachineConfig::deserialize(from)?;
    let mut words = plain.machine.split('+');
    let machine = words.next().unwrap_or_default().to_owned();
    let mut config = MachineConfig { machine, ..plain.clone() };
    // A word that is not known makes the whole a machine type that no QEMU has.
    let is_known = words.all(|word| set(&mut config, word).is_some());
    Ok(if is_known { config } else { plain })
}

/// Gives the machine the part that a word stands for, if it is one.
fn set(config: &mut MachineConfig, word: &str) -> Option<()> {
    if word == AGENT_PORT {
        config.agent_port = true;
    } else if word == DISPLAY {
        config.display = true;
    } else if let Some(disk) = word.strip_prefix(TPM) {
        config.tpm = Some(disk.parse().ok()?);
    } else if let Some(devices) = DeviceModel::of_word(word) {
        config.devices = devices;
    } else if let Some(drives) = CdromDrives::of_word(word) {
        config.cdroms = drives;
    } else if let Some(bridge) = HotplugBridge::of_word(word) {
        config.hotplug = Some(bridge);
    } else {
        config.firmware = Firmware::of_word(word)?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::{ByteSize, Digest, Uefi};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Offered(#[serde(with = "super")] MachineConfig);

    fn sent(config: &MachineConfig) -> MachineConfig {
        let bytes = postcard::to_stdvec(&Offered(config.clone())).unwrap();
        postcard::from_bytes::<Offered>(&bytes).unwrap().0
    }

    #[test]
    fn every_part_arrives_and_a_word_that_is_not_known_leaves_a_type_that_no_qemu_has() {
        let plain = MachineConfig::minimal(ByteSize(1 << 20));
        let code = Digest::of(b"code");
        let all = MachineConfig {
            agent_port: true,
            firmware: Firmware::Uefi(Uefi { code, variables: 1, secure: true }),
            tpm: Some(2),
            display: true,
            devices: DeviceModel::Emulated,
            cdroms: CdromDrives { disks: vec![3, 4], first: true },
            hotplug: Some(HotplugBridge { disks: vec![1, 2], nics: vec![0] }),
            ..plain.clone()
        };
        let cdrom = CdromDrives { disks: vec![0], first: false };
        let with_drive = MachineConfig { cdroms: cdrom, ..plain.clone() };
        let with_bridge = MachineConfig { hotplug: Some(HotplugBridge::default()), ..plain.clone() };
        for config in [plain.clone(), all, with_drive, with_bridge] {
            assert_eq!(sent(&config), config);
        }
        for machine in ["pc-q35-7.2+agent+floppy", "pc-q35-7.2+tpm.x", "pc-q35-7.2+"] {
            let later = MachineConfig { machine: machine.to_owned(), ..plain.clone() };
            assert_eq!(sent(&later), later);
        }
    }
}
