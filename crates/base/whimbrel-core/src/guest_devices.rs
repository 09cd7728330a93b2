//! Devices of a machine for which a guest needs drivers: disks, CD-ROM drives and network ports.

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
    }
}
