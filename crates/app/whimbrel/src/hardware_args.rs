//! Arguments about the hardware of a machine.

use clap::ValueEnum;
use std::str::FromStr;
use whimbrel_api::{BootOrder, DiskSize, Profile};
use whimbrel_core::{ByteSize, DeviceModel, ParseSizeError};

/// Hardware of a machine. The help says what each is: one text for each would make all help texts long.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ProfileArg {
    Default,
    Uefi,
    Desktop,
    Micro,
    Foreign,
}

impl From<ProfileArg> for Profile {
    fn from(argument: ProfileArg) -> Self {
        match argument {
            ProfileArg::Default => Self::Default,
            ProfileArg::Uefi => Self::Uefi,
            ProfileArg::Desktop => Self::Desktop,
            ProfileArg::Micro => Self::Micro,
            ProfileArg::Foreign => Self::Foreign,
        }
    }
}

/// What a machine boots from first. The help of the option says what each is, which keeps it short.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum BootOrderArg {
    Disk,
    Cdrom,
}

impl From<BootOrderArg> for BootOrder {
    fn from(argument: BootOrderArg) -> Self {
        match argument {
            BootOrderArg::Disk => Self::Disk,
            BootOrderArg::Cdrom => Self::Cdrom,
        }
    }
}

/// Kind of disks and network ports. The help of the option says what each is.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum DevicesArg {
    Virtio,
    Emulated,
}

impl From<DevicesArg> for DeviceModel {
    fn from(argument: DevicesArg) -> Self {
        match argument {
            DevicesArg::Virtio => Self::Virtio,
            DevicesArg::Emulated => Self::Emulated,
        }
    }
}

/// Size of a disk: `SIZE` of the first one, or `DISK=SIZE`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskSizeArg(pub(crate) DiskSize);

impl FromStr for DiskSizeArg {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        let (disk, size) = match text.split_once('=') {
            Some((disk, size)) => (disk.parse().ok(), size),
            None => (Some(0), text),
        };
        // A number that is none makes the whole something that is no size.
        let size: ByteSize = if disk.is_some() { size.parse()? } else { text.parse()? };
        Ok(Self(DiskSize { disk: disk.unwrap_or_default(), size }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_of_the_first_disk_or_of_the_one_that_is_named() {
        let read = |text: &str| text.parse::<DiskSizeArg>().map(|it| (it.0.disk, it.0.size.0)).ok();
        assert_eq!((read("8K"), read("2=8K")), (Some((0, 8192)), Some((2, 8192))));
        assert_eq!([read(""), read("=8K"), read("x=8K"), read("1="), read("-1=8K")], [None; 5]);
    }
}
