//! Stores in buckets of an object store (S3): capsules that outlive this host and all others.
//!
//! A bucket's store has the format of a host's, with an object for each file ([`bucket_files`]), so content
//! is deduplicated, compressed and encrypted there as at home. It has the master key of the host that made
//! it. Whoever changes it has [`bucket_lock`]; reading needs no lock. Machines run while most of their pages
//! are in the bucket ([`lazy_capsules`]): a *holder*, an object `holders/HOST.CAPSULE` that is stored again
//! every day, keeps garbage collection from removing these.
//!
//! Credentials and region are in the daemon's environment, as `AWS_ACCESS_KEY_ID` and so on.

mod bucket_files;
mod bucket_lock;
mod lazy_capsules;
pub(crate) mod records;

use crate::{
    capsule::maintenance::verify_store,
    core::{
        error::DaemonError,
        operations::ProgressReporter,
        refs::{self, store_error},
    },
    daemon::Daemon,
    transfer::pool::name_in_pool,
};
use bucket_files::BucketFiles;
use bucket_lock::BucketLock;
use records::BucketRecords;
use std::{
    collections::HashMap,
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};
use whimbrel_api::{
    BucketCapsule, BucketRequest, Operation, OperationKind, OperationResult, PushRequest, TransferReport,
    Unit,
};
use whimbrel_core::{ByteSize, CapsuleId, RefName, lock};
use whimbrel_pool::benefactor::{Bucket, ObjectEntry, TierOptions, TierUrl};
use whimbrel_store::{Expected, GcRoots, Options, Store};

/// Bytes of decoded frames that a reader keeps.
const CACHE: usize = 32 << 20;
/// Where readers say which capsules they need.
const HOLDERS: &str = "holders";
/// Time for which a holder counts after it was stored.
const HOLDER_TERM: Duration = Duration::from_secs(30 * 24 * 3600);
/// Content of the marker of a store that is not encrypted (`docs/formats/store.md`).
const PLAIN: &[u8] = b"whimbrel store 1\n";

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Buckets that this host uses.
pub(crate) struct Buckets {
    /// Stores that are open for reading, by their location.
    open: Mutex<HashMap<String, Store>>,
    records: BucketRecords,
    renewal: Mutex<Renewal>,
}

/// What became of the holders of this host.
#[derive(Debug, Clone, Copy, Default)]
struct Renewal {
    /// When all were stored last, unless that has failed since.
    stored: Option<Instant>,
    /// Whether the last attempt failed, and somebody was told.
    failed: bool,
}

/// Location of a bucket's store.
fn location(place: &str) -> Result<TierUrl, DaemonError> {
    place.parse().map_err(|error| DaemonError::invalid(format!("{error}")))
}

fn failed(bucket: &Bucket) -> impl Fn(Cause) -> DaemonError + use<> {
    let place = bucket.place();
    move |source| DaemonError::Bucket { place: place.clone(), source }
}

impl Buckets {
    pub(crate) fn open(file: std::path::PathBuf) -> Self {
        Self { open: Mutex::default(), records: BucketRecords::load(file), renewal: Mutex::default() }
    }

    /// Capsules of which most pages are in a bucket.
    pub(crate) fn records_of_partial(&self) -> Vec<CapsuleId> {
        self.records.all().into_iter().map(|(capsule, _)| capsule).collect()
    }
}

/// A bucket's store that is open. One that may be changed is this process's alone.
struct OpenBucket {
    store: Store,
    files: Arc<BucketFiles>,
}

impl Daemon {
    fn bucket(&self, url: &TierUrl) -> Result<Arc<Bucket>, DaemonError> {
        let settings = std::env::vars().filter(|(name, _)| name.starts_with("AWS_")).collect();
        let options = TierOptions { url: url.clone(), keep_local: 0, take_over: false, settings };
        let bucket = Bucket::new(options, self.runtime.clone());
        let place = url.to_string();
        bucket.map(Arc::new).map_err(|error| DaemonError::Bucket { place, source: error.into() })
    }

