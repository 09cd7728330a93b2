//! Kernel and modules of machines that are made of container images.

use super::{
    GuestError,
    kernel::{Flavour, Kernel},
};
use std::path::PathBuf;

/// A kernel as a host has it in /boot, and the folder with its modules.
#[derive(Debug)]
pub struct ContainerKernel {
    /// Path of the kernel.
    pub image: PathBuf,
    /// Folder with its modules.
    pub modules: PathBuf,
}

impl ContainerKernel {
    /// The kernel of the small guest, downloaded if necessary.
    pub fn get() -> Result<Self, GuestError> {
        let kernel = Kernel::get(Flavour::Cloud)?;
        Ok(Self { modules: kernel.container_modules(), image: kernel.image })
    }
}
