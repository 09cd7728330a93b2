//! Demand fetcher: fetches objects that a running machine needs at once; the [`RemoteObjects`] of a store.
//!
//! Its requests go before all prefetching, and fail rather than wait for a holder that does not answer: the
//! reader reports the stall and asks again. The fetcher stores nothing; the store stores what it gets.

use crate::{
    BoxError, ChildSet, Holders, LocalObjects, TransferError,
    protocol::{ObjectKind, WantedObject},
    pull_driver::PullDriver,
    pull_plan::FetchItem,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{Node, ShortDigest, pack_frame::Kind};
use whimbrel_store::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError};

/// Leaves remembered between calls: those that a store has just fetched and requests pages of.
const LEAVES: usize = 1024;
/// Bytes that a page probably takes when it is fetched alone.
const PAGE_BYTES: u64 = 1500;
/// Most pages fetched when one is waited for.
const CLUSTER_MAX: u64 = 64;

/// Fetches from holders the objects that a store lacks.
pub struct DemandFetcher {
    local: Arc<dyn LocalObjects>,
    holders: Arc<Holders>,
    leaves: Mutex<HashMap<Digest, Node>>,
}

impl DemandFetcher {
    /// Fetches from `sources`; `shelf` has the objects that are here (the store itself), as bases of deltas.
    pub fn new(local: Arc<dyn LocalObjects>, holders: Arc<Holders>) -> Self {
        Self { local, holders, leaves: Mutex::default() }
    }

    /// Holders that it asks.
    pub fn holders(&self) -> &Arc<Holders> {
        &self.holders
    }

    fn fetch(
        &self,
        begin: impl FnOnce(&mut PullDriver<'_>) -> Result<(), TransferError>,
    ) -> Result<HashMap<Digest, Vec<u8>>, TransferError> {
        let _demand = self.holders.demand();
        let basket = CallObjects { local: &*self.local, fetched: Mutex::default() };
        let mut driver = PullDriver::new(&basket, &self.holders, &[]);
        driver.urgent = true;
        begin(&mut driver)?;
        driver.run(Duration::ZERO, &mut |_| Ok(()))?;
        drop(driver);
        Ok(basket.fetched.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn get_objects(&self, kind: ObjectKind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, TransferError> {
        let mut came = self.fetch(|driver| {
            for want in wants {
                let want = WantedObject { digest: want.digest, similar: want.similar };
                driver.walk.plan.want(FetchItem::Object(kind, want));
            }
            Ok(())
        })?;
        if kind == ObjectKind::Node {
            self.remember(&came);
        }
        let take = |want: &ObjectWant| came.remove(&want.digest).or_else(|| self.local.object(&want.digest));
        wants
            .iter()
            .map(take)
            .zip(wants)
            .map(|(came, want)| came.ok_or_else(|| self.holders.no_holder_error(want.digest, None)))
            .collect()
    }

    fn remember(&self, nodes: &HashMap<Digest, Vec<u8>>) {
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if leaves.len() + nodes.len() > LEAVES {
            leaves.clear();
        }
        let decoded = nodes.iter().filter_map(|(digest, bytes)| Some((*digest, Node::decode(bytes).ok()?)));
        leaves.extend(decoded.filter(|(_, node)| node.level() == 0));
    }

    fn leaf(&self, digest: &Digest) -> Result<Node, TransferError> {
        let known = self.leaves.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned();
        if let Some(leaf) = known {
            return Ok(leaf);
        }
        let here = match self.local.has(&[*digest])[0] {
            true => self.local.object(digest),
            false => None,
        };
        let bytes = match here {
            Some(bytes) => bytes,
            None => {
                let want = ObjectWant { digest: *digest, similar: None };
                self.get_objects(ObjectKind::Node, &[want])?.remove(0)
            }
        };
        Node::decode(&bytes).map_err(|source| TransferError::Node { digest: *digest, source })
    }

    fn get_pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, TransferError> {
        let mut digests = Vec::new();
        let mut leaves = Vec::new();
        for want in wants {
            let (leaf, slots) = (self.leaf(&want.leaf)?, ChildSet(want.slots));
            let listed = slots.iter().filter(|slot| leaf.child(*slot).is_some()).collect::<ChildSet>();
            digests.extend(slots.iter().map(|slot| leaf.child(slot)));
            leaves.push((want.leaf, leaf, want.similar, listed));
        }
        let came = self.fetch(|driver| {
            for (digest, leaf, similar, slots) in leaves {
                driver.walk.want_pages(digest, leaf, similar, slots);
            }
            Ok(())
        })?;
        let page = |digest: Option<Digest>| match digest {
            None => Ok(vec![0; PAGE_SIZE]),
            Some(digest) => {
                came.get(&digest).cloned().ok_or_else(|| self.holders.no_holder_error(digest, None))
            }
        };
        digests.into_iter().map(page).collect()
    }
}

whimbrel_core::opaque_debug!(DemandFetcher);

impl RemoteObjects for DemandFetcher {
    fn objects(&self, kind: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let kind = match kind {
            Kind::Nodes => ObjectKind::Node,
            Kind::Manifest => ObjectKind::Manifest,
            Kind::Blob | Kind::Pages => ObjectKind::Blob,
        };
        self.get_objects(kind, wants).map_err(remote_error)
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        self.get_pages(wants).map_err(remote_error)
    }

    fn cluster(&self) -> u64 {
        // Pages sent within about a round trip cost almost nothing extra beside the page that is waited for.
        let rate = self.holders.rate().unwrap_or(0);
        let round_trip = self.holders.round_trip().unwrap_or(Duration::ZERO);
        ((rate as f64 * round_trip.as_secs_f64()) as u64 / PAGE_BYTES).clamp(1, CLUSTER_MAX)
    }
}

fn remote_error(error: TransferError) -> RemoteObjectsError {
    RemoteObjectsError { retryable: error.is_retryable(), source: error.into() }
}

/// Temporary local objects: the objects fetched in one call, over those that are here.
struct CallObjects<'a> {
    local: &'a dyn LocalObjects,
    fetched: Mutex<HashMap<Digest, Vec<u8>>>,
}

impl CallObjects<'_> {
    fn lock_fetched(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, Vec<u8>>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LocalObjects for CallObjects<'_> {
    fn has(&self, digests: &[Digest]) -> Vec<bool> {
        self.local.has(digests)
    }

    fn object(&self, digest: &Digest) -> Option<Vec<u8>> {
        self.local.object(digest)
    }

    fn digest_of(&self, key: &ShortDigest) -> Option<Digest> {
        self.local.digest_of(key)
    }

    fn store(&self, _: Kind, objects: &[&[u8]]) -> Result<(), BoxError> {
        self.lock_fetched().extend(objects.iter().map(|bytes| (Digest::of(bytes), bytes.to_vec())));
        Ok(())
    }

    fn flush(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn is_complete(&self, capsule: &CapsuleId) -> bool {
        self.local.is_complete(capsule)
    }
}
