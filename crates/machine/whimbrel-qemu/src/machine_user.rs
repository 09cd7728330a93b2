//! User of a machine: the number that its QEMU runs as. It owns what that QEMU may touch, and nothing else.
//!
//! The numbers are far above those that a user database or a container hands out, and belong to nobody. Each
//! QEMU has its own, so that a flaw in one is no way to the files, the sockets or the processes of another.

use rustix::{
    fs::{Gid, Uid},
    process::{geteuid, getgid},
};
use std::{
    fs, io,
    os::{
        fd::BorrowedFd,
        unix::fs::{MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
};

/// Group of every machine's QEMU: it may open the boot files and the templates that the daemon passes to it.
const MACHINES: u32 = 0x6000_0000;
/// Bits of the numbers above it.
const NUMBER_MASK: u64 = 0x0fff_ffff;
const KVM: &str = "/dev/kvm";

/// User number of one machine's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineUser(u32);

impl MachineUser {
    /// The user that belongs to a random number.
    pub fn of_random(random: u64) -> Self {
        // Zero would be the group of all of them.
        Self(MACHINES + ((random & NUMBER_MASK) as u32).max(1))
    }

    /// The user that a runtime directory was made for; none if its QEMU runs as this process's own user.
    pub fn of_dir(dir: &Path) -> io::Result<Option<Self>> {
        let group = fs::metadata(dir)?.gid();
        Ok((group != getgid().as_raw()).then_some(Self(group)))
    }

    /// User number, which is also the number of its own group.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Groups of every machine user beside its own.
    pub(crate) fn groups() -> Vec<u32> {
        let kvm = fs::metadata(KVM).map(|device| device.gid()).ok();
        [MACHINES].into_iter().chain(kvm.filter(|group| *group != 0)).collect()
    }

    /// Makes a file or socket its own.
    pub fn give(self, path: &Path) -> io::Result<()> {
        chown(path, Some(self.0), Some(self.0))
    }

    /// Makes a directory that it may look into, and not change.
    pub fn make_dir(self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)?;
        chown(dir, None, Some(self.0))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o710))
    }

    /// Lets it make files in its directory, until [`QemuDir::close`].
    pub(crate) fn open_dir(self, dir: &Path) -> io::Result<()> {
        chown(dir, Some(self.0), None)
    }
}

/// Directory of one QEMU's sockets.
#[derive(Debug)]
pub(crate) struct QemuDir {
    path: PathBuf,
    user: Option<MachineUser>,
}

impl QemuDir {
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), user: MachineUser::of_dir(path)? })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path by which QEMU finds a file here. One with a user of its own works in the directory, and could
    /// not look through those above.
    pub(crate) fn seen_by_qemu(&self, name: &str) -> String {
        match self.user {
            Some(_) => name.to_owned(),
            None => self.path.join(name).display().to_string(),
        }
    }

    /// Lets QEMU open a file or socket here that this process has made.
    pub(crate) fn give(&self, file: &Path) -> io::Result<()> {
        self.user.map_or(Ok(()), |user| user.give(file))
    }

    /// Lets QEMU open a descriptor of this process anew once it is passed to it.
    pub(crate) fn give_descriptor(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let own = self.user.map(|user| (Uid::from_raw(user.0), Gid::from_raw(user.0)));
        own.map_or(Ok(()), |(uid, gid)| Ok(rustix::fs::fchown(descriptor, Some(uid), Some(gid))?))
    }

    /// Lets QEMU make no more files here, before it reads what a guest or another host has written: it could
    /// put links in the place of its sockets.
    pub(crate) fn close(&self) -> io::Result<()> {
        match self.user {
            Some(_) => chown(&self.path, Some(geteuid().as_raw()), None),
            None => Ok(()),
        }
    }
}

/// Lets the QEMU of every machine open a file by a descriptor that is passed to it. Its directory must be
/// closed to them.
pub(crate) fn share_with_machines(file: &Path, mode: u32) -> io::Result<()> {
    let found = fs::metadata(file)?;
    if found.gid() != MACHINES || found.mode() & 0o777 != mode {
        chown(file, None, Some(MACHINES))?;
        fs::set_permissions(file, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}
