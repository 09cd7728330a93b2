//! Reasons why a session cannot start.

use crate::cache::{CacheError, CacheKeyError};
use std::{io, path::PathBuf};
use whimbrel_wire::{CallError, ConnectError};

/// Error for write-back in a session without a cache.
pub(super) const NO_CACHE_TEXT: &str =
    "write-back is not possible without a cache: use write none or through";

/// Reasons why a session cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The server cannot be reached.
    #[error("cannot reach {to}")]
    Connect {
        /// Address of the server.
        to: String,
        /// Cause reported by the connection.
        source: Box<ConnectError>,
    },
    /// The server does not export that directory, or not to this client.
    #[error("{to} refused to open a session")]
    Open {
        /// Address of the server.
        to: String,
        /// The server's answer.
        source: CallError,
    },
    /// The cache cannot be used.
    #[error("cannot use the cache in {}", dir.display())]
    Cache {
        /// Directory of the cache.
        dir: PathBuf,
        /// Cause reported by the cache.
        source: CacheError,
    },
    /// The directory of the cache cannot be used.
    #[error("cannot use the directory {}", dir.display())]
    Directory {
        /// Directory of the cache.
        dir: PathBuf,
        /// Cause reported by the system; `WouldBlock` if another session uses the directory.
        source: io::Error,
    },
    /// The cache cannot be used with the key that was given, or without one.
    #[error("cannot use the cache in {}", dir.display())]
    Key {
        /// Directory of the cache.
        dir: PathBuf,
        /// What is wrong with the key.
        source: CacheKeyError,
    },
    /// Write-back needs a cache.
    #[error("{NO_CACHE_TEXT}")]
    NoCache,
    /// Unsent data of an earlier session must be written back first.
    #[error("the cache in {} has data that was not written back: mount it with a cache first", dir.display())]
    UnsentData {
        /// Directory of the cache.
        dir: PathBuf,
    },
    /// Block size or number of blocks is out of range.
    #[error("a cache of {capacity} bytes in blocks of {block} bytes is not possible")]
    Geometry {
        /// Size of a block in bytes.
        block: u64,
        /// Capacity in bytes.
        capacity: u64,
    },
}
