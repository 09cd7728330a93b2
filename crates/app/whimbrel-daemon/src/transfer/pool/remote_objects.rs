//! Remote objects in pools: fetches objects that the store lacks from pools.
//!
//! All recorded partial capsules are searched; there are few, and their indexes are in memory once they were
//! needed. What cannot be read now is requested from other hosts. If those do not have it either, the error
//! is reported: the reader waits and retries.

use super::{
    capsule_reader::{CLUSTER, PooledCapsule},
    partial_records::OpenPartial,
};
use crate::{core::error::DaemonError, core::state::Core, daemon::Daemon};
use std::sync::Arc;
use whimbrel_api::CapsuleRef;
use whimbrel_core::Digest;
use whimbrel_image::{Node, pack_frame::Kind};
use whimbrel_store::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError};

/// Objects found, in the order of the request, and the error if a pool was unreachable.
pub(crate) struct PoolObjects {
    pub(crate) found: Vec<Option<Vec<u8>>>,
    pub(crate) error: Option<RemoteObjectsError>,
}

impl Daemon {
    pub(super) fn open_partial(&self, noted: &OpenPartial) -> Result<Arc<PooledCapsule>, DaemonError> {
        noted.open_capsule(|note| {
            let pool = self.pool(&note.pool)?;
            PooledCapsule::open(&pool, note.version).map_err(super::failed(&note.pool))
        })
    }

    /// Number of pages to fetch when one is wanted, if pools have pages of machines here.
    pub(crate) fn pooled_cluster(&self) -> Option<u64> {
        (!self.pools.records.all().is_empty()).then_some(CLUSTER)
    }

    /// Fetches objects that are not pages.
    pub(crate) fn objects_from_pools(&self, wants: &[ObjectWant]) -> PoolObjects {
        let mut from = PoolObjects { found: vec![None; wants.len()], error: None };
        for noted in self.pools.records.all() {
            let missing = wants.iter().enumerate().filter(|(at, _)| from.found[*at].is_none());
            let missing: Vec<(usize, Digest)> = missing.map(|(at, want)| (at, want.digest)).collect();
            if missing.is_empty() {
                break;
            }
            let held = match self.open_partial(&noted) {
                Ok(held) => held,
                Err(error) => {
                    from.set_error(error.into());
                    continue;
                }
            };
            for (at, digest) in missing.into_iter().filter(|(_, digest)| held.has(digest)) {
                match held.object(&digest) {
                    Some(Ok(bytes)) if Digest::of(&bytes) == digest => from.found[at] = Some(bytes.to_vec()),
                    Some(Err(error)) => from.set_error(error.into()),
                    Some(Ok(_)) | None => {}
                }
            }
        }
        from
    }

    /// Fetches pages, in ascending order within each want. Capsules that have the leaves are asked first.
    pub(crate) fn pages_from_pools(&self, wants: &[PageWant]) -> PoolObjects {
        let digests: Vec<Digest> = wants.iter().flat_map(|want| &want.digests).copied().collect();
        let mut from = PoolObjects { found: vec![None; digests.len()], error: None };
        let noted = self.pools.records.all();
        for (noted, thorough) in
            [false, true].into_iter().flat_map(|thorough| noted.iter().map(move |n| (n, thorough)))
        {
            if from.found.iter().all(Option::is_some) {
                break;
            }
            let pages = self.open_partial(noted).map_err(Into::into);
            let pages = pages.and_then(|held| held.pages(wants, thorough, |digest| self.local_node(digest)));
            match pages {
                Ok(pages) => {
                    for (slot, (page, digest)) in from.found.iter_mut().zip(pages.into_iter().zip(&digests)) {
                        let page = page.filter(|page| Digest::of(page) == *digest);
                        *slot = slot.take().or_else(|| page.map(|page| page.to_vec()));
                    }
                }
                Err(error) => from.set_error(error),
            }
        }
        from
    }
}

/// The objects of a capsule in a pool, as the source of a repair.
struct PooledObjects {
    host: Arc<Daemon>,
    held: Arc<PooledCapsule>,
}

impl Daemon {
    /// The objects of the file that a capsule has in a pool, whichever version of it that is.
    pub(crate) fn pooled_objects(
        self: &Arc<Self>,
        place: &str,
        capsule: &CapsuleRef,
    ) -> Result<Box<dyn RemoteObjects>, DaemonError> {
        let found = self.find_in_pool(&place.parse()?, capsule)?;
        Ok(Box::new(PooledObjects { host: self.clone(), held: found.capsule }))
    }
}

impl RemoteObjects for PooledObjects {
    fn objects(&self, _: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let object = |want: &ObjectWant| match self.held.object(&want.digest) {
            Some(object) => object.map(|bytes| bytes.to_vec()).map_err(|error| unreadable(error.into())),
            None => Err(not_pooled()),
        };
        wants.iter().map(object).collect()
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let pages = self.held.pages(wants, true, |digest| self.host.local_node(digest));
        let pages = pages.map_err(unreadable)?.into_iter();
        pages.map(|page| page.map(|page| page.to_vec()).ok_or_else(not_pooled)).collect()
    }
}

fn unreadable(source: Box<dyn std::error::Error + Send + Sync>) -> RemoteObjectsError {
    RemoteObjectsError { source, retryable: true }
}

fn not_pooled() -> RemoteObjectsError {
    RemoteObjectsError { source: "the file in the pool lacks them".into(), retryable: false }
}

impl Core {
    /// A node that is on this host.
    pub(super) fn local_node(&self, digest: &Digest) -> Option<Node> {
        Node::decode(&self.store.blob(digest).ok()?).ok()
    }
}

impl PoolObjects {
    /// Adds what another source has found of the same objects.
    pub(crate) fn add(&mut self, other: Self) {
        for (slot, found) in self.found.iter_mut().zip(other.found) {
            *slot = slot.take().or(found);
        }
        self.error = other.error.or_else(|| self.error.take());
    }

    pub(crate) fn set_error(&mut self, source: Box<dyn std::error::Error + Send + Sync>) {
        tracing::debug!(error = &*source as &dyn std::error::Error, "cannot read from a pool");
        self.error = Some(RemoteObjectsError { source, retryable: true });
    }
}
