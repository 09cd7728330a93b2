//! Capsules out of a bucket: whole, or described only, so that a machine runs and fetches each page when it
//! touches it.

use super::{HOLDERS, OpenBucket, Renewal, bucket_files::BucketFiles, failed, location, showing};
use crate::{
    core::{
        error::DaemonError,
        refs::{self, store_error},
    },
    daemon::Daemon,
    transfer::pool::{own_name, remote_objects::PoolObjects},
};
use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PullRequest, TransferReport, Unit,
};
use whimbrel_core::{CapsuleId, Digest, RefName, lock};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_pool::benefactor::TierUrl;
use whimbrel_store::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError, Store, StoreError};

/// Pages to fetch when one is wanted: those of its frame are read anyway.
pub(super) const CLUSTER: u64 = 32;
/// Interval at which holders are stored again.
const RENEWAL: Duration = Duration::from_secs(24 * 3600);

/// The objects of a bucket, as the source of a repair.
struct BucketObjects(Store);

impl BucketObjects {
    fn read(&self, digests: impl Iterator<Item = Digest>) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let unread = |error: StoreError| RemoteObjectsError { source: error.into(), retryable: true };
        let digests: Vec<Digest> = digests.collect();
        self.0.blobs(&digests).into_iter().map(|read| read.map_err(unread)).collect()
    }
}

impl RemoteObjects for BucketObjects {
    fn objects(&self, _: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        self.read(wants.iter().map(|want| want.digest))
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        self.read(wants.iter().flat_map(|want| &want.digests).copied())
    }
}

/// Capsule that was found in a bucket.
struct FoundInBucket {
    url: TierUrl,
    store: Store,
    files: Arc<BucketFiles>,
    capsule: CapsuleId,
    /// Name in the bucket, if it has one.
    name: Option<RefName>,
}

impl FoundInBucket {
    /// Fails if the capsule has no name in the bucket, or has lost it since it was found: a garbage
    /// collection may not have seen the holder. While one runs no name is removed, and a later one sees it.
    fn check_named(&self) -> Result<(), DaemonError> {
        let Some(name) = &self.name else {
            let (id, url) = (self.capsule.short(), &self.url);
            return Err(DaemonError::invalid(format!(
                "capsule {id} has no name in {url}, so a garbage collection there may remove it while a \
                 machine needs it: fetch all of it with `whimbrel pull`"
            )));
        };
        match self.store.get_ref(name).map_err(store_error("read a ref"))? {
            Some(id) if id == self.capsule => Ok(()),
            _ => Err(DaemonError::NotFound { what: "capsule any more", name: name.to_string() }),
        }
    }

    /// A name for it on this host.
    fn own_name(&self, manifest: &Manifest) -> Result<RefName, DaemonError> {
        match &self.name {
            Some(name) => Ok(own_name(name, manifest)),
            None => {
                let name = format!("bucket.{}", self.capsule.short());
                name.parse().map_err(|error| DaemonError::invalid(format!("{error}")))
            }
        }
    }
}

impl Daemon {
    fn find_in_bucket(&self, place: &str, capsule: &CapsuleRef) -> Result<FoundInBucket, DaemonError> {
        let url = location(place)?;
        let OpenBucket { store, files } = self.bucket_reader(&url)?;
        let id = refs::resolve(&store, capsule)?;
        let name = match capsule {
            CapsuleRef::Name(name) if store.get_ref(name).is_ok_and(|named| named == Some(id)) => {
                Some(name.clone())
            }
            // A request for each name, so not for who knows one.
            _ => {
                let names = store.list_refs().map_err(store_error("list the names of the bucket"))?;
                names.into_iter().find(|(_, named)| *named == id).map(|(name, _)| name)
            }
        };
        Ok(FoundInBucket { url, store, files, capsule: id, name })
    }