    /// The store of a bucket as it is now, to read from.
    fn bucket_reader(&self, url: &TierUrl) -> Result<OpenBucket, DaemonError> {
        let bucket = self.bucket(url)?;
        let files = BucketFiles::new(bucket.clone(), None);
        let store = self.open_in(&bucket, files.clone(), false)?;
        lock(&self.buckets.open).insert(url.to_string(), store.clone());
        Ok(OpenBucket { store, files })
    }

    /// The store of a bucket, to change it; waits while another host does. Whoever `adds` to it makes it if
    /// there is none.
    fn bucket_writer(
        &self,
        url: &TierUrl,
        adds: bool,
        reporter: &ProgressReporter,
    ) -> Result<OpenBucket, DaemonError> {
        let bucket = self.bucket(url)?;
        let right = BucketLock::take(&bucket, &self.name, &mut |holder| {
            reporter.progress(&format!("waiting for {holder}"), Unit::Items, 0, None);
            if reporter.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let files = BucketFiles::new(bucket.clone(), Some(right));
        let store = self.open_in(&bucket, files.clone(), adds)?;
        Ok(OpenBucket { store, files })
    }

    fn open_in(&self, bucket: &Bucket, files: Arc<BucketFiles>, adds: bool) -> Result<Store, DaemonError> {
        let marker = bucket.get("whimbrel-store", None).map_err(|error| failed(bucket)(error.into()))?;
        if marker.is_none() && !adds {
            return Err(DaemonError::NotFound { what: "store in", name: bucket.place() });
        }
        let (is_plain, key) = (marker.as_deref() == Some(PLAIN), self.master_key());
        if is_plain && adds && key.is_some() {
            // With the key it would become encrypted, and shut out the hosts that use it.
            return Err(DaemonError::invalid(format!(
                "{} is not encrypted, and the store of this host is: push to another prefix",
                bucket.place()
            )));
        }
        let key = key.filter(|_| !is_plain);
        let options = Options { create: adds, key, cache: CACHE, ..Options::default() };
        Store::open_on(files, options).map_err(store_error("open the store in the bucket"))
    }

    /// Starts the operation that copies a capsule to a bucket, where it gets the name `tag`, or that which a
    /// file of it has in a pool.
    pub(crate) fn push_to_bucket(
        self: &Arc<Self>,
        place: &str,
        request: &PushRequest,
        tag: Option<RefName>,
    ) -> Result<Operation, DaemonError> {
        let url = location(place)?;
        if request.follow || request.unfollow {
            return Err(DaemonError::invalid(
                "only a host or a pool gets every new capsule: `whimbrel schedule` pushes to a bucket at set times",
            ));
        }
        let (capsule, manifest) = self.find(&request.subject)?;
        if self.is_partial(&capsule) {
            return Err(DaemonError::invalid("the capsule is only partial here: pull all of it first"));
        }
        let name = name_in_pool(&request.subject, &capsule, &manifest);
        let name: RefName =
            tag.map_or_else(|| name.parse(), Ok).map_err(|error| DaemonError::invalid(format!("{error}")))?;
        let (host, subject) = (self.clone(), request.subject.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |reporter| {
            let begun = Instant::now();
            let _pin = host.store.pin(&capsule).map_err(store_error("pin the capsule"))?;
            let OpenBucket { store, files } = host.bucket_writer(&url, true, reporter)?;
            let pages = host.store.copy_to(&capsule, &store, &[name], &mut showing("sending", reporter));
            let pages =
                pages.map_err(refs::cancellable("copy the capsule", "the bucket shows no part of it"))?;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let (host, wire_bytes) = (url.to_string(), files.moved());
            let report = TransferReport { capsule, host, wire_bytes, pages, whole: true, total_ms };
            Ok(OperationResult::Push { report, machine: None })
        }))
    }

    /// Starts the operation that lists or verifies a bucket, after it has removed a name or collected garbage
    /// there if that was requested.
    pub(crate) fn tend_bucket(self: &Arc<Self>, request: BucketRequest) -> Result<Operation, DaemonError> {
        let (host, url, subject) = (self.clone(), location(&request.bucket)?, request.bucket.clone());
        Ok(self.operations().start(OperationKind::Bucket, subject, move |reporter| {
            let mut freed = ByteSize(0);
            if request.gc || request.untag.is_some() {
                let OpenBucket { store, .. } = host.bucket_writer(&url, false, reporter)?;
                if let Some(name) = &request.untag {
                    store.delete_ref(name, Expected::Anything).map_err(store_error("remove the name"))?;
                }
                if request.gc {
                    reporter.progress("collecting garbage", Unit::Bytes, 0, None);
                    let held = held_capsules(&*host.bucket(&url)?, &store)?;
                    let report = store.gc_retaining(GcRoots::Referenced, &held);
                    freed = report.map_err(store_error("collect garbage in the bucket"))?.removed;
                }
            }
            let store = host.bucket_reader(&url)?.store;
            if request.verify {
                return verify_store(&store, reporter);
            }
            Ok(OperationResult::Bucket { freed, capsules: capsules_of(&store)? })
        }))
    }
}

/// Capsules of a store by their names.
fn capsules_of(store: &Store) -> Result<Vec<BucketCapsule>, DaemonError> {
    let (named, _) = store.readable_refs().map_err(store_error("read the refs"))?;
    let info = |(name, id): (RefName, CapsuleId)| {
        let manifest = store.manifest(&id).map_err(store_error("read the capsule"))?;
        let size = ByteSize(manifest.images.iter().map(|image| image.size()).sum());
        Ok(BucketCapsule { name, id, time_ms: manifest.time, size })
    };
    named.into_iter().map(info).collect()
}

/// Capsules that hosts read lazily, as far as they are in the store.
fn held_capsules(bucket: &Bucket, store: &Store) -> Result<Vec<CapsuleId>, DaemonError> {
    let entries = bucket.list_dir(HOLDERS).map_err(|error| failed(bucket)(error.into()))?;
    let held = alive_holders(&entries, SystemTime::now()).into_iter();
    Ok(held.filter(|capsule| store.has(&[capsule.0]) == [true]).collect())
}

/// Capsules of the holders that count. One of the future does: the clock of the server is ahead.
fn alive_holders(entries: &[ObjectEntry], now: SystemTime) -> Vec<CapsuleId> {
    let is_dead = |stored: SystemTime| now.duration_since(stored).is_ok_and(|age| age >= HOLDER_TERM);
    let alive = entries.iter().filter(|entry| !is_dead(entry.stored));
    alive.filter_map(|entry| entry.name.rsplit_once('.')?.1.parse().ok()).collect()
}

/// Shows how much of the pages was looked at.
fn showing(what: &'static str, reporter: &ProgressReporter) -> impl FnMut(u64, u64) -> bool {
    move |done, total| {
        reporter.progress(what, Unit::Bytes, done, Some(total));
        !reporter.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    #[test]
    fn a_holder_counts_for_a_month_and_also_if_the_server_is_ahead_of_this_host() {
        let (now, second) = (SystemTime::now(), Duration::from_secs(1));
        let of = |number: u8, stored| {
            let capsule = CapsuleId(Digest([number; 32]));
            (capsule, ObjectEntry { name: format!("alpha.lan.{capsule}"), stored })
        };
        let (young, one) = of(1, now - HOLDER_TERM + second);
        let (ahead, other) = of(2, now + 600 * second);
        let (_, dead) = of(3, now - HOLDER_TERM);
        assert_eq!(alive_holders(&[one, dead, other], now), [young, ahead]);
    }
}
