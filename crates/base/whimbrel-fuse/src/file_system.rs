//! The trait of a file system. Its methods block and may be called from several threads at once.

use crate::{
    Access, Attributes, Errno, FileKind, FileLock, Opened, Result, SetAttributes, attributes::NO_TTL,
};
use bytes::Bytes;
use std::{
    ffi::{OsStr, OsString},
    path::Path,
    time::Duration,
};

/// The process that makes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User id of the process.
    pub uid: u32,
    /// Group id of the process.
    pub gid: u32,
    /// Process id; 0 for the kernel itself.
    pub pid: u32,
}

/// A file found by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Attributes of the file.
    pub attributes: Attributes,
    /// Distinguishes successive uses of one inode number.
    pub generation: u64,
    /// How long the kernel may cache that the name leads to this file.
    pub entry_ttl: Duration,
    /// How long the kernel may cache the attributes.
    pub attributes_ttl: Duration,
}

impl Entry {
    /// An entry that the kernel does not cache.
    pub fn new(attributes: Attributes) -> Self {
        Self { attributes, generation: 0, entry_ttl: NO_TTL, attributes_ttl: NO_TTL }
    }

    /// Lets the kernel cache the entry and its attributes for `ttl`.
    pub fn cached(self, ttl: Duration) -> Self {
        Self { entry_ttl: ttl, attributes_ttl: ttl, ..self }
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Number of the inode.
    pub inode: u64,
    /// Type of the file.
    pub kind: FileKind,
    /// File name without a path.
    pub name: OsString,
    /// Offset at which a later call continues after this entry; never 0, and stable while the directory is
    /// open.
    pub next: u64,
}

/// Space of a file system, as `statfs` reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Total size in bytes.
    pub total: u64,
    /// Bytes that can still be written.
    pub free: u64,
    /// Largest possible number of files.
    pub files: u64,
    /// Files that can still be created.
    pub files_free: u64,
    /// Block size in bytes.
    pub block: u32,
    /// Longest file name in bytes.
    pub name_max: u32,
}

/// A request whose answer may be here already.
#[derive(Debug, Clone, Copy)]
pub enum Question<'a> {
    /// Looks up a name in a directory.
    Lookup(u64, &'a OsStr),
    /// Asks for the attributes of an inode.
    Attributes(u64),
    /// Reads an inode from an offset, so many bytes.
    Read(u64, u64, u32),
    /// Lists a directory.
    List(u64),
    /// Uses or releases an open directory.
    Handle,
    /// Any other request.
    Other,
}

/// A file system. Methods that are not implemented return a suitable errno.
#[allow(unused_variables)]
#[allow(
    missing_docs,
    reason = "the methods are the calls of POSIX and of the kernel's FUSE protocol by their names"
)]
pub trait FileSystem: Send + Sync + 'static {
    fn lookup(&self, caller: Caller, parent: u64, name: &OsStr) -> Result<Entry>;

    /// Whether a request can be answered without waiting for another host. It is asked when very many
    /// requests wait.
    fn answers_now(&self, question: Question<'_>) -> bool {
        matches!(question, Question::Handle)
    }

    /// How long the kernel may cache that a name does not exist, after `lookup` returned `ENOENT`.
    fn negative_ttl(&self, parent: u64, name: &OsStr) -> Duration {
        Duration::ZERO
    }

    /// The kernel drops `count` of the references that it took with entries.
    fn forget(&self, inode: u64, count: u64) {}

    /// The attributes, and how long the kernel may cache them.
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

    /// Renames; `flags` are those of `renameat2`.
    fn rename(&self, caller: Caller, from: (u64, &OsStr), to: (u64, &OsStr), flags: u32) -> Result<()> {
        Err(Errno::EPERM)
    }

    fn link(&self, caller: Caller, inode: u64, parent: u64, name: &OsStr) -> Result<Entry> {
        Err(Errno::EPERM)
    }

    fn open(&self, caller: Caller, inode: u64, access: Access) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Creates a file and opens it. The caller's umask is already applied to `mode`.
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

    /// Reads; fewer bytes than `size` are returned only at the end of the file.
    fn read(&self, inode: u64, handle: u64, offset: u64, size: u32) -> Result<Bytes>;

    fn write(&self, caller: Caller, inode: u64, handle: u64, offset: u64, data: &[u8]) -> Result<u32> {
        Err(Errno::EROFS)
    }

    /// Called for every descriptor that is closed; an error here is what `close` returns.
    fn flush(&self, caller: Caller, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    /// The last descriptor is closed. Nobody sees an error.
    fn release(&self, inode: u64, handle: u64) -> Result<()> {
        Ok(())
    }

    fn fsync(&self, inode: u64, handle: u64, data_only: bool) -> Result<()> {
        Ok(())
    }

    fn opendir(&self, caller: Caller, inode: u64) -> Result<u64> {
        Ok(0)
    }

    /// Passes the entries after `offset` (0: from the start) to `add` until it returns false.
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

    /// The first lock of others that is in the way of this one; if there is none, the lock is `Unlock`. Locks
    /// are asked for only if the mount has them ([`MountOptions::locks`](crate::MountOptions::locks)).
    fn getlk(&self, inode: u64, owner: u64, lock: FileLock) -> Result<FileLock> {
        Err(Errno::ENOSYS)
    }

    /// Sets or removes a lock of an owner. With `wait` it waits until nobody has another in the way;
    /// otherwise it fails with `EAGAIN`. A lock belongs to the owner and not to the handle, by which it is
    /// set.
    fn setlk(
        &self,
        caller: Caller,
        inode: u64,
        handle: u64,
        owner: u64,
        lock: FileLock,
        wait: bool,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// An owner has closed a descriptor of the file, and so has no locks of it any more.
    fn unlock_all(&self, inode: u64, owner: u64) {}

    /// Copies between two open files without passing the bytes through the caller, and returns how many were
    /// copied, perhaps fewer. With `ENOTSUP` the kernel reads and writes this time, with `ENOSYS` always.
    /// Each end is inode and offset.
    fn copy_file_range(&self, from: (u64, u64), to: (u64, u64), length: u64) -> Result<u32> {
        Err(Errno::ENOSYS)
    }

    /// `SEEK_DATA` and `SEEK_HOLE`; without them the kernel treats a file as all data.
    fn lseek(&self, inode: u64, handle: u64, offset: i64, whence: i32) -> Result<i64> {
        Err(Errno::ENOSYS)
    }
}
