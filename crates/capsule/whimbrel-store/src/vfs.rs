//! Every file operation of the store, so that a disk that loses power can be put in its place.
//!
//! Paths are relative to the store's directory and use `/`. What durability means here: appended bytes
//! survive a power failure after [`Append::sync`], a created, renamed or removed name after [`Vfs::sync_dir`]
//! of its directory.

use std::{io, sync::Arc};

/// The whole content of a file, mapped or held.
pub type Mapping = Arc<dyn AsRef<[u8]> + Send + Sync>;
/// A lock on a file, released when dropped (also by the kernel, when the process dies).
pub type Lock = Box<dyn Send + Sync>;

/// Who else may hold a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Others that share.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Whether a busy lock is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockWait {
    /// Until it is free.
    Wait,
    /// Not at all.
    Try,
}

/// A directory of files.
pub trait Vfs: Send + Sync {
    /// Creates a file to append to; fails if the name exists.
    fn create(&self, path: &str) -> io::Result<Box<dyn Append>>;

    /// Opens a file for reading.
    fn open(&self, path: &str) -> io::Result<Arc<dyn ReadAt>>;

    /// The whole content of a file that does not change any more.
    fn map(&self, path: &str) -> io::Result<Mapping>;

    /// Renames, replacing what bears the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &str) -> io::Result<()>;

    /// Names of the files in a directory, in no order.
    fn list(&self, dir: &str) -> io::Result<Vec<String>>;

    /// Makes the names of a directory durable.
    fn sync_dir(&self, dir: &str) -> io::Result<()>;

    /// Creates a directory unless it exists.
    fn make_dir(&self, dir: &str) -> io::Result<()>;

    /// Locks a file, created if need be; none if it is busy and the caller has no patience.
    fn lock(&self, path: &str, mode: LockMode, patience: LockWait) -> io::Result<Option<Lock>>;
}

/// A file that grows.
pub trait Append: Send {
    /// Adds bytes at the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes all bytes appended so far durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file to read.
pub trait ReadAt: Send + Sync {
    /// Fills `out` from `offset`, or fails.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Length in bytes.
    fn size(&self) -> io::Result<u64>;
}
