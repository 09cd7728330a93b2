//! Virtual file system: every file operation of the store, so that tests can use a disk that loses power.
//!
//! Paths are relative to the store's directory and use `/`. Durability: appended bytes survive a power
//! failure after [`Append::sync`], a created, renamed or removed name after [`Vfs::sync_dir`] of its
//! directory.

use std::{io, sync::Arc};

/// Complete content of a file, mapped or in memory.
pub type Mapping = Arc<dyn AsRef<[u8]> + Send + Sync>;
/// Lock on a file, released when dropped or when the process dies.
pub type Lock = Box<dyn Send + Sync>;

/// Mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Other holders may share it.
    Shared,
    /// No other holder is allowed.
    Exclusive,
}

/// Reaction to a busy lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockWait {
    /// Wait until it is free.
    Wait,
    /// Return at once.
    Try,
}

/// Directory of files.
pub trait Vfs: Send + Sync {
    /// Creates a file to append to; fails if the name exists.
    fn create(&self, path: &str) -> io::Result<Box<dyn Append>>;

    /// Opens a file for reading.
    fn open(&self, path: &str) -> io::Result<Arc<dyn ReadAt>>;

    /// Maps a file whose content does not change any more.
    fn map(&self, path: &str) -> io::Result<Mapping>;

    /// Renames a file, replacing one with the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &str) -> io::Result<()>;

    /// Names of the files in a directory, in no order.
    fn list(&self, dir: &str) -> io::Result<Vec<String>>;

    /// Makes the content of an existing file durable.
    fn sync(&self, path: &str) -> io::Result<()>;

    /// Makes the names of a directory durable.
    fn sync_dir(&self, dir: &str) -> io::Result<()>;

    /// Creates a directory unless it exists.
    fn make_dir(&self, dir: &str) -> io::Result<()>;

    /// Locks a file, which is created if needed; none if it is busy with [`LockWait::Try`].
    fn lock(&self, path: &str, mode: LockMode, patience: LockWait) -> io::Result<Option<Lock>>;
}

/// File opened for appending.
pub trait Append: Send {
    /// Appends bytes at the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes all bytes appended so far durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// File opened for reading.
pub trait ReadAt: Send + Sync {
    /// Fills `out` from `offset`, or fails.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Length in bytes.
    fn size(&self) -> io::Result<u64>;
}
