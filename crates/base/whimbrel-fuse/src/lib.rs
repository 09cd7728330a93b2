//! Mounts a file system through FUSE: one trait, one error type, worker threads and a reliable unmount.
//!
//! A file system implements [`FileSystem`] with blocking methods that return `Result<_, Errno>`.
//! [`Mounted::new`] mounts it and answers the kernel from several threads, each with its own descriptor, and
//! from more of them while requests wait. The
//! package that implements the FUSE protocol is used in this crate only, because each of its versions changes
//! its interface.
//!
//! Invariants:
//! - Every request is answered exactly once. A method that panics answers `EIO`, and the mount stays.
//! - A method that is not implemented returns the POSIX errno for "not supported". `ENOSYS` makes the kernel
//!   stop asking, so it is used only where that is meant.
//! - Dropping [`Mounted`] unmounts, even while files are open.

mod adapter;
mod attributes;
mod connection;
mod elastic_threads;
mod errno;
mod file_system;
mod locks;
mod mount;
mod open;

pub use attributes::{Attributes, FileKind, SetAttributes, SetTime};
pub use errno::{Errno, Result};
pub use file_system::{Caller, DirEntry, Entry, FileSystem, Question, StatFs};
pub use locks::{FileLock, LockKind};
pub use mount::{MountError, MountOptions, Mounted, Notifier, clear_stale};
pub use open::{Access, Opened};

/// Inode of the root of every mount.
pub const ROOT: u64 = 1;
