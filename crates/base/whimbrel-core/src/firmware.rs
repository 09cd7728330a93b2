//! Firmware of a machine: the first program that its CPUs execute. It decides what can be booted.

use crate::Digest;
use serde::{Deserialize, Serialize};

/// What starts the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// A BIOS, which boots disks and kernels.
    #[default]
    Bios,
    /// A loader that starts a kernel and knows no disk, and a machine without the devices of a PC that no
    /// such guest needs.
    Micro,
    /// UEFI, with variables that outlive a restart.
    Uefi(Uefi),
}

/// Parts of a UEFI firmware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uefi {
    /// Digest of the program, a boot file as kernels are.
    pub code: Digest,
    /// Index of the disk with its variables. To the guest it is flash memory; to all else a disk.
    pub variables: u32,
    /// Whether it starts only programs that are signed (Secure Boot).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub secure: bool,
}

impl Firmware {
    /// Parts of the firmware, if it is UEFI.
    pub fn uefi(&self) -> Option<&Uefi> {
        match self {
            Self::Uefi(uefi) => Some(uefi),
            Self::Bios | Self::Micro => None,
        }
    }

    pub(crate) fn is_bios(&self) -> bool {
        *self == Self::Bios
    }

    /// A word for the firmware in an offer of earlier form; none for a BIOS. [`Self::of_word`] reads it.
    pub fn word(&self) -> Option<String> {
        match self {
            Self::Bios => None,
            Self::Micro => Some("micro".to_owned()),
            Self::Uefi(Uefi { code, variables, secure: false }) => Some(format!("uefi.{variables}.{code}")),
            Self::Uefi(Uefi { code, variables, secure: true }) => Some(format!("secure.{variables}.{code}")),
        }
    }

    /// The firmware that a word stands for, if it is one.
    pub fn of_word(word: &str) -> Option<Self> {
        if word == "micro" {
            return Some(Self::Micro);
        }
        let (kind, parts) = word.split_once('.')?;
        let secure = match kind {
            "uefi" => false,
            "secure" => true,
            _ => return None,
        };
        let (variables, code) = parts.split_once('.')?;
        Some(Self::Uefi(Uefi { code: code.parse().ok()?, variables: variables.parse().ok()?, secure }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written_and_others_are_none() {
        let uefi = |secure| Firmware::Uefi(Uefi { code: Digest::of(b"code"), variables: 3, secure });
        for firmware in [Firmware::Micro, uefi(false), uefi(true)] {
            assert_eq!(Firmware::of_word(&firmware.word().expect("a word")), Some(firmware));
        }
        assert_eq!(Firmware::Bios.word(), None);
        for word in ["", "bios", "uefi", "uefi.1", "uefi.1.xyz", "uefi.-1.00", "secure", "other.1.00"] {
            assert_eq!(Firmware::of_word(word), None, "{word}");
        }
    }
}
