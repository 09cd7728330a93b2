//! Errors of the store.

use crate::{keys::KeyId, remote_objects::RemoteObjectsError};
use rustix::io::Errno;
use std::{error::Error, io};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{ManifestError, NodeError, pack_frame::PackFrameError};

/// Result of a store operation.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Cause of a failed store operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system returned an error.
    #[error("cannot {action} {path}")]
    Io {
        /// Verb of the operation: `create`, `append`, `sync`, …
        action: &'static str,
        /// Path relative to the store.
        path: String,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// A sync failed before, or the disk had an error, so this handle rejects writes until the store is
    /// opened again or [`Store::reopen`](crate::Store::reopen) succeeds.
    #[error("the store is latched after a failed {action}")]
    Latched {
        /// First action that failed.
        action: &'static str,
    },
    /// There is no store, and the caller did not ask to create one.
    #[error("there is no store in {path}")]
    NoStore {
        /// Directory of the store.
        path: String,
    },
    /// Another version of the program created the store.
    #[error("unknown store layout {found:?}")]
    Layout {
        /// Content of its marker file (at most 80 characters).
        found: String,
    },
    /// The store is encrypted, and the caller gave no key.
    #[error("the store is encrypted with master key {master}, and no key was given")]
    KeyNeeded {
        /// Name of the master key.
        master: KeyId,
    },
    /// The store is encrypted with another key than the caller's.
    #[error("the store is encrypted with master key {wanted}; the key that was given is {given}")]
    WrongKey {
        /// Name of the master key that opens the store.
        wanted: KeyId,
        /// Name of the caller's key.
        given: KeyId,
    },
    /// The wrapped key of an encrypted store cannot be used.
    #[error("the keys of the store cannot be used: {reason}")]
    Keys {
        /// What is wrong with files `keys` and `keys.copy`.
        reason: &'static str,
    },
    /// The store is not encrypted.
    #[error("the store is not encrypted")]
    NotEncrypted,
    /// Another process writes to a store that is to be encrypted.
    #[error("another process writes to the store, so it cannot be encrypted now")]
    InUse,
    /// Another process has encrypted the store since it was opened.
    #[error("another process has changed the layout of the store; it has to be opened again")]
    LayoutChanged,
    /// A frame cannot be sealed.
    #[error("cannot encrypt a frame")]
    Seal {
        /// Cause reported by the cipher.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No object has this digest.
    #[error("object {digest} is not in the store")]
    Missing {
        /// Digest of the object.
        digest: Digest,
    },
    /// The base of a delta is missing.
    #[error("object {key}, the base of a delta, is not in the store")]
    MissingBase {
        /// Short digest of the base.
        key: whimbrel_image::ShortDigest,
    },
    /// Stored bytes differ from those written.
    #[error("object {object} is damaged in pack {pack} at offset {offset}")]
    Damaged {
        /// Digest of the object, or its first half.
        object: String,
        /// File name of the pack.
        pack: String,
        /// Offset of the frame.
        offset: u64,
        /// Result of the failed check.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The content has another digest than expected.
    #[error("the content has digest {found}")]
    Digest {
        /// Digest of the content.
        found: Digest,
    },
    /// An image tree has the wrong shape.
    #[error("an image tree is malformed")]
    Tree {
        /// Defect of the node.
        #[from]
        source: NodeError,
    },
    /// The manifest of a capsule is invalid.
    #[error("the manifest of a capsule is invalid")]
    Manifest {
        /// Defect of the manifest.
        #[from]
        source: ManifestError,
    },
    /// Objects cannot be encoded as a frame.
    #[error("cannot encode objects")]
    Encode {
        /// Cause reported by the encoder.
        source: PackFrameError,
    },
    /// An index file is damaged.
    #[error("index file {path} is damaged: {reason}")]
    Index {
        /// Path of the file.
        path: String,
        /// Check that failed.
        reason: &'static str,
    },
    /// A small file (ref, GC lease, state) is damaged.
    #[error("file {path} is damaged")]
    SmallFile {
        /// Path of the file.
        path: String,
    },
    /// No ref or capsule has this name.
    #[error("no tag or capsule is called {text:?}")]
    Unknown {
        /// Name that was requested.
        text: String,
    },
    /// Several capsules begin with these digits.
    #[error("{matches} capsules begin with {text:?}")]
    Ambiguous {
        /// Digits that were requested.
        text: String,
        /// Number of capsules.
        matches: usize,
    },
    /// A ref differs from what the caller expected.
    #[error("tag {name} has changed")]
    RefChanged {
        /// Name of the ref.
        name: String,
        /// Capsule that it names now.
        found: Option<CapsuleId>,
    },
    /// Objects of the capsule are missing.
    #[error("the capsule is incomplete")]
    Incomplete {
        /// First missing object.
        source: Box<StoreError>,
    },
    /// The pages are past the end of an image.
    #[error("pages {start}..+{len} are outside an image of {pages} pages")]
    OutOfRange {
        /// First page of the run.
        start: u64,
        /// Pages of the run.
        len: u64,
        /// Pages of the image.
        pages: u64,
    },
    /// A thread of the writer failed, and with it the writer.
    #[error("the writer failed")]
    Writer {
        /// Error of the first thread that failed.
        source: std::sync::Arc<StoreError>,
    },
    /// Missing objects could not be fetched.
    #[error("a part of the capsule is on another host and could not be fetched")]
    Remote {
        /// Cause reported by the source.
        source: RemoteObjectsError,
    },
    /// The stream is no exported capsule.
    #[error("not an exported capsule: {reason}")]
    Stream {
        /// Part of the stream that is invalid.
        reason: &'static str,
    },
    /// The stream could not be read or written.
    #[error("cannot {action} the stream")]
    StreamIo {
        /// Verb of the operation: `read` or `write`.
        action: &'static str,
        /// Cause reported by the stream.
        source: io::Error,
    },
    /// The caller's callback said to stop.
    #[error("cancelled")]
    Cancelled,
    /// The caller's callback failed.
    #[error("the receiver of the pages failed")]
    Receiver {
        /// Error of the callback.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl StoreError {
    /// Makes a [`StoreError::Io`], for `map_err`.
    pub(crate) fn io(action: &'static str, path: &str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Whether the call may succeed later, when another host is back.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Remote { source } if source.retryable)
    }

    /// Whether nobody knows what is on the disk: a failed sync may have lost what was written before it. Any
    /// other failure says itself what was not done.
    pub(crate) fn is_uncertain(&self) -> bool {
        let io_error = Errno::IO.raw_os_error();
        matches!(self, Self::Io { action, source, .. } if *action == "sync" || source.raw_os_error() == Some(io_error))
    }

    /// Whether the disk is full.
    pub(crate) fn is_full_disk(&self) -> bool {
        let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        whimbrel_core::causes(self)
            .filter_map(|error| error.downcast_ref::<io::Error>())
            .any(|error| full.contains(&error.kind()))
    }

    /// Whether a file does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
