//! What a file system answers. Methods block and may be called from several threads at once.

use crate::{Access, Attributes, Errno, FileKind, Opened, Result, SetAttributes, attributes::NO_TTL};
use bytes::Bytes;
use std::{
    ffi::{OsStr, OsString},
    path::Path,
    time::Duration,
};

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Process; 0 for the kernel itself.
    pub pid: u32,
}

/// A file found by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub attributes: Attributes,
    /// Tells reuses of the inode apart.
    pub generation: u64,
    /// How long the kernel may keep that the name leads here.
    pub entry_ttl: Duration,
    /// How long it may keep the attributes.
    pub attributes_ttl: Duration,
}

impl Entry {
    /// An entry the kernel asks for again every time.
    pub fn new(attributes: Attributes) -> Self {
        Self { attributes, generation: 0, entry_ttl: NO_TTL, attributes_ttl: NO_TTL }
    }

    /// The same, kept by the kernel for `ttl`.
    pub fn cached(self, ttl: Duration) -> Self {
        Self { entry_ttl: ttl, attributes_ttl: ttl, ..self }
    }
}

/// One line of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode.
    pub inode: u64,
    /// What it is.
    pub kind: FileKind,
    /// Name.
    pub name: OsString,
    /// Where a later call goes on after this entry; never 0, and stable while the directory is open.
    pub next: u64,
}

/// What `statfs` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that can still be written.
    pub free: u64,
    /// Files there may be.
    pub files: u64,
    /// Of those, how many more.
    pub files_free: u64,
    /// Bytes of a block.
    pub block: u32,
    /// Longest name.
    pub name_max: u32,
}

/// A file system. What is not implemented has a fitting errno.
#[allow(unused_variables)]
#[allow(
    missing_docs,
    reason = "the methods are the calls of POSIX and of the kernel's FUSE protocol by their names"
)]
pub trait FileSystem: Send + Sync + 'static {
    fn lookup(&self, caller: Caller, parent: u64, name: &OsStr) -> Result<Entry>;

    /// How long the kernel may believe that there is no such name, after `lookup` has said so with `ENOENT`.
    fn absent(&self, parent: u64, name: &OsStr) -> Duration {
        Duration::ZERO
    }

    /// The kernel gives back `count` of the references it took with entries.
    fn forget(&self, inode: u64, count: u64) {}

    /// The attributes, and how long the kernel may keep them.
    fn getattr(&self, caller: Caller, inode: u64, handle: Option<u64>) -> Result<(Attributes, Duration)>;

    fn setattr(
        &self,
        caller: Caller,
        inode: u64,
        handle: Option<u64>,
        change: SetAttributes,
    ) -> Result<(Attributes, Duration)> {
        Err(Errno::EPERM)
    }

    fn access(&self, caller: Caller, inode: u64, mask: i32) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    fn readlink(&self, inode: u64) -> Result<Vec<u8>> {
        Err(Errno::EINVAL)
    }

    fn mknod(&self, caller: Caller, parent: u64, name: &OsStr, mode: u32, device: u32) -> Result<Entry> {
        Err(Errno::EPERM)
    }

    fn mkdir(&self, caller: Caller, parent: u64, name: &OsStr, mode: u32) -> Result<Entry> {
        Err(Errno::EPERM)
    }

    fn unlink(&self, caller: Caller, parent: u64, name: &OsStr) -> Result<()> {
        Err(Errno::EPERM)
    }

    fn rmdir(&self, caller: Caller, parent: u64, name: &OsStr) -> Result<()> {
        Err(Errno::EPERM)
    }

    fn symlink(&self, caller: Caller, parent: u64, name: &OsStr, target: &Path) -> Result<Entry> {
        Err(Errno::EPERM)
    }

    /// `flags` as of `renameat2`.
    fn rename(&self, caller: Caller, from: (u64, &OsStr), to: (u64, &OsStr), flags: u32) -> Result<()> {
        Err(Errno::EPERM)
    }

    fn link(&self, caller: Caller, inode: u64, parent: u64, name: &OsStr) -> Result<Entry> {
        Err(Errno::EPERM)
    }

    fn open(&self, caller: Caller, inode: u64, access: Access) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Makes a file and opens it. `mode` is already under the caller's umask.
    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
        access: Access,
    ) -> Result<(Entry, Opened)> {
        Err(Errno::EPERM)
    }

    /// Fewer bytes than `size` only at the end of the file.
    fn read(&self, inode: u64, handle: u64, offset: u64, size: u32) -> Result<Bytes>;

    fn write(&self, caller: Caller, inode: u64, handle: u64, offset: u64, data: &[u8]) -> Result<u32> {
        Err(Errno::EROFS)
    }

    /// A descriptor is closed, as often as there are descriptors; what fails here is what `close` returns.
    fn flush(&self, caller: Caller, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    /// The last descriptor is gone. Nobody hears of an error.
    fn release(&self, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    fn fsync(&self, inode: u64, handle: u64, data_only: bool) -> Result<()> {
        Ok(())
    }

    fn opendir(&self, caller: Caller, inode: u64) -> Result<u64> {
        Ok(0)
    }

    /// Entries after `offset` (0: from the begin) go to `add` until it returns false.
    fn readdir(
        &self,
        inode: u64,
        handle: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()>;

    fn releasedir(&self, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    fn fsyncdir(&self, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    fn statfs(&self, inode: u64) -> Result<StatFs> {
        Ok(StatFs { total: 0, free: 0, files: 0, files_free: 0, block: 4096, name_max: 255 })
    }

    fn setxattr(&self, caller: Caller, inode: u64, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        Err(Errno::ENOTSUP)
    }

    fn getxattr(&self, caller: Caller, inode: u64, name: &OsStr) -> Result<Vec<u8>> {
        Err(Errno::ENOTSUP)
    }

    fn listxattr(&self, caller: Caller, inode: u64) -> Result<Vec<OsString>> {
        Ok(Vec::new())
    }

    fn removexattr(&self, caller: Caller, inode: u64, name: &OsStr) -> Result<()> {
        Err(Errno::ENOTSUP)
    }

    fn fallocate(&self, inode: u64, handle: u64, offset: u64, length: u64, mode: i32) -> Result<()> {
        Err(Errno::ENOTSUP)
    }

    /// Copies from one open file to another, without the bytes going through the caller: how many, which may
    /// be fewer. With `ENOTSUP` the kernel reads and writes this time, with `ENOSYS` always. Each end is
    /// inode and offset.
    fn copy_file_range(&self, from: (u64, u64), to: (u64, u64), length: u64) -> Result<u32> {
        Err(Errno::ENOSYS)
    }

    /// `SEEK_DATA` and `SEEK_HOLE`; without it the kernel has a file be all data.
    fn lseek(&self, inode: u64, handle: u64, offset: i64, whence: i32) -> Result<i64> {
        Err(Errno::ENOSYS)
    }
}
