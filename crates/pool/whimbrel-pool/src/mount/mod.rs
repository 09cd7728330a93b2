//! The mounted pool: a client as file system (IV.E of the paper); open and close use sessions and versions.
//!
//! Deviations from POSIX are listed in `docs/operations/pool.md`, and `tests/it/mount.rs` checks each of
//! them. Invariants: other processes open only committed versions; `close` returns the error of the commit; a
//! writer that is killed commits nothing.

mod attributes;
mod errno;
mod file_sender;
mod file_system;
mod inode;
mod sealed_names;
mod writer;
mod xattr;

pub use errno::errno_of;
pub use file_system::PoolFiles;

use crate::client::{Pool, WriteOptions};
use std::path::Path;
use whimbrel_fuse::{MountError, MountOptions, Mounted};

/// Options of a mounted pool.
#[derive(Debug, Clone)]
pub struct PoolMount {
    /// Source shown by `mount`.
    pub source: String,
    /// Options for writing files.
    pub write: WriteOptions,
    /// Whether users other than the mounting one have access.
    pub others: bool,
    /// Whether nothing can be changed.
    pub read_only: bool,
}

/// Mounts `pool` at the directory `path`.
pub fn mount(pool: Pool, path: &Path, options: PoolMount) -> Result<Mounted, MountError> {
    let fuse = MountOptions {
        allow_others: options.others,
        read_only: options.read_only,
        shared_maps: false,
        threads: 16,
        ..MountOptions::new(options.source, "whimbrel")
    };
    let files = PoolFiles::new(pool, options.write);
    if !options.read_only {
        files.send_left();
    }
    Mounted::new(files, path, &fuse)
}
