//! Errors of the hash cache itself. A page that is not found is no error.

use crate::format::HeaderError;
use crate::qcow2::Qcow2Error;
use std::{io, path::PathBuf};

/// Result of an operation on the cache.
pub type Result<T, E = CacheError> = std::result::Result<T, E>;

/// Cause of a failed operation on the cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The operating system returned an error.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// Verb of the operation: `open`, `read`, `allocate`, …
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The table file is unusable. Its content can be rebuilt: remove it, or open it with
    /// [`OnMissing::Recreate`](crate::OnMissing::Recreate).
    #[error("the hash cache {} is unusable and must be recreated", path.display())]
    Unusable {
        /// Path of the table file.
        path: PathBuf,
        /// Defect of its header.
        source: HeaderError,
    },
    /// The file is neither a table nor a truncated one, so it is not replaced.
    #[error("{} is not a hash cache", path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// A source is neither a regular file nor a block device.
    #[error("{} is neither a file nor a block device", path.display())]
    NotAFile {
        /// Path that was to be added.
        path: PathBuf,
    },
    /// A path does not fit into a record.
    #[error("a path of {length} bytes is too long, the limit is {limit}")]
    PathTooLong {
        /// Length of the path in bytes.
        length: usize,
        /// Greatest length in bytes.
        limit: usize,
    },
    /// Every source record belongs to a file that still exists.
    #[error("the hash cache is full: it has {limit} files; remove one or create a larger cache")]
    SourcesFull {
        /// Number of source records.
        limit: u32,
    },
    /// No source has this path or number.
    #[error("{} is not in the hash cache", path.display())]
    Unknown {
        /// Path that was requested.
        path: PathBuf,
    },
    /// Another process held the lock of the source list for too long.
    #[error("another process holds the hash cache {}", path.display())]
    Busy {
        /// Path of the table file.
        path: PathBuf,
    },
    /// The image cannot be read as qcow2.
    #[error("cannot read {} as qcow2", path.display())]
    Qcow2 {
        /// Path of the image.
        path: PathBuf,
        /// Defect of the image.
        source: Qcow2Error,
    },
    /// The progress callback cancelled the scan. Pages found before stay in the table.
    #[error("cancelled")]
    Cancelled,
}

/// Adds the path and the attempted action to an error of the operating system.
pub(crate) fn io_at<T>(action: &'static str, path: &std::path::Path, result: io::Result<T>) -> Result<T> {
    result.map_err(|source| CacheError::Io { action, path: path.to_owned(), source })
}
