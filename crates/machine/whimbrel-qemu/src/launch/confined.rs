//! The specification as a confined QEMU sees it: it works in its runtime directory, and what lies elsewhere
//! it gets as descriptors.

use super::{LaunchError, LaunchSpec, Sharing};
use crate::{
    confinement::{Confinement, OwnUser},
    machine_user::{MachineUser, share_with_machines},
};
use rustix::fs::{Mode, OFlags};
use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Mode of templates, which the QEMU of every clone opens.
const TEMPLATE_MODE: u32 = 0o660;
/// Mode of kernels, initial RAM disks and firmware.
const BOOT_FILE_MODE: u32 = 0o640;

impl LaunchSpec {
    /// What `binary` is started with, and how it is confined.
    ///
    /// A QEMU whose runtime directory was made for a user of its own can make its sockets there from now on,
    /// until [`QemuDir::close`](crate::machine_user::QemuDir::close).
    pub(crate) fn confined(&self, binary: &Path) -> Result<(Self, Confinement), LaunchError> {
        let mut inherited: Vec<OwnedFd> = userfaultfd_device().into_iter().collect();
        let Some(user) = MachineUser::of_dir(&self.dir).map_err(io_error("the runtime directory"))? else {
            let confinement = Confinement::of_machine(None, inherited);
            return Ok((self.clone(), self.connect(confinement)));
        };
        let inside = self.seen_by(user, &mut inherited).map_err(io_error("what a confined qemu opens"))?;
        let dir = open(&self.dir, OFlags::DIRECTORY).map_err(io_error("the runtime directory"))?;
        let own = OwnUser::of_machine(user, dir, self.config.memory.0);
        let confinement = Confinement::of_machine(Some(own), inherited).with_files_of(binary);
        let confinement = confinement.map_err(io_error("the list of files that qemu may open"))?;
        Ok((inside, self.connect(confinement)))
    }

    fn connect(&self, confinement: Confinement) -> Confinement {
        confinement.in_network_of(self.network.clone()).with_socket(self.tpm.clone())
    }

    fn seen_by(&self, user: MachineUser, inherited: &mut Vec<OwnedFd>) -> io::Result<Self> {
        match self.ram.sharing {
            Sharing::Shared => user.give(&self.ram.path)?,
            Sharing::Private => share_with_machines(&self.ram.path, TEMPLATE_MODE)?,
        }
        for file in self.kernel.iter().chain(&self.initrd).chain(&self.firmware) {
            share_with_machines(file, BOOT_FILE_MODE)?;
        }
        user.open_dir(&self.dir)?;
        let mut pass = |path: &Path| pass(path, inherited);
        let mut inside = self.clone();
        inside.ram.path = pass(&self.ram.path)?;
        inside.kernel = self.kernel.as_deref().map(&mut pass).transpose()?;
        inside.initrd = self.initrd.as_deref().map(&mut pass).transpose()?;
        inside.firmware = self.firmware.as_deref().map(&mut pass).transpose()?;
        inside.dir = PathBuf::from(".");
        for disk in &mut inside.disks {
            *disk = disk.strip_prefix(&self.dir).unwrap_or(disk).to_owned();
        }
        Ok(inside)
    }
}

/// Adds a descriptor of the file; the path by which the process that inherits it opens the file. The kernel
/// then looks at the mode of the file alone, and not at the directories that lead to it.
fn pass(path: &Path, inherited: &mut Vec<OwnedFd>) -> io::Result<PathBuf> {
    let fd = open(path, OFlags::PATH)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    inherited.push(fd);
    Ok(path.into())
}

fn open(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> LaunchError {
    move |source| LaunchError::Io { what, source }
}

/// Device through which a process without capabilities may be made to create a userfaultfd for faults of the
/// kernel too (`userfaultfd(2)`); `whimbrel-memory` looks for it among the descriptors of QEMU. Where the
/// device is missing, the sysctl `vm.unprivileged_userfaultfd` decides.
fn userfaultfd_device() -> Option<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    device.map(OwnedFd::from).ok()
}
