//! What can go wrong with the cache itself. A page that is not found is no error.

use crate::format::HeaderError;
use crate::qcow2::Qcow2Error;
use std::{io, path::PathBuf};

/// Result of an operation on the cache.
pub type Result<T, E = CacheError> = std::result::Result<T, E>;

/// Why an operation on the cache failed.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// `open`, `read`, `allocate`, …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The table file cannot be used. It is only a cache: remove it, or open it with
    /// [`Missing::Recreate`](crate::Missing::Recreate).
    #[error("the hash cache {} cannot be used and has to be made anew", path.display())]
    Unusable {
        /// The table file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: HeaderError,
    },
    /// The file is neither a table nor what is left of one, so it is not replaced either.
    #[error("{} is not a hash cache", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// A source is neither a regular file nor a block device.
    #[error("{} is neither a file nor a block device", path.display())]
    NotAFile {
        /// What was to be added.
        path: PathBuf,
    },
    /// A path does not fit into a record.
    #[error("a path of {length} bytes is too long, the limit is {limit}")]
    PathTooLong {
        /// What it has.
        length: usize,
        /// What it may have.
        limit: usize,
    },
    /// Every slot for sources is taken by a file that still exists.
    #[error("the hash cache knows {limit} files already: forget one, or make a larger cache")]
    SourcesFull {
        /// The number of slots.
        limit: u32,
    },
    /// No source has this path or number.
    #[error("{} is not in the hash cache", path.display())]
    Unknown {
        /// What was asked for.
        path: PathBuf,
    },
    /// Another process has been changing the list of sources for too long.
    #[error("another process holds the hash cache {}", path.display())]
    Busy {
        /// The table file.
        path: PathBuf,
    },
    /// The image cannot be read as qcow2.
    #[error("cannot read {} as qcow2", path.display())]
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: Qcow2Error,
    },
    /// The progress callback asked to stop. What was found until then stays in the table.
    #[error("cancelled")]
    Cancelled,
}

/// Puts the file and what was tried beside an error of the operating system.
pub(crate) fn io_at<T>(action: &'static str, path: &std::path::Path, result: io::Result<T>) -> Result<T> {
    result.map_err(|source| CacheError::Io { action, path: path.to_owned(), source })
}
