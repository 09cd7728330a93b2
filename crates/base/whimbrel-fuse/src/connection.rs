//! Connection: the kernel's side of a mount, which lives as long as any copy of the mount.
//!
//! A mount namespace created while the file system was mounted has a copy of the mount, and files opened
//! before a lazy unmount keep the mount alive. In both cases unmounting here does not end the threads that
//! wait for requests. [`Connection::abort`] ends the connection for everybody. It needs the privileges of
//! mounting, or a mounted fusectl.

use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    io::Errno,
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::Path,
};

/// The usual mount point of fusectl.
const FUSECTL: &str = "/sys/fs/fuse/connections";
const FLAGS: OFlags = OFlags::WRONLY.union(OFlags::CLOEXEC);

/// Handle to end one connection and no other. A connection number would not do: the next mount reuses it as
/// soon as this connection is gone. The open control file has no effect from then on (`fuse_ctl_remove_conn`
/// in fs/fuse/control.c).
#[derive(Debug)]
pub(crate) struct Connection {
    abort: OwnedFd,
}

impl Connection {
    /// The connection of the mount at `path`: the minor number of its device (fs/fuse/inode.c).
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let number = rustix::fs::minor(fs::metadata(path)?.dev());
        let abort = match openat(CWD, format!("{FUSECTL}/{number}/abort"), FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => open_detached(number)?,
            opened => opened?,
        };
        Ok(Self { abort })
    }

    /// Ends the connection, unless it has ended: pending requests fail with `ECONNABORTED`, later ones with
    /// `ENOTCONN`.
    pub(crate) fn abort(&self) -> io::Result<()> {
        rustix::io::write(&self.abort, b"1")?;
        Ok(())
    }
}

/// Opens the control file through a detached fusectl mount, for hosts where fusectl is not mounted.
fn open_detached(number: u32) -> Result<OwnedFd, Errno> {
    let list = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&list)?;
    let list = fsmount(&list, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    openat(&list, format!("{number}/abort"), FLAGS, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attributes, Caller, DirEntry, Entry, FileKind, FileSystem, MountOptions, Mounted, Result as Answer,
    };
    use bytes::Bytes;
    use std::{ffi::OsStr, time::Duration};

    struct Empty;

    impl FileSystem for Empty {
        fn lookup(&self, _caller: Caller, _parent: u64, _name: &OsStr) -> Answer<Entry> {
            Err(crate::Errno::ENOENT)
        }

        fn getattr(&self, _: Caller, inode: u64, _: Option<u64>) -> Answer<(Attributes, Duration)> {
            Ok((Attributes::new(inode, FileKind::Directory, 0o755), Duration::ZERO))
        }

        fn read(&self, _inode: u64, _handle: u64, _offset: u64, _size: u32) -> Answer<Bytes> {
            Ok(Bytes::new())
        }

        fn readdir(&self, _: u64, _: u64, _: u64, _: &mut dyn FnMut(DirEntry) -> bool) -> Answer<()> {
            Ok(())
        }
    }

    fn number(dir: &Path) -> u64 {
        fs::metadata(dir).unwrap().dev()
    }

    #[test]
    fn another_mount_that_got_the_number_is_not_ended() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let mount = |at: usize| {
            Mounted::new(Empty, dirs[at].path(), &MountOptions::new("t", "whimbreltest")).unwrap()
        };
        // Other tests mount as well, and may take the number first.
        let reused = (0..1000).any(|_| {
            let first = mount(0);
            let (of_first, connection) = (number(dirs[0].path()), Connection::of(dirs[0].path()).unwrap());
            drop(first);
            let _second = mount(1);
            let of_second = number(dirs[1].path());
            // The first connection is gone, so the kernel may report an error or ignore the write.
            let _ = connection.abort();
            assert_eq!(fs::read_dir(dirs[1].path()).unwrap().count(), 0);
            of_first == of_second
        });
        assert!(reused, "the kernel gave no number twice");
    }

    #[test]
    fn the_own_mount_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let _mounted = Mounted::new(Empty, dir.path(), &MountOptions::new("t", "whimbreltest")).unwrap();
        Connection::of(dir.path()).unwrap().abort().unwrap();
        let ended = fs::read_dir(dir.path()).map(drop).unwrap_err();
        assert_eq!(ended.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()));
    }
}
