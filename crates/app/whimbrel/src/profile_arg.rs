//! The argument of `--profile`.

use clap::ValueEnum;
use whimbrel_api::Profile;

/// Hardware of a machine.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ProfileArg {
    /// PC with a BIOS; boots disks and kernels
    Default,
    /// PC with UEFI, whose variables are a disk of the machine
    Uefi,
    /// No BIOS and no old devices; starts the kernel of --kernel
    Micro,
}

impl From<ProfileArg> for Profile {
    fn from(argument: ProfileArg) -> Self {
        match argument {
            ProfileArg::Default => Self::Default,
            ProfileArg::Uefi => Self::Uefi,
            ProfileArg::Micro => Self::Micro,
        }
    }
}
