//! Mounting a file system of ours through FUSE: one trait, one error type, threads, and an unmount that
//! happens.
//!
//! A file system implements [`FileSystem`] with blocking methods that return `Result<_, Errno>`;
//! [`Mounted::new`] mounts it and answers the kernel from several threads, each with its own descriptor. The
//! package that speaks the kernel's protocol is behind this crate and seen nowhere else, since each of its
//! versions changes its interface.
//!
//! Invariants: every request is answered exactly once; a method that panics answers `EIO` and the mount lives
//! on; what a method does not implement has the errno that POSIX has for "not here" (`ENOSYS` would make the
//! kernel stop asking, so it is used where that is meant); dropping [`Mounted`] unmounts, also while files
//! are open.

mod adapter;
mod attributes;
mod connection;
mod errno;
mod file_system;
mod mount;
mod open;

pub use attributes::{Attributes, FileKind, SetAttributes, SetTime};
pub use errno::{Errno, Result};
pub use file_system::{Caller, DirEntry, Entry, FileSystem, StatFs};
pub use mount::{MountError, MountOptions, Mounted, Notifier, clear_stale};
pub use open::{Access, Opened};

/// The inode of the root of every mount.
pub const ROOT: u64 = 1;
