//! Previous version of a capsule's file: finds groups of pages that need not be read here or sent again.
//!
//! Leaves of the new capsule are compared with those of the old one: the same leaf anywhere, or the one at
//! the same place of the image with the same name. The index of the old file is trusted: whoever can write to
//! the folder could damage its files anyway, and readers compare digests.

use super::{
    capsule_file::{CHUNK, GROUP, groups, page_at},
    capsule_reader::PooledCapsule,
};
use std::{collections::HashMap, io, sync::Arc};
use whimbrel_core::Digest;
use whimbrel_image::{
    Manifest, Node,
    tree::{Nodes, Visit, walk},
};
use whimbrel_pool::chunk_map::ChunkRef;
use whimbrel_store::Store;

type Cause = Box<dyn std::error::Error + Send + Sync>;

pub(super) struct PreviousVersion<'a> {
    nodes: OldNodes<'a>,
    /// Leaves by the name of the image and the first page.
    leaves: HashMap<(String, u64), Digest>,
    /// Whether new chunks are encrypted; reused chunks must be as well.
    encrypted: bool,
}

/// Nodes of the old capsule, from the store or its file.
struct OldNodes<'a> {
    capsule: &'a PooledCapsule,
    store: &'a Store,
}

impl Nodes for OldNodes<'_> {
    type Error = Cause;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>, Cause> {
        let bytes = match self.store.blob(digest) {
            Ok(bytes) => bytes,
            Err(_) => self.capsule.checked(digest)?.to_vec(),
        };
        Ok(Arc::new(Node::decode(&bytes)?))
    }
}

impl<'a> PreviousVersion<'a> {
    /// Reads an open version of the file; an unreadable one is not used. Blocks.
    pub(super) fn of(held: &'a PooledCapsule, store: &'a Store, sealed: bool) -> Option<Self> {
        let read = Self::read(held, store, sealed);
        let unread = |error: &Cause| {
            tracing::debug!(error = &**error as &dyn std::error::Error, "cannot read the previous version");
        };
        read.inspect_err(unread).ok()
    }

    fn read(held: &'a PooledCapsule, store: &'a Store, sealed: bool) -> Result<Self, Cause> {
        let manifest = Manifest::decode(&held.checked(&held.capsule().0)?)?;
        let (nodes, mut leaves) = (OldNodes { capsule: held, store }, HashMap::new());
        for image in &manifest.images {
            walk(&nodes, image.root, image.pages, &mut |visit| match visit {
                Visit::Node { digest, level: 0, page } => {
                    leaves.insert((image.name.clone(), page), digest);
                    Ok(false)
                }
                Visit::Node { .. } => Ok(true),
                Visit::Page { .. } => Ok(false),
            })?;
        }
        Ok(Self { nodes, leaves, encrypted: sealed })
    }

    /// For each group of a leaf that starts at `page` of `image`, its chunks in the old version, if it has
    /// them.
    pub(super) fn groups(
        &self,
        image: &str,
        page: u64,
        digest: &Digest,
        leaf: &Node,
    ) -> Vec<Option<Vec<ChunkRef>>> {
        let none = || groups(leaf).map(|_| None).collect();
        let same = self.nodes.capsule.pages_at(digest).map(|base| (base, None));
        let older = || {
            let digest = self.leaves.get(&(image.to_owned(), page))?;
            Some((self.nodes.capsule.pages_at(digest)?, Some(self.nodes.node(digest).ok()?)))
        };
        let Some((base, other)) = same.or_else(older) else { return none() };
        let old = other.as_deref().unwrap_or(leaf);
        groups(leaf).map(|group| self.group(base, old, leaf, group)).collect()
    }

    fn group(&self, base: u64, old: &Node, new: &Node, group: usize) -> Option<Vec<ChunkRef>> {
        let mut slots = group * GROUP..(group + 1) * GROUP;
        if !slots.clone().all(|slot| old.child(slot) == new.child(slot)) {
            return None;
        }
        let slot = slots.find(|slot| old.child(*slot).is_some())?;
        let begin = base + page_at(old, slot)? / CHUNK as u64 * CHUNK as u64;
        let pieces = self.nodes.capsule.chunks(begin..begin + CHUNK as u64)?;
        pieces.iter().all(|piece| piece.encrypted == self.encrypted).then(|| pieces.to_vec())
    }
}

impl PooledCapsule {
    /// Reads an object that is not a page, and checks its digest. Blocks.
    fn checked(&self, digest: &Digest) -> Result<bytes::Bytes, Cause> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidData);
        let bytes = self.object(digest).ok_or_else(wrong)??;
        if Digest::of(&bytes) == *digest { Ok(bytes) } else { Err(wrong().into()) }
    }
}
