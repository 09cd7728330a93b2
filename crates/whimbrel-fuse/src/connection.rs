//! The kernel's side of a mount: a connection, which lives as long as any mount of it does.
//!
//! A mount namespace that was made while we were mounted has a copy of the mount, and whoever opened a file before a mount was
//! detached keeps it alive. Then an unmount here ends nothing: the threads wait for requests for as long as somebody
//! else likes. [`Connection::abort`] ends it for everybody. Needs what mounting needs, or a mounted fusectl.

use rustix::{
    fs::{Mode, OFlags, openat},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

/// Where a connection's number is looked up by most systems.
const MOUNTED: &str = "/sys/fs/fuse/connections";

/// A connection by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Connection(u32);

impl Connection {
    /// The connection of what is mounted on `path`: the minor number of its device (fs/fuse/inode.c).
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self(rustix::fs::minor(fs::metadata(path)?.dev())))
    }

    /// Ends it: what is being asked fails with `ECONNABORTED`, what is asked later with `ENOTCONN`.
    pub(crate) fn abort(self) -> io::Result<()> {
        match fs::write(format!("{MOUNTED}/{}/abort", self.0), "1") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.abort_unseen(),
            done => done,
        }
    }

    /// The same where nobody has mounted the kernel's list of connections: through a mount of it that has no place.
    fn abort_unseen(self) -> io::Result<()> {
        let list = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&list)?;
        let list = fsmount(&list, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        let name = format!("{}/abort", self.0);
        let abort = openat(&list, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&abort, b"1")?;
        Ok(())
    }
}
