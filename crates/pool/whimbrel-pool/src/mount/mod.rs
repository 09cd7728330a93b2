//! The client as a file system (IV.E of the paper): open, write, close as with any other, sessions and
//! versions behind it.
//!
//! What is POSIX about it and what is not stands in `docs/operations/pool.md`; `tests/mount.rs` checks every
//! line of it. Invariants: what another opens is a version that was committed; `close` returns the error of
//! the commit; a writer that is killed commits nothing.

mod attributes;
mod errno;
mod file_system;
mod inode;
mod writer;
mod xattr;

pub use errno::errno_of;
pub use file_system::PoolFiles;

use crate::client::{Pool, WriteOptions};
use std::path::Path;
use whimbrel_fuse::{MountError, MountOptions, Mounted};

/// How a pool is mounted.
#[derive(Debug, Clone)]
pub struct PoolMount {
    /// What `mount` shows as source.
    pub source: String,
    /// How files are written.
    pub write: WriteOptions,
    /// Users other than the one who mounts may use it.
    pub others: bool,
    /// Nothing can be changed.
    pub read_only: bool,
}

/// Mounts `pool` on the directory `path`.
pub fn mount(pool: Pool, path: &Path, options: PoolMount) -> Result<Mounted, MountError> {
    let fuse = MountOptions {
        others: options.others,
        read_only: options.read_only,
        shared_maps: false,
        threads: 16,
        ..MountOptions::new(options.source, "whimbrel")
    };
    Mounted::new(PoolFiles::new(pool, options.write), path, &fuse)
}
