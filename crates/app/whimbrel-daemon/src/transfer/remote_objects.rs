//! Remote objects of the store: fetches missing objects from local files, then pools, then buckets, then
//! other hosts.

use super::store_service::TransferState;
use crate::daemon::Daemon;
use std::sync::{Arc, Weak};
use whimbrel_core::{PAGE_SIZE, lock};
use whimbrel_hashcache::HashCache;
use whimbrel_image::pack_frame::Kind;
use whimbrel_store::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError};
use whimbrel_transfer::DemandFetcher;

/// Fetches missing objects from pools and from all trusted hosts.
pub(crate) struct PeerObjects(pub(crate) Weak<Daemon>);

impl PeerObjects {
    fn host(&self) -> Result<Arc<Daemon>, RemoteObjectsError> {
        let closing = || RemoteObjectsError { source: "the daemon is shutting down".into(), retryable: true };
        self.0.upgrade().ok_or_else(closing)
    }
}

impl TransferState {
    /// The fetcher for the present list of hosts.
    fn remote(&self, host: &Daemon) -> Arc<DemandFetcher> {
        let sources = host.sources();
        let mut kept = lock(&self.remote);
        match &*kept {
            Some(remote) if Arc::ptr_eq(remote.holders(), &sources) => remote.clone(),
            _ => kept.insert(Arc::new(DemandFetcher::new(Arc::new(host.store.clone()), sources))).clone(),
        }
    }
}

impl RemoteObjects for PeerObjects {
    fn objects(&self, kind: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let host = self.host()?;
        let mut from = host.objects_from_pools(wants);
        if from.found.iter().any(Option::is_none) {
            from.add(host.objects_from_buckets(wants));
        }
        let rest: Vec<ObjectWant> = wants
            .iter()
            .zip(&from.found)
            .filter(|(_, found)| found.is_none())
            .map(|(want, _)| *want)
            .collect();
        if !rest.is_empty() {
            let fetched = host.transfers.remote(&host).objects(kind, &rest);
            insert_fetched(&mut from.found, fetched.map_err(|error| from.error.unwrap_or(error))?);
        }
        all_found(from.found)
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let host = self.host()?;
        let cache = host.hash_cache();
        let look = |digest| cache.as_ref().and_then(|cache| cached(cache, digest));
        let mut found: Vec<Option<Vec<u8>>> = wants.iter().flat_map(|want| &want.digests).map(look).collect();
        let rest = missing(wants, &found);
        let mut from = host.pages_from_pools(&rest);
        if from.found.iter().any(Option::is_none) {
            from.add(host.pages_from_buckets(&rest));
        }
        let mut away = from.error;
        let mut pooled = from.found.into_iter();
        for slot in found.iter_mut().filter(|slot| slot.is_none()) {
            *slot = pooled.next().flatten();
        }
        let rest = missing(wants, &found);
        if !rest.is_empty() {
            let fetched = host.transfers.remote(&host).pages(&rest);
            insert_fetched(&mut found, fetched.map_err(|error| away.take().unwrap_or(error))?);
        }
        all_found(found)
    }

    fn cluster(&self) -> u64 {
        let of = |host: Arc<Daemon>| {
            let away = host.pooled_cluster().max(host.bucket_cluster());
            away.unwrap_or(1).max(host.transfers.remote(&host).cluster())
        };
        self.host().map_or(1, of)
    }
}

/// Inserts fetched objects where some were missing.
fn insert_fetched(found: &mut [Option<Vec<u8>>], came: Vec<Vec<u8>>) {
    found.iter_mut().filter(|slot| slot.is_none()).zip(came).for_each(|(slot, came)| *slot = Some(came));
}

fn all_found(found: Vec<Option<Vec<u8>>>) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
    let short = || RemoteObjectsError { source: "too few objects arrived".into(), retryable: false };
    found.into_iter().collect::<Option<Vec<_>>>().ok_or_else(short)
}

/// The part of `wants` that was not found.
fn missing(wants: &[PageWant], found: &[Option<Vec<u8>>]) -> Vec<PageWant> {
    let mut at = 0;
    wants.iter().filter_map(|want| without(want, found, &mut at)).collect()
}

fn cached(cache: &HashCache, digest: &whimbrel_core::Digest) -> Option<Vec<u8>> {
    let mut page = [0; PAGE_SIZE];
    cache.get(digest, &mut page).then(|| page.to_vec())
}

/// The part of `want` without the pages found (from `at` on); none if that is empty.
fn without(want: &PageWant, found: &[Option<Vec<u8>>], at: &mut usize) -> Option<PageWant> {
    let slots = (0..256usize).filter(|slot| want.slots[slot / 64] >> (slot % 64) & 1 == 1);
    let mut left = PageWant { slots: [0; 4], digests: Vec::new(), ..want.clone() };
    for (slot, digest) in slots.zip(&want.digests) {
        if found.get(*at).is_some_and(Option::is_none) {
            left.slots[slot / 64] |= 1 << (slot % 64);
            left.digests.push(*digest);
        }
        *at += 1;
    }
    (!left.digests.is_empty()).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    #[test]
    fn what_was_found_is_not_asked_for_again() {
        let digests: Vec<Digest> = (0..3).map(|n| Digest([n; 32])).collect();
        let want = PageWant { leaf: Digest([9; 32]), slots: [0b1011, 0, 0, 0], digests, similar: None };
        let found = [None, Some(vec![1]), None];
        let mut at = 0;
        let left = without(&want, &found, &mut at).unwrap();
        assert_eq!((left.slots[0], left.digests.len(), at), (0b1001, 2, 3));
        assert_eq!(left.digests[1], Digest([2; 32]));
        assert!(without(&want, &[Some(vec![]), Some(vec![]), Some(vec![])], &mut 0).is_none());
    }
}
