//! Why a chunk is not kept or not given.

use super::{bucket::TierError, segment::FrameFault};
use std::{io, path::PathBuf};
use whimbrel_core::Digest;

/// Why a chunk could not be put or got.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// The disk failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// `write`, `sync`, …
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An earlier write or sync failed.
    #[error("the store refuses writes since an earlier one failed")]
    Latched,
    /// Another process has it open.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// No room.
    #[error("{needed} bytes do not fit, {free} are free")]
    Full {
        /// What was to be put.
        needed: u64,
        /// What there is.
        free: u64,
    },
    /// Not here.
    #[error("no chunk {digest}")]
    Missing {
        /// Which.
        digest: Digest,
    },
    /// The object store failed.
    #[error("a segment cannot be had")]
    Tier(#[from] TierError),
    /// Segments are in an object store that was not named.
    #[error("chunks of {} lie in an object store: say in which", path.display())]
    Far {
        /// The folder.
        path: PathBuf,
    },
    /// Here, and damaged; it is forgotten from now on.
    #[error("the chunk {digest} is damaged")]
    Damaged {
        /// Which.
        digest: Digest,
        /// How.
        #[source]
        source: FrameFault,
    },
}

pub(super) type Result<T> = std::result::Result<T, ChunkError>;
