//! What can go wrong with a store.

use crate::remote_objects::RemoteObjectsError;
use std::{error::Error, io};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{ManifestError, NodeError, pack_frame::PackFrameError};

/// Result of a store operation.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// `create`, `append`, `sync`, …
        action: &'static str,
        /// Relative to the store.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A write or sync failed before; this handle takes no more work. Open the store again.
    #[error("the store is latched after a failed {action}")]
    Latched {
        /// What failed first.
        action: &'static str,
    },
    /// There is no store, and none was to be created.
    #[error("there is no store in {path}")]
    NoStore {
        /// The directory.
        path: String,
    },
    /// The store was made by another version.
    #[error("the layout of this store is not known: {found:?}")]
    Layout {
        /// What its marker file says (at most 80 characters).
        found: String,
    },
    /// Nothing here has this digest.
    #[error("object {digest} is not in the store")]
    Missing {
        /// Of the raw content.
        digest: Digest,
    },
    /// The base of a delta is gone.
    #[error("a delta needs object {key} and it is not in the store")]
    MissingBase {
        /// First half of its digest.
        key: whimbrel_image::ShortDigest,
    },
    /// Stored bytes are not what was written.
    #[error("object {object} is damaged in pack {pack} at offset {offset}")]
    Damaged {
        /// Digest, or first half of it.
        object: String,
        /// File name of the pack.
        pack: String,
        /// Of its frame.
        offset: u64,
        /// What does not fit.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The content read has another digest.
    #[error("the content has digest {found}")]
    Digest {
        /// Of what was read.
        found: Digest,
    },
    /// An image tree of the wrong shape.
    #[error("an image tree is malformed")]
    Tree {
        /// How.
        #[from]
        source: NodeError,
    },
    /// A capsule manifest that cannot be read or written.
    #[error("the manifest of a capsule is unusable")]
    Manifest {
        /// How.
        #[from]
        source: ManifestError,
    },
    /// Objects that cannot be framed.
    #[error("cannot encode objects")]
    Encode {
        /// Why.
        #[source]
        source: PackFrameError,
    },
    /// An index file that cannot be used.
    #[error("index file {path} is damaged: {reason}")]
    Index {
        /// Its path.
        path: String,
        /// What does not fit.
        reason: &'static str,
    },
    /// A small file (ref, lease, state) that cannot be used.
    #[error("file {path} is damaged")]
    SmallFile {
        /// Its path.
        path: String,
    },
    /// Nothing bears this name.
    #[error("no tag or capsule is called {text:?}")]
    Unknown {
        /// What was asked for.
        text: String,
    },
    /// Several capsules begin with these digits.
    #[error("{matches} capsules begin with {text:?}")]
    Ambiguous {
        /// What was asked for.
        text: String,
        /// How many.
        matches: usize,
    },
    /// A ref is not what the caller expected.
    #[error("tag {name} has changed")]
    RefChanged {
        /// The ref.
        name: String,
        /// What it names now.
        found: Option<CapsuleId>,
    },
    /// The capsule names something that is not here.
    #[error("the capsule is not whole")]
    NotWhole {
        /// What is missing.
        #[source]
        source: Box<StoreError>,
    },
    /// Pages past the end of an image.
    #[error("pages {start}..+{len} are outside an image of {pages} pages")]
    OutOfRange {
        /// First page.
        start: u64,
        /// How many.
        len: u64,
        /// Pages of the image.
        pages: u64,
    },
    /// A worker of the writer failed; the session is over.
    #[error("the writer failed")]
    Writer {
        /// The first failure.
        #[source]
        source: std::sync::Arc<StoreError>,
    },
    /// What is missing here could not be fetched.
    #[error("a part of the capsule that lies on another host is needed")]
    Elsewhere {
        /// Why not.
        #[source]
        source: RemoteObjectsError,
    },
    /// A stream that is no exported capsule.
    #[error("not an exported capsule: {reason}")]
    Stream {
        /// What does not fit.
        reason: &'static str,
    },
    /// The stream could not be read or written.
    #[error("cannot {action} the stream")]
    Carrier {
        /// `read`, `write`.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The caller's own callback failed.
    #[error("the receiver of the pages failed")]
    Receiver {
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl StoreError {
    /// For `map_err`: an [`StoreError::Io`].
    pub(crate) fn io(action: &'static str, path: &str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Whether the same may succeed later: another host has to come back.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Elsewhere { source } if source.retryable)
    }

    /// Whether a file that was expected is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
