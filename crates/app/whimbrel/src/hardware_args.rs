//! Arguments about the hardware of a machine.

use clap::ValueEnum;
use whimbrel_api::{BootOrder, Profile};
use whimbrel_core::DeviceModel;

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
