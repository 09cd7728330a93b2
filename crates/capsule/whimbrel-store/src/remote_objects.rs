//! Remote objects: the source of objects that this store lacks and others have.
//!
//! The manifest of a *partial* capsule is here, but of its images only the pages needed so far (see
//! `partial_capsules`). A [`crate::StoredImage`] fetches missing pages from the one [`RemoteObjects`] of the
//! store, and what arrived is stored for all readers (see `fetched_objects`). Garbage collection,
//! verification and export never fetch; they use only what is here.
//!
//! Every object is compared with the digest that was requested before it is stored or returned.

use crate::{
    error::{Result, StoreError},
    store::{Inner, Store},
};
use std::{
    collections::HashSet,
    error::Error,
    sync::{Arc, PoisonError, RwLock},
};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_image::{Node, pack_frame::Kind, tree::Nodes};

/// Object to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectWant {
    /// Digest of the object.
    pub digest: Digest,
    /// Object that is here and probably similar.
    pub similar: Option<Digest>,
}

/// Pages of one extent to fetch.
///
/// A holder that has the leaf can be asked by leaf and slots, which is short. It may not have the leaf: a
/// capsule written here over a partial one has leaves of its own, whose other pages are with the holders of
/// the older capsule. Those are asked by digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageWant {
    /// Digest of the leaf that lists the pages.
    pub leaf: Digest,
    /// Bitmap of the 256 pages of the leaf; page `i` is bit `i % 64` of word `i / 64`.
    pub slots: [u64; 4],
    /// Digests of these pages, slots ascending.
    pub digests: Vec<Digest>,
    /// Older leaf of the same extent that is here, with most of its pages.
    pub similar: Option<Digest>,
}

/// Source of missing objects. Calls block until all of them have arrived.
pub trait RemoteObjects: Send + Sync {
    /// Fetches objects, in the order of `wants`.
    fn objects(&self, kind: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError>;

    /// Fetches pages, want by want, slots ascending, each of [`PAGE_SIZE`] bytes.
    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError>;

    /// Number of pages to fetch when one is needed: as many as the link sends in about a round trip.
    fn cluster(&self) -> u64 {
        1
    }
}

/// The requested objects could not be fetched.
#[derive(Debug, thiserror::Error)]
#[error("cannot fetch missing objects from another host")]
pub struct RemoteObjectsError {
    /// Cause reported by the source.
    pub source: Box<dyn Error + Send + Sync>,
    /// Whether the request may succeed later.
    pub retryable: bool,
}

/// Source of the objects that a store lacks, if one is set.
#[derive(Default)]
pub(crate) struct RemoteSource(RwLock<Option<Arc<dyn RemoteObjects>>>);

impl RemoteSource {
    pub(crate) fn get(&self) -> Option<Arc<dyn RemoteObjects>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Store {
    /// Lets images read missing pages from `source`.
    pub fn set_remote_objects(&self, source: Arc<dyn RemoteObjects>) {
        *self.inner.remote.0.write().unwrap_or_else(PoisonError::into_inner) = Some(source);
    }
}

/// Nodes of this store, including fetched ones.
pub(crate) struct LocalNodes<'a>(pub(crate) &'a Inner);

impl LocalNodes<'_> {
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.0.fetched.has(digest) || self.0.objects.has(digest)
    }
}

impl Nodes for LocalNodes<'_> {
    type Error = StoreError;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>> {
        if let Some(bytes) = self.0.fetched.get(digest) {
            return Ok(Arc::new(Node::decode(&bytes)?));
        }
        self.0.objects.node(digest)
    }
}

/// Nodes of this store, or fetched from its source.
pub(crate) struct AllNodes<'a>(pub(crate) &'a Inner);

impl Nodes for AllNodes<'_> {
    type Error = StoreError;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>> {
        let inner = self.0;
        if inner.remote.get().is_none() || LocalNodes(inner).has(digest) {
            return LocalNodes(inner).node(digest);
        }
        fetch_objects(inner, Kind::Nodes, &[ObjectWant { digest: *digest, similar: None }])?;
        LocalNodes(inner).node(digest)
    }
}

pub(crate) fn fetch_objects(inner: &Inner, kind: Kind, wants: &[ObjectWant]) -> Result<()> {
    let source = inner.remote.get().filter(|_| !wants.is_empty());
    let Some(source) = source else { return Ok(()) };
    let objects = source.objects(kind, wants).map_err(|source| StoreError::Remote { source })?;
    for (want, bytes) in wants.iter().zip(&objects) {
        check(&want.digest, bytes)?;
    }
    inner.fetched.store(
        inner,
        kind,
        objects.into_iter().zip(wants).map(|(bytes, want)| (want.digest, bytes)),
    );
    Ok(())
}

pub(crate) fn fetch_pages(inner: &Inner, missing: &MissingObjects) -> Result<()> {
    let source = inner.remote.get().filter(|_| missing.pages > 0);
    let Some(source) = source else { return Ok(()) };
    let digests: Vec<Digest> = missing.wants.iter().flat_map(|want| &want.digests).copied().collect();
    let pages = source.pages(&missing.wants).map_err(|source| StoreError::Remote { source })?;
    if pages.len() != digests.len() {
        return Err(StoreError::Missing { digest: digests[0] });
    }
    for (digest, page) in digests.iter().zip(&pages) {
        match page.len() {
            PAGE_SIZE => check(digest, page)?,
            _ => return Err(StoreError::Missing { digest: *digest }),
        }
    }
    inner.fetched.store(inner, Kind::Pages, digests.into_iter().zip(pages));
    Ok(())
}

fn check(digest: &Digest, bytes: &[u8]) -> Result<()> {
    match Digest::of(bytes) {
        found if found == *digest => Ok(()),
        found => Err(StoreError::Digest { found }),
    }
}

/// Collects the missing pages of several reads, each page once.
#[derive(Default)]
pub(crate) struct MissingObjects {
    pub(crate) wants: Vec<PageWant>,
    pub(crate) pages: usize,
    seen: HashSet<Digest>,
}

impl MissingObjects {
    /// Adds those `slots` of a leaf that are missing here.
    pub(crate) fn add(
        &mut self,
        here: &LocalNodes<'_>,
        leaf: &Node,
        slots: impl Iterator<Item = usize>,
        similar: Option<Digest>,
    ) {
        let (mut wanted, mut digests) = ([0u64; 4], Vec::new());
        for slot in slots {
            let Some(digest) = leaf.child(slot) else { continue };
            if !here.has(&digest) && self.seen.insert(digest) {
                wanted[slot / 64] |= 1 << (slot % 64);
                digests.push(digest);
            }
        }
        if wanted != [0; 4]
            && let Some(bytes) = leaf.encode()
        {
            self.pages += digests.len();
            self.wants.push(PageWant { leaf: Digest::of(&bytes), slots: wanted, digests, similar });
        }
    }
}
