//! Errors of a transfer on the requesting side.

use crate::{LinkError, local_objects::BoxError};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{ManifestError, NodeError};
use whimbrel_store::StoreError;

/// Error of a fetch.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// No holder that answers has the object.
    #[error("no reachable holder has {digest}")]
    NoHolder {
        /// Digest of the object.
        digest: Digest,
        /// Whether a holder that does not answer now may have it.
        retryable: bool,
        /// Last error of a holder.
        source: Option<LinkError>,
    },
    /// A peer sent content with another digest, and no other holder has the right one.
    #[error("{peer} sent wrong data for {digest}")]
    WrongData {
        /// Name of the peer.
        peer: String,
        /// Digest that was requested.
        digest: Digest,
    },
    /// Fetched objects could not be stored here.
    #[error("cannot store the fetched objects")]
    Store {
        /// Cause reported by the store.
        source: BoxError,
    },
    /// The manifest of the capsule is invalid.
    #[error("the manifest of capsule {capsule} is invalid")]
    Manifest {
        /// Id of the capsule.
        capsule: CapsuleId,
        /// Cause reported by the manifest decoder.
        source: ManifestError,
    },
    /// A tree node has the right digest and is invalid.
    #[error("tree node {digest} is malformed")]
    Node {
        /// Digest of the node.
        digest: Digest,
        /// Cause reported by the node decoder.
        source: NodeError,
    },
    /// The request could not be encoded.
    #[error("cannot encode the request")]
    Request {
        /// Cause reported by the encoder.
        source: LinkError,
    },
    /// The capsule arrived, but could not be completed or its refs not be set.
    #[error("cannot complete the fetched capsule or set its refs")]
    Commit {
        /// Cause reported by the store.
        source: StoreError,
    },
    /// The caller cancelled the transfer.
    #[error("cancelled")]
    Cancelled,
}

impl TransferError {
    /// Whether the same fetch may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NoHolder { retryable, .. } => *retryable,
            // The holder is asked again after a while.
            Self::Cancelled | Self::WrongData { .. } => true,
            _ => false,
        }
    }
}
