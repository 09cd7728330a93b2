//! Capsules in a checkpoint pool: pushed to it, pulled from it, and machines that run while most of their
//! pages are there.
//!
//! A capsule is one file of the pool (`layout`), each push of a machine a version of it, so what the pool
//! does for files it does for machines: only new chunks travel, they are kept several times and checked, a
//! version appears whole, policies drop old ones. The daemon is a client of the pool with the key of its
//! host. What is missing here of a capsule is read from the pool before other hosts are asked (`fetch`);
//! where it lies is noted (`notes`), so that the next daemon finds it too, and pinned there (`holding`), so
//! that no policy takes it away.
//!
//! A pool has no say about who may run a machine: what is pushed is a copy, as with `export`.

mod capsule_file;
mod capsule_reader;
mod capsule_writer;
mod partial_records;
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
pub(crate) use push::SkipIf;
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use whimbrel_pool::{
    client::{Pool, PoolOptions, Secret},
    connections::TlsDialer,
};
use whimbrel_wire::Identity;

/// How long a manager that is away is waited for. Whoever waits for a page asks again.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a benefactor may be silent: a machine may stand still meanwhile, and another has a copy.
const SILENCE: Duration = Duration::from_secs(3);
/// Bytes of chunks kept for readers; the store keeps what came.
const CACHE: usize = 16 << 20;

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The pools that this host uses, and what it needs of them.
pub(crate) struct Pools {
    /// By the text of their managers.
    open: Mutex<HashMap<String, Pool>>,
    notes: PartialRecords,
    /// Pools in which this host may pin versions, by name.
    pinned_in: Mutex<BTreeMap<String, PoolPath>>,
    /// Held by whoever compares notes with pins, or makes one and the other.
    settling: Mutex<()>,
    /// What is needed in pools may have changed.
    bell: Notifier,
    key: PathBuf,
    secret: PathBuf,
}

impl Pools {
    pub(crate) fn open(layout: &Directories) -> Result<Self, DaemonError> {
        let notes = PartialRecords::load(layout.pooled())?;
        let (key, secret) = (layout.key_dir(), layout.pool_secret());
        let (pinned_in, settling, bell) = Default::default();
        Ok(Self { open: Mutex::default(), notes, pinned_in, settling, bell, key, secret })
    }

    fn pinned_in(&self) -> MutexGuard<'_, BTreeMap<String, PoolPath>> {
        self.pinned_in.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(place: &PoolPath) -> impl Fn(Cause) -> DaemonError {
    let pool = place.to_string();
    move |source| DaemonError::Pool { pool: pool.clone(), source }
}

impl Daemon {
    fn pool(&self, place: &PoolPath) -> Result<Pool, DaemonError> {
        let name = place.pool_name();
        let mut open = self.pools.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = open.get(&name) {
            return Ok(pool.clone());
        }
        let identity = Identity::load_or_create(&self.pools.key)
            .map_err(|source| DaemonError::Identity { source: source.into() })?;
        let secret = match Secret::load(&self.pools.secret) {
            Ok(secret) => Some(Arc::new(secret)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => return Err(DaemonError::io("read", &self.pools.secret, source)),
        };
        let options = PoolOptions {
            manager_patience: PATIENCE,
            benefactor_patience: SILENCE,
            cache: CACHE,
            secret,
            ..PoolOptions::new(place.managers.clone())
        };
        let dialer = TlsDialer::new(Arc::new(identity), self.name.clone(), ());
        let pool = Pool::new(options, Arc::new(dialer), self.runtime.clone());
        Ok(open.entry(name).or_insert(pool).clone())
    }

    /// Forgets where capsules were once nothing is missing here.
    pub(crate) fn sweep_pooled(&self) -> Result<(), DaemonError> {
        if self.store.partials().map_err(store_error("look for what is missing"))?.is_empty() {
            self.pools.notes.clear();
        }
        self.pools.bell.notify();
        Ok(())
    }
}