    pub(crate) fn pull_from_bucket(
        self: &Arc<Self>,
        place: &str,
        request: PullRequest,
    ) -> Result<Operation, DaemonError> {
        refs::check_tag(request.tag.as_ref())?;
        let (host, place, subject) = (self.clone(), place.to_owned(), request.capsule.to_string());
        Ok(self.operations().start(OperationKind::Pull, subject, move |reporter| {
            let begun = Instant::now();
            reporter.progress("searching", Unit::Items, 0, None);
            let found = host.find_in_bucket(&place, &request.capsule)?;
            let capsule = found.capsule;
            let manifest = found.store.manifest(&capsule).map_err(store_error("read the capsule"))?;
            let name = request.tag.clone().map_or_else(|| found.own_name(&manifest), Ok)?;
            host.check_name_for(&name, &capsule)?;
            let pages = match request.lazy {
                true => host.describe_from_bucket(&found, vec![name]).map(|_| 0)?,
                false => {
                    let progress = &mut showing("fetching", reporter);
                    host.fetch_from_bucket(&found.store, &capsule, &[name], progress)?
                }
            };
            let (total_ms, whole) = (begun.elapsed().as_secs_f64() * 1e3, !host.is_partial(&capsule));
            let (host, wire_bytes) = (found.url.to_string(), found.files.moved());
            Ok(OperationResult::Pull(TransferReport { capsule, host, wire_bytes, pages, whole, total_ms }))
        }))
    }

    pub(crate) fn fetch_to_resume_from_bucket(
        &self,
        place: &str,
        capsule: &CapsuleRef,
    ) -> Result<(CapsuleId, Manifest), DaemonError> {
        let found = self.find_in_bucket(place, capsule)?;
        let manifest = found.store.manifest(&found.capsule).map_err(store_error("read the capsule"))?;
        let name = found.own_name(&manifest)?;
        self.describe_from_bucket(&found, vec![name])?;
        Ok((found.capsule, manifest))
    }

    /// Fetches the manifest of a capsule and what a resume needs, and names it here.
    fn describe_from_bucket(&self, found: &FoundInBucket, names: Vec<RefName>) -> Result<(), DaemonError> {
        let capsule = found.capsule;
        let was_whole = self.store.is_complete(&capsule).map_err(store_error("look up the capsule"))?;
        if !was_whole {
            found.check_named()?;
            // In this order: a record without a partial capsule may be removed at any time, and what is named
            // here can always be had.
            self.store.expect_partial(&capsule).map_err(store_error("prepare the capsule"))?;
            self.buckets.records.add(capsule, &found.url.to_string())?;
            self.hold_in_bucket(&found.url, &capsule)?;
            found.check_named()?;
        }
        let copy = |kind, digest: &Digest| {
            if self.store.has(&[*digest]) == [true] {
                return Ok(());
            }
            let bytes = found.store.blob(digest).map_err(store_error("read the bucket"))?;
            let kept = self.store.fetched_objects_writer().store(kind, &[&bytes]);
            kept.map_err(store_error("store the objects"))
        };
        copy(Kind::Manifest, &capsule.0)?;
        let manifest = self.store.manifest(&capsule).map_err(store_error("read the capsule"))?;
        manifest.blobs().try_for_each(|blob| copy(Kind::Blob, &blob))?;
        self.store.fetched_objects_writer().flush().map_err(store_error("store the manifest"))?;
        self.name_partial(&capsule, names)
    }

