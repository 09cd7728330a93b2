//! How a sync fails on the asking side.

use crate::{LinkError, local_objects::BoxError};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{ManifestError, NodeError};
use whimbrel_store::StoreError;

/// Why something could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// None of those who were asked has it.
    #[error("no holder that answers has {digest}")]
    Nowhere {
        /// What was wanted.
        digest: Digest,
        /// Whether a holder that does not answer now may have it.
        retryable: bool,
        /// What the last of them said.
        #[source]
        source: Option<LinkError>,
    },
    /// A peer sent content with another digest, and nobody else has the right one.
    #[error("{peer} sent wrong data for {digest}")]
    WrongData {
        /// Who.
        peer: String,
        /// What was asked for.
        digest: Digest,
    },
    /// Objects could not be kept here.
    #[error("what came cannot be kept")]
    Keep {
        /// Why.
        #[source]
        source: BoxError,
    },
    /// The capsule's manifest is none.
    #[error("the manifest of capsule {capsule} is unusable")]
    Manifest {
        /// Which capsule.
        capsule: CapsuleId,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// A tree node has the right digest and the wrong shape.
    #[error("tree node {digest} is malformed")]
    Node {
        /// Which.
        digest: Digest,
        /// How.
        #[source]
        source: NodeError,
    },
    /// A request could not be made.
    #[error("a request cannot be made")]
    Request {
        /// Why.
        #[source]
        source: LinkError,
    },
    /// The capsule is here and could not be named.
    #[error("the capsule came and cannot be named here")]
    Commit {
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The caller said so.
    #[error("cancelled")]
    Cancelled,
}

impl SyncError {
    /// Whether the same may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Nowhere { retryable, .. } => *retryable,
            Self::Cancelled => true,
            _ => false,
        }
    }
}
