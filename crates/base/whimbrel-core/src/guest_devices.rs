//! Devices of a machine for which a guest needs drivers: disks, CD-ROM drives and network ports, and the
//! bridge that takes more of them while the machine runs.

use serde::{Deserialize, Serialize};

/// Kind of the disks and network ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceModel {
    /// Virtio: made for virtual machines, the fastest.
    #[default]
    Virtio,
    /// SATA disks and Intel's e1000: of real computers, so that every system knows them.
    Emulated,
}

/// CD-ROM drives of a machine. The medium of each is one of the machine's disks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CdromDrives {
    /// Indexes of the disks that are media, in rising order.
    pub disks: Vec<u32>,
    /// Whether the machine boots from them before it tries its other disks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub first: bool,
}

/// PCI bridge that takes disks and network ports while the machine runs. Devices that were added then stay on
/// it, so that the guest finds each where it was.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotplugBridge {
    /// Indexes of the disks on it, in rising order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<u32>,
    /// Indexes of the network ports on it, in rising order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<u32>,
}

impl DeviceModel {
    pub(crate) fn is_virtio(&self) -> bool {
        *self == Self::Virtio
    }

    /// A word for it in an offer; none for virtio.
    pub fn word(self) -> Option<&'static str> {
        (self == Self::Emulated).then_some("emulated")
    }

    /// The kind that a word stands for, if it is one.
    pub fn of_word(word: &str) -> Option<Self> {
        (word == "emulated").then_some(Self::Emulated)
    }
}

impl CdromDrives {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether disk `index` is a medium.
    pub fn has(&self, index: usize) -> bool {
        self.disks.iter().any(|disk| *disk as usize == index)
    }

    /// A word for them in an offer; none for a machine without.
    pub fn word(&self) -> Option<String> {
        let disks: Vec<_> = self.disks.iter().map(u32::to_string).collect();
        let kind = if self.first { "bootcd" } else { "cd" };
        (!self.is_empty()).then(|| format!("{kind}.{}", disks.join(".")))
    }

    /// The drives that a word stands for, if it is one.
    pub fn of_word(word: &str) -> Option<Self> {
        let (kind, disks) = word.split_once('.')?;
        let first = match kind {
            "cd" => false,
            "bootcd" => true,
            _ => return None,
        };
        let numbers = disks.split('.').filter(|number| !number.is_empty());
        Some(Self { disks: numbers.map(str::parse).collect::<Result<_, _>>().ok()?, first })
    }
}

impl HotplugBridge {
    /// Whether disk `index` is on it.
    pub fn has_disk(&self, index: usize) -> bool {
        self.disks.iter().any(|disk| *disk as usize == index)
    }

    /// Whether network port `index` is on it.
    pub fn has_nic(&self, index: usize) -> bool {
        self.nics.iter().any(|nic| *nic as usize == index)
    }

    /// Takes network port `index` away: those after it have other indexes then.
    pub fn remove_nic(&mut self, index: usize) {
        self.nics.retain(|nic| *nic as usize != index);
        self.nics.iter_mut().filter(|nic| **nic as usize > index).for_each(|nic| *nic -= 1);
    }

    /// A word for it in an offer.
    pub fn word(&self) -> String {
        let all = |letter, indexes: &[u32]| indexes.iter().map(|index| format!(".{letter}{index}")).collect();
        let (disks, nics): (String, String) = (all('d', &self.disks), all('n', &self.nics));
        format!("hotplug{disks}{nics}")
    }

    /// The bridge that a word stands for, if it is one.
    pub fn of_word(word: &str) -> Option<Self> {
        let mut parts = word.split('.');
        let mut bridge = (parts.next() == Some("hotplug")).then(Self::default)?;
        for part in parts {
            let (indexes, number) = match part.split_at_checked(1)? {
                ("d", number) => (&mut bridge.disks, number),
                ("n", number) => (&mut bridge.nics, number),
                _ => return None,
            };
            indexes.push(number.parse().ok()?);
        }
        Some(bridge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written_and_others_are_none() {
        for (disks, first) in [(vec![1], false), (vec![0, 13], true), (vec![], true)] {
            let drives = CdromDrives { disks, first };
            assert_eq!(CdromDrives::of_word(&drives.word().expect("a word")), Some(drives));
        }
        assert_eq!(CdromDrives::default().word(), None);
        for word in ["", "cd", "cd.x", "cd.-1", "dvd.1", "cd.1.4294967296"] {
            assert_eq!(CdromDrives::of_word(word), None, "{word}");
        }
        assert_eq!(DeviceModel::of_word(DeviceModel::Emulated.word().unwrap()), Some(DeviceModel::Emulated));
        assert_eq!((DeviceModel::Virtio.word(), DeviceModel::of_word("virtio")), (None, None));
        for (disks, nics) in [(vec![], vec![]), (vec![2, 13], vec![]), (vec![1], vec![0, 7])] {
            let bridge = HotplugBridge { disks, nics };
            assert_eq!(HotplugBridge::of_word(&bridge.word()), Some(bridge));
        }
        for word in ["", "hotplug.", "hotplug.d", "hotplug.x1", "hotplug.1", "hotplugs", "hotplug.d-1"] {
            assert_eq!(HotplugBridge::of_word(word), None, "{word}");
        }
    }

    #[test]
    fn ports_after_one_that_is_taken_away_move_up() {
        let mut bridge = HotplugBridge { disks: vec![1], nics: vec![1, 2, 4] };
        bridge.remove_nic(2);
        assert_eq!(bridge, HotplugBridge { disks: vec![1], nics: vec![1, 3] });
        bridge.remove_nic(0);
        assert_eq!(bridge.nics, [0, 2]);
        assert!(bridge.has_nic(2) && !bridge.has_nic(1) && bridge.has_disk(1) && !bridge.has_disk(0));
    }
}