    /// Copies all of a capsule. Returns how many pages were missing here.
    fn fetch_from_bucket(
        &self,
        from: &Store,
        capsule: &CapsuleId,
        names: &[RefName],
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<u64, DaemonError> {
        let copied = from.copy_to(capsule, &self.store, names, progress);
        let pages =
            copied.map_err(refs::cancellable("copy the capsule", "what arrived is kept; call it again"))?;
        if self.is_partial(capsule) {
            self.store.complete(capsule).map_err(store_error("complete the capsule"))?;
        }
        self.forget_in_bucket(capsule);
        Ok(pages)
    }

    /// Fetches what buckets have of a capsule and of its ancestors, of which it may lack pages.
    pub(crate) fn fetch_from_buckets(
        &self,
        capsule: CapsuleId,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), DaemonError> {
        let all = self.with_ancestors(capsule)?;
        let mut has_fetched = false;
        for (id, place) in all.iter().filter_map(|id| Some((id, self.buckets.records.of(id)?))) {
            let store = self.open_reader(&place)?;
            self.fetch_from_bucket(&store, id, &[], &mut |done, total| progress(done, total).is_continue())?;
            has_fetched = true;
        }
        if has_fetched && self.is_partial(&capsule) {
            self.complete_if_whole(&capsule);
        }
        Ok(())
    }

    /// The objects of a bucket, for a repair.
    pub(crate) fn bucket_objects(&self, place: &str) -> Result<Box<dyn RemoteObjects>, DaemonError> {
        Ok(Box::new(BucketObjects(self.bucket_reader(&location(place)?)?.store)))
    }

    /// The store of a bucket, which may be open since earlier.
    fn open_reader(&self, place: &str) -> Result<Store, DaemonError> {
        let open = lock(&self.buckets.open).get(place).cloned();
        open.map_or_else(|| Ok(self.bucket_reader(&location(place)?)?.store), Ok)
    }

    /// Number of pages to fetch when one is wanted, if buckets have pages of machines here.
    pub(crate) fn bucket_cluster(&self) -> Option<u64> {
        (!self.buckets.records.buckets().is_empty()).then_some(CLUSTER)
    }

    /// Fetches objects that are not pages.
    pub(crate) fn objects_from_buckets(&self, wants: &[ObjectWant]) -> PoolObjects {
        let digests: Vec<Digest> = wants.iter().map(|want| want.digest).collect();
        self.found_in_buckets(&digests)
    }

    /// Fetches pages, in ascending order within each want.
    pub(crate) fn pages_from_buckets(&self, wants: &[PageWant]) -> PoolObjects {
        let digests: Vec<Digest> = wants.iter().flat_map(|want| &want.digests).copied().collect();
        self.found_in_buckets(&digests)
    }

    fn found_in_buckets(&self, digests: &[Digest]) -> PoolObjects {
        let mut from = PoolObjects { found: vec![None; digests.len()], error: None };
        for place in self.buckets.records.buckets() {
            let store = match self.open_reader(&place) {
                Ok(store) => store,
                Err(error) => {
                    from.set_error(error.into());
                    continue;
                }
            };
            let has = |at: &usize| from.found[*at].is_none() && store.has(&[digests[*at]]) == [true];
            let there: Vec<usize> = (0..digests.len()).filter(has).collect();
            let wanted: Vec<Digest> = there.iter().map(|at| digests[*at]).collect();
            for (at, read) in there.into_iter().zip(store.blobs(&wanted)) {
                match read {
                    Ok(found) => from.found[at] = Some(found),
                    Err(error) => from.set_error(error.into()),
                }
            }
        }
        from
    }

    /// Has garbage collection of a bucket spare a capsule.
    fn hold_in_bucket(&self, url: &TierUrl, capsule: &CapsuleId) -> Result<(), DaemonError> {
        let bucket = self.bucket(url)?;
        let held = bucket.put(&self.holder(capsule), self.name.to_string().into());
        held.map_err(|error| failed(&bucket)(error.into()))
    }

    fn holder(&self, capsule: &CapsuleId) -> String {
        format!("{HOLDERS}/{}.{capsule}", self.name)
    }

    /// Needs a capsule of a bucket no longer: all of it is here, or nothing.
    pub(crate) fn forget_in_bucket(&self, capsule: &CapsuleId) {
        let Some(place) = self.buckets.records.of(capsule) else { return };
        let forgotten = self.buckets.records.remove(capsule).and_then(|()| {
            let bucket = self.bucket(&location(&place)?)?;
            bucket.delete(&self.holder(capsule)).map_err(|error| failed(&bucket)(error.into()))?;
            // Somebody may need it anew, whose holder went with this one.
            match self.buckets.records.of(capsule) {
                Some(place) => self.hold_in_bucket(&location(&place)?, capsule),
                None => Ok(()),
            }
        });
        if let Err(error) = forgotten {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%capsule, error, "a bucket holds a capsule for this host for another month");
        }
    }

    /// Stores the holders of this host again, once a day. False if a bucket could not be reached.
    pub(crate) fn renew_holders(&self) -> bool {
        let Renewal { stored, failed } = *lock(&self.buckets.renewal);
        if stored.is_some_and(|stored| stored.elapsed() < RENEWAL) {
            return true;
        }
        let held = |(capsule, place): (CapsuleId, String)| {
            let held = location(&place).and_then(|url| self.hold_in_bucket(&url, &capsule));
            let log = |error: &DaemonError| {
                let error = error as &dyn std::error::Error;
                if !failed {
                    // Tried again until it succeeds, and said once.
                    tracing::warn!(%capsule, place, error, "cannot tell a bucket that a capsule is needed; after a month without it, gc removes the capsule");
                } else {
                    tracing::debug!(%capsule, place, error, "cannot hold it in a bucket yet");
                }
            };
            held.inspect_err(log).is_ok()
        };
        // All are tried.
        let failures = self.buckets.records.all().into_iter().map(held).filter(|held| !held).count();
        let failed = failures > 0;
        *lock(&self.buckets.renewal) = Renewal { stored: (!failed).then(Instant::now), failed };
        !failed
    }
}
