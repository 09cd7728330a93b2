//! State of the daemon that every service uses and that knows none of them.

use crate::core::{
    directories::Directories, error::DaemonError, event_counts::EventCounts, event_log::EventLog,
    operations::Operations, refs,
};
use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::runtime::Handle;
use whimbrel_api::StoreUsage;
use whimbrel_core::{ByteSize, HostName, error_chain, lock};
use whimbrel_qemu::QemuBinary;
use whimbrel_store::{MasterKey, Store};
use whimbrel_wire::{Identity, Trust};

/// Name, directories, store, identity, trust and operations of this host.
pub(crate) struct Core {
    pub(crate) name: HostName,
    pub(crate) directories: Directories,
    pub(crate) store: Store,
    /// Master key of the store, which buckets of this host have too.
    master_key: Mutex<Option<MasterKey>>,
    /// The host's key, or why it cannot be read: then other hosts are neither called nor served.
    identity: Result<Identity, String>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) runtime: Handle,
    operations: Operations,
    /// What happens on this host, for those who watch it.
    pub(crate) events: Arc<EventLog>,
    /// Counts for metrics.
    pub(crate) counts: EventCounts,
    /// Address for connections of other hosts.
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) started: Instant,
    closing: AtomicBool,
}

impl Core {
    /// Opens store, identity and trust.
    pub(crate) fn open(
        name: HostName,
        listen: Option<SocketAddr>,
        directories: Directories,
        key: Option<MasterKey>,
        runtime: Handle,
    ) -> Result<Self, DaemonError> {
        let options = whimbrel_store::Options { key: key.clone(), ..whimbrel_store::Options::create() };
        let store = Store::open(&directories.store(), options);
        let store = store.map_err(refs::store_error("open"))?;
        if let Err(error) = store.reindex_if_needed() {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "an index of the store is lost and cannot be rebuilt yet");
        }
        let identity = Identity::load_or_create(&directories.key_dir()).map_err(|error| error_chain(&error));
        if let Err(reason) = &identity {
            tracing::error!(
                reason,
                "the key of this host cannot be read; it stays as it is, and other hosts are neither called nor served"
            );
        }
        let trust = Trust::open(directories.data());
        if let Err(error) = trust.list() {
            let error = &error as &dyn std::error::Error;
            tracing::error!(
                error,
                "the trust list cannot be read; it stays as it is, and no host is trusted"
            );
        }
        let events = Arc::new(EventLog::open(directories.events().join("events.jsonl")));
        Ok(Self {
            name,
            directories,
            store,
            master_key: Mutex::new(key),
            identity,
            trust: Arc::new(trust),
            runtime,
            operations: Operations::new(events.clone()),
            events,
            counts: EventCounts::default(),
            listen,
            started: Instant::now(),
            closing: AtomicBool::new(false),
        })
    }

    /// Sleeps. Returns false as soon as the daemon is told to stop.
    pub(crate) fn sleep_unless_closing(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.closing.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(20).min(pause));
        }
        !self.closing.load(Ordering::Acquire)
    }

    /// Whether the daemon was not told to stop.
    pub(crate) fn is_open(&self) -> bool {
        !self.closing.load(Ordering::Acquire)
    }

    /// Whether the daemon was told to stop.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Tells the daemon to stop.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    pub(crate) fn operations(&self) -> &Operations {
        &self.operations
    }

    /// Master key of the store, if it is encrypted.
    pub(crate) fn master_key(&self) -> Option<MasterKey> {
        lock(&self.master_key).clone()
    }

    /// The store has another master key from now on.
    pub(crate) fn set_master_key(&self, key: MasterKey) {
        *lock(&self.master_key) = Some(key);
    }

    /// The key of this host.
    pub(crate) fn identity(&self) -> Result<&Identity, DaemonError> {
        self.identity.as_ref().map_err(|reason| DaemonError::Identity { source: reason.as_str().into() })
    }

    /// The QEMU of this host.
    pub(crate) fn qemu(&self) -> Result<&'static QemuBinary, DaemonError> {
        let failed = |error: &'static whimbrel_qemu::ProbeError| DaemonError::Qemu {
            action: "find its binary",
            source: error.to_string().into(),
        };
        whimbrel_qemu::probe().map_err(failed)
    }

    /// How much the store holds, and how much space is left.
    pub(crate) fn store_usage(&self) -> Result<StoreUsage, DaemonError> {
        let capsules = self.store.capsules().map_err(refs::store_error("list its capsules"))?;
        let images = capsules.iter().flat_map(|capsule| &capsule.manifest.images);
        let logical = images.fold(0, |sum: u64, image| sum.saturating_add(image.size()));
        let free =
            rustix::fs::statvfs(self.directories.data()).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        Ok(StoreUsage {
            capsules: capsules.len() as u64,
            stored: ByteSize(self.stored_bytes()),
            logical: ByteSize(logical),
            free: ByteSize(free),
        })
    }
}
