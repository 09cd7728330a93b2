//! Errors of storing and reading chunks.

use super::{bucket::TierError, segment::FrameFault};
use std::{io, path::PathBuf};
use whimbrel_core::Digest;

/// Failure to store or read a chunk.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation: `write`, `sync`, …
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The store is latched: an earlier write or sync failed.
    #[error("the store refuses writes because an earlier one failed")]
    Latched,
    /// Another process has the store open.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// Folder of the store.
        path: PathBuf,
    },
    /// The store has too little free space.
    #[error("{needed} bytes do not fit, {free} are free")]
    Full {
        /// Bytes to be stored.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The chunk is not in the store.
    #[error("no chunk {digest}")]
    Missing {
        /// Digest of the chunk.
        digest: Digest,
    },
    /// The object store failed.
    #[error("a segment in the object store cannot be used")]
    Tier(#[from] TierError),
    /// Some segments are in an object store, but the options name none.
    #[error("some chunks of {} are in an object store, which the options must name", path.display())]
    TierMissing {
        /// Folder of the store.
        path: PathBuf,
    },
    /// The chunk was damaged and has been removed from the index.
    #[error("the chunk {digest} is damaged")]
    Damaged {
        /// Digest of the chunk.
        digest: Digest,
        /// Damage that was found.
        source: FrameFault,
    },
}

pub(super) type Result<T> = std::result::Result<T, ChunkError>;
