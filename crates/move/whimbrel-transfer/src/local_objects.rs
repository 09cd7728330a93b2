//! Local objects of a transfer: reads the objects that this host has, and stores those that arrive.
//!
//! A [`Store`] implements it. No method asks another host, or a fetch could wait for itself.

use std::error::Error;
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{Node, ShortDigest, pack_frame::Kind};
use whimbrel_store::Store;

/// Cause of a failure on this side.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Objects on this side of a transfer.
pub trait LocalObjects: Send + Sync {
    /// Whether each object is here.
    fn has(&self, digests: &[Digest]) -> Vec<bool>;

    /// Reads the object, if it is here and undamaged.
    fn object(&self, digest: &Digest) -> Option<Vec<u8>>;

    /// Full digest of an object with this short digest, if one is found here. Objects may be missed.
    fn digest_of(&self, key: &ShortDigest) -> Option<Digest>;

    /// Stores objects, each under its own digest. They are readable at once, and durable after
    /// [`LocalObjects::flush`].
    fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<(), BoxError>;

    /// Makes the stored objects durable.
    fn flush(&self) -> Result<(), BoxError>;

    /// Whether the capsule is known to be complete here.
    fn is_complete(&self, capsule: &CapsuleId) -> bool;
}

/// Additional source of pages on this host: a hash cache.
pub trait PageLookup: Send + Sync {
    /// Fills `out` with the page of this digest, if it is there. The caller checks the digest.
    fn page(&self, digest: &Digest, out: &mut [u8]) -> bool;

    /// Fills `out` with a page of this short digest, if there is one. The caller computes the digest.
    fn page_by_short_digest(&self, key: &ShortDigest, out: &mut [u8]) -> bool;
}

impl LocalObjects for Store {
    fn has(&self, digests: &[Digest]) -> Vec<bool> {
        Store::has(self, digests)
    }

    fn object(&self, digest: &Digest) -> Option<Vec<u8>> {
        self.blob(digest).ok()
    }

    fn digest_of(&self, key: &ShortDigest) -> Option<Digest> {
        Store::digest_of(self, key)
    }

    fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<(), BoxError> {
        Ok(self.fetched_objects_writer().store(kind, objects)?)
    }

    fn flush(&self) -> Result<(), BoxError> {
        Ok(self.fetched_objects_writer().flush()?)
    }

    fn is_complete(&self, capsule: &CapsuleId) -> bool {
        self.has_complete_ref(capsule).unwrap_or(false)
    }
}

/// Reads the tree node with this digest, if it is here.
pub(crate) fn node(shelf: &dyn LocalObjects, digest: &Digest) -> Option<Node> {
    Node::decode(&shelf.object(digest)?).ok()
}
