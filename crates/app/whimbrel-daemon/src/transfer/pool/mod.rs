//! Capsules in a pool: push, pull, and machines that run while most of their pages are in the pool.
//!
//! A capsule is one file of the pool (`capsule_file`), and each push of a machine a version of it. So
//! machines get what files get: only new chunks are sent, chunks are replicated and checked, a version
//! appears atomically, policies remove old ones. The daemon is a client of the pool with the key of its host.
//! Missing objects of a capsule are read from the pool before other hosts are asked (`remote_objects`). A
//! record names the pool of a partial capsule (`partial_records`), so that a restarted daemon finds it, and a
//! pin there (`pins`) keeps policies from removing the version.
//!
//! A pool does not decide who may run a machine: what is pushed is a copy, as with `export`.

mod capsule_file;
mod capsule_reader;
mod capsule_writer;
mod overview;
pub(crate) mod partial_records;
pub(crate) mod pins;
mod pool_path;
mod previous_version;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod remote_objects;

use crate::{
    core::{directories::Directories, error::DaemonError, notifier::Notifier, refs::store_error},
    daemon::Daemon,
};
use partial_records::PartialRecords;
pub(crate) use pool_path::PoolPath;
pub(crate) use pull::own_name;
pub(crate) use push::{SkipIf, name_in_pool};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};
use whimbrel_core::lock;
use whimbrel_pool::{
    client::{Pool, PoolOptions, Secret},
    connections::TlsDialer,
};
use whimbrel_wire::Identity;

/// How long to wait for a manager that does not answer. A reader of a page retries.
const MANAGER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a benefactor may be silent: a machine may be blocked meanwhile, and another one has a copy.
const BENEFACTOR_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of chunks cached for readers; the store keeps fetched objects.
const CACHE: usize = 16 << 20;

type Cause = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct Pools {
    /// Open pools, by the text of their managers.
    open: Mutex<HashMap<String, Pool>>,
    /// Pools that people want to see, by name.
    known: Mutex<BTreeMap<String, PoolPath>>,
    records: PartialRecords,
    /// Pools in which this host may have pinned versions, by name.
    pinned_in: Mutex<BTreeMap<String, PoolPath>>,
    /// Locked while records and pins are compared or changed together.
    pin_lock: Mutex<()>,
    /// Wakes the thread that renews pins.
    notifier: Notifier,
    key: PathBuf,
    secret: PathBuf,
}

impl Pools {
    pub(crate) fn open(layout: &Directories) -> Result<Self, DaemonError> {
        let notes = PartialRecords::load(layout.partial_capsules())?;
        let (key, secret) = (layout.key_dir(), layout.pool_secret());
        let (pinned_in, settling, bell) = Default::default();
        Ok(Self {
            open: Mutex::default(),
            known: Mutex::default(),
            records: notes,
            pinned_in,
            pin_lock: settling,
            notifier: bell,
            key,
            secret,
        })
    }

    fn remember(&self, place: &PoolPath) {
        let whole = PoolPath { managers: place.managers.clone(), folder: String::new() };
        lock(&self.known).insert(place.pool_name(), whole);
    }
}

fn failed(place: &PoolPath) -> impl Fn(Cause) -> DaemonError {
    let pool = place.to_string();
    move |source| DaemonError::Pool { pool: pool.clone(), source }
}

impl Daemon {
    fn pool(&self, place: &PoolPath) -> Result<Pool, DaemonError> {
        let name = place.pool_name();
        let mut open = lock(&self.pools.open);
        if let Some(pool) = open.get(&name) {
            return Ok(pool.clone());
        }
        self.pools.remember(place);
        let identity = Identity::load_or_create(&self.pools.key)
            .map_err(|source| DaemonError::Identity { source: source.into() })?;
        let secret = match Secret::load(&self.pools.secret) {
            Ok(secret) => Some(Arc::new(secret)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => return Err(DaemonError::io("read", &self.pools.secret, source)),
        };
        let options = PoolOptions {
            manager_timeout: MANAGER_TIMEOUT,
            benefactor_timeout: BENEFACTOR_TIMEOUT,
            cache: CACHE,
            secret,
            ..PoolOptions::new(place.managers.clone())
        };
        let dialer = TlsDialer::new(Arc::new(identity), self.name.clone(), ());
        let pool = Pool::new(options, Arc::new(dialer), self.runtime.clone());
        Ok(open.entry(name).or_insert(pool).clone())
    }

    /// Removes the records of partial capsules once nothing is missing here.
    pub(crate) fn remove_partial_records(&self) -> Result<(), DaemonError> {
        // Before the partial capsules are listed: the record of a new one is made after its mark.
        let in_buckets = self.buckets.records_of_partial();
        if self.store.partials().map_err(store_error("list partial capsules"))?.is_empty() {
            self.pools.records.clear();
            in_buckets.iter().for_each(|capsule| self.forget_in_bucket(capsule));
        }
        self.pools.notifier.notify();
        Ok(())
    }
}
