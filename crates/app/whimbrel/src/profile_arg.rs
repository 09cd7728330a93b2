//! The argument of `--profile`.

use clap::ValueEnum;
use whimbrel_api::Profile;

/// Hardware of a machine. The help says what each is: one text for each would make all help texts long.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ProfileArg {
    Default,
    Uefi,
    Desktop,
    Micro,
}

impl From<ProfileArg> for Profile {
    fn from(argument: ProfileArg) -> Self {
        match argument {
            ProfileArg::Default => Self::Default,
            ProfileArg::Uefi => Self::Uefi,
            ProfileArg::Desktop => Self::Desktop,
            ProfileArg::Micro => Self::Micro,
        }
    }
}
