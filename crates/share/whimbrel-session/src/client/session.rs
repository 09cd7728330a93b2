//! A session: everything of one mount except the FUSE mount itself.

use super::{
    connection::server_connection::{
        CallFailure, ConnectionSettings, Connector, FirstConnection, ServerConnection,
    },
    content::{fetcher::Fetcher, hole_query::HoleQueries},
    dedup::{read_dedup::DedupTable, shared_cache::SharedCache, write_dedup::WriteComparison},
    leases::lease_keeper::Leases,
    locks::held_locks::HeldLocks,
    namespace::{id_map::IdMap, inodes::InodeTable},
    policy::{MountSettings, Policy},
    prefetch::{hints::Hints, read_history::ReadHistory, sibling_prefetch::PrefetchDistance},
    session_error::{NO_CACHE_TEXT, SessionError},
    write_back::write_queue::WriteBack,
};
use crate::{
    cache::{
        BlockCache, CacheDir, CacheError, DiskStorage, FileId, Geometry, MemoryStorage, Storage, has_unsent,
    },
    proto::{End, EndCall, FilesystemSpace, Ident, RelPath, Time},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_fuse::{Errno, Notifier};

/// Bytes in memory of a session without a cache: data in transit and readahead.
const TRANSIT_CAPACITY: u64 = 16 << 20;

/// Default round trip from which on a link counts as slow.
const SLOW_ROUND_TRIP: Duration = Duration::from_millis(4);

/// Default number of names and attributes in memory. While millions are listed the kernel holds some more;
/// all of it together takes less than a gibibyte.
const MOST_NAMES: usize = 3 << 17;

/// Number of events retained.
const MAX_EVENTS: usize = 1000;

/// Options of a session.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Path of the directory on the server.
    pub directory: Vec<u8>,
    /// Directory of the cache.
    pub cache: PathBuf,
    /// File of the key with which the cache is encrypted; none if it is not.
    pub cache_key: Option<PathBuf>,
    /// Capacity in bytes. With 0 nothing of the server is stored on this host's disk: data in transit is in
    /// memory, the kernel has its page cache, and write-back is not possible.
    pub capacity: u64,
    /// Size of a cache block in bytes.
    pub block: u64,
    /// Settings that can be changed later.
    pub settings: MountSettings,
    /// Mapping of owners between this host and the server.
    pub id_map: IdMap,
    /// Reference files of this host: pages found in them are not sent over a slow link.
    pub references: Vec<PathBuf>,
    /// Shared cache: a directory in which users of this host share what they may read.
    pub shared_cache: Option<PathBuf>,
    /// Round trip from which on a link is slow: content is compressed, and pages that the other side has are
    /// not sent. Zero makes every link slow, and digests are asked for wherever they may save something, so
    /// that nothing depends on measured times.
    pub slow_round_trip: Duration,
    /// Most files and directories whose names and attributes are in memory. What the kernel knows or a
    /// program uses stays beyond it.
    pub most_names: usize,
    /// Whether there are extended attributes. Without them the kernel does not ask for any before each write.
    pub xattrs: bool,
}

impl SessionOptions {
    /// Default options: 8 GiB in blocks of 64 KiB, with this process's user as owner.
    pub fn new(directory: impl Into<Vec<u8>>, cache: PathBuf) -> Self {
        let settings = MountSettings::default();
        Self {
            directory: directory.into(),
            cache,
            cache_key: None,
            capacity: 8 << 30,
            block: 64 << 10,
            settings,
            id_map: IdMap::default(),
            references: Vec::new(),
            shared_cache: None,
            slow_round_trip: SLOW_ROUND_TRIP,
            most_names: MOST_NAMES,
            xattrs: false,
        }
    }

    /// Whether data is stored on this host's disk.
    pub(super) fn has_cache(&self) -> bool {
        self.capacity > 0
    }

    /// Geometry of the cache, if it is valid.
    fn geometry(&self) -> Result<Geometry, SessionError> {
        if !self.has_cache() && self.settings.writes_back() {
            return Err(SessionError::NoCache);
        }
        let capacity = if self.has_cache() { self.capacity } else { TRANSIT_CAPACITY };
        let shape = || SessionError::Geometry { block: self.block, capacity: self.capacity };
        Geometry::new(self.block, capacity).ok_or_else(shape)
    }

    fn storage(&self, folder: DiskStorage) -> Result<Box<dyn Storage>, SessionError> {
        if self.has_cache() {
            return Ok(Box::new(folder));
        }
        let dir = || self.cache.clone();
        match has_unsent(&folder).map_err(|source| SessionError::Cache { dir: dir(), source })? {
            true => Err(SessionError::UnsentData { dir: dir() }),
            false => Ok(Box::new(MemoryStorage::instead_of(folder))),
        }
    }
}

/// An event that no call could report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time in seconds since 1970.
    pub at: i64,
    /// Description for people.
    pub text: String,
}

/// Status of a session, as `whimbrel session show` prints it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Address of the server.
    pub server: String,
    /// Path of the directory on the server.
    pub directory: String,
    /// Whether there is a connection.
    pub connected: bool,
    /// Round trip in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// Mean time of a call in milliseconds.
    pub call_ms: f64,
    /// Calls so far.
    pub calls: u64,
    /// Calls so far, by kind.
    #[serde(default)]
    pub requests: BTreeMap<String, u64>,
    /// Number of times that a program waited for the server.
    #[serde(default)]
    pub waits: u64,
    /// Total time of these waits in milliseconds.
    #[serde(default)]
    pub waited_ms: f64,
    /// Number of files and directories whose names and attributes are cached.
    #[serde(default)]
    pub known: u64,
    /// Blocks that hints declare zero, and that were not requested.
    #[serde(default)]
    pub zero_blocks: u64,
    /// Bytes in holes of the server's files, which are never requested.
    #[serde(default)]
    pub holes: u64,
    /// Blocks prefetched from the read history.
    #[serde(default)]
    pub ahead_blocks: u64,
    /// Pages on this host that can be found by their digest.
    #[serde(default)]
    pub known_pages: u64,
    /// Pages that were found on this host and not sent.
    #[serde(default)]
    pub found_pages: u64,
    /// Pages that were not sent in a write-back because the server had them.
    #[serde(default)]
    pub spared_pages: u64,
    /// Number of times the connection broke.
    pub broken: u64,
    /// Bytes sent on the current connection.
    pub sent: u64,
    /// Bytes received on the current connection.
    pub received: u64,
    /// Reads answered from the cache, as a fraction of all.
    pub hit_ratio: Option<f64>,
    /// Capacity of the cache in bytes.
    pub capacity: u64,
    /// Bytes of frames in use.
    pub used: u64,
    /// Bytes that the server does not have yet.
    pub dirty: u64,
    /// Files with changes that the server does not have yet.
    pub dirty_files: u64,
    /// Changes of names that the server has yet to make.
    pub queued: u64,
    /// Damaged pages that were fetched again.
    pub damaged: u64,
    /// Paths whose content stays in the cache.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<String>,
    /// Current settings of the mount.
    pub settings: MountSettings,
    /// The latest events.
    pub events: Vec<Event>,
}

/// A session. Clones refer to the same one.
#[derive(Clone)]
pub struct Session {
    pub(super) core: Arc<Core>,
}

pub(super) struct Core {
    pub(super) me: Weak<Core>,
    pub(super) server_address: String,
    pub(super) options: SessionOptions,
    pub(super) connection: Arc<ServerConnection>,
    pub(super) cache_dir: CacheDir,
    pub(super) cache: BlockCache,
    pub(super) inodes: Mutex<InodeTable>,
    pub(super) known_files: Mutex<HashMap<Ident, FileId>>,
    pub(super) fetcher: Fetcher,
    pub(super) writeback: WriteBack,
    pub(super) settings: RwLock<MountSettings>,
    pub(super) events: Mutex<VecDeque<Event>>,
    pub(super) notifier: OnceLock<Notifier>,
    pub(super) read_only: bool,
    pub(super) server_ids: (u32, u32),
    pub(super) reads: [AtomicU64; 2],
    /// Whether a tree prefetch is in progress.
    pub(super) walking: AtomicBool,
    pub(super) prefetch_distance: Mutex<PrefetchDistance>,
    pub(super) free_space: Mutex<Option<(Instant, FilesystemSpace)>>,
    pub(super) hints: Hints,
    pub(super) holes: HoleQueries,
    /// Blocks that hints declared zero, and that were not requested.
    pub(super) zero_blocks: AtomicU64,
    read_history: Mutex<ReadHistory>,
    pub(super) ahead_blocks: AtomicU64,
    pub(super) dedup: DedupTable,
    pub(super) write_comparison: WriteComparison,
    pub(super) shared: Option<SharedCache>,
    pub(super) leases: Arc<Leases>,
    pub(super) locks: Mutex<HeldLocks>,
    pub(super) pinning: Mutex<()>,
    clock: Mutex<Time>,
}

impl Session {
    /// Connects, opens the cache, and writes back what an earlier session left in it. Must be called inside a
    /// runtime, which then runs the session's connections.
    pub async fn start(connector: Arc<dyn Connector>, options: SessionOptions) -> Result<Self, SessionError> {
        let to = connector.destination();
        let geometry = options.geometry()?;
        // First, so that a cache in use by another process costs the server nothing.
        let dir = options.cache.clone();
        let opened = DiskStorage::open(&dir).and_then(|folder| Ok((folder.client()?, folder)));
        let (client, folder) = opened.map_err(|source| SessionError::Directory { dir, source })?;
        let cache = CacheDir::of(&options.cache, folder, options.cache_key.as_deref());
        let cache = cache.map_err(|source| SessionError::Key { dir: options.cache.clone(), source })?;
        let patience = Duration::from_secs(options.settings.patience);
        let settings = ConnectionSettings {
            directory: options.directory.clone(),
            client,
            server_timeout: patience,
            slow: options.slow_round_trip,
        };
        let beginning = ServerConnection::start(connector, settings).await?;
        let session =
            tokio::task::spawn_blocking(move || Self::open(beginning, to, options, (cache, geometry))).await;
        session.map_err(|error| SessionError::Directory {
            dir: PathBuf::new(),
            source: io::Error::other(error),
        })?
    }

    fn open(
        beginning: FirstConnection,
        to: String,
        options: SessionOptions,
        ((cache_dir, folder), geometry): ((CacheDir, DiskStorage), Geometry),
    ) -> Result<Self, SessionError> {
        let dir = options.cache.clone();
        let opened = BlockCache::open(options.storage(folder)?, geometry);
        let (cache, recovered) = opened.map_err(|source| SessionError::Cache { dir, source })?;
        let known =
            cache.files().into_iter().filter_map(|(file, record)| Some((record.ident?, file))).collect();
        let FirstConnection { link, root, read_only, uid, gid } = beginning;
        let (shared, unshared) = match options.shared_cache.as_deref().map(SharedCache::open) {
            Some(Err(error)) => (None, Some(error)),
            opened => (opened.and_then(Result::ok), None),
        };
        let core = Arc::new_cyclic(|me| Core {
            me: me.clone(),
            server_address: to,
            connection: link,
            inodes: Mutex::new(InodeTable::new(root)),
            known_files: Mutex::new(known),
            fetcher: Fetcher::default(),
            writeback: WriteBack::default(),
            settings: RwLock::new(options.settings.clone()),
            options,
            cache_dir,
            cache,
            events: Mutex::default(),
            notifier: OnceLock::new(),
            read_only,
            server_ids: (uid, gid),
            reads: Default::default(),
            walking: AtomicBool::new(false),
            prefetch_distance: Mutex::default(),
            free_space: Mutex::default(),
            hints: Hints::default(),
            holes: HoleQueries::default(),
            zero_blocks: AtomicU64::new(0),
            read_history: Mutex::default(),
            ahead_blocks: AtomicU64::new(0),
            dedup: DedupTable::default(),
            write_comparison: WriteComparison::default(),
            shared,
            leases: Arc::default(),
            locks: Mutex::default(),
            pinning: Mutex::default(),
            clock: Mutex::default(),
        });
        for lost in &recovered.lost {
            core.event(format!(
                "{}: {} unsynced pages from byte {} were lost in the crash",
                lost.path, lost.pages, lost.offset
            ));
        }
        if let (Some(error), Some(dir)) = (unshared, &core.options.shared_cache) {
            core.event(format!("{} cannot be used as a shared cache: {error}", dir.display()));
        }
        core.restore_pins();
        core.begin_leases();
        core.recover(&recovered);
        core.walk_tree();
        core.prefetch_free_space();
        core.index_references();
        core.prefetch_read_history();
        WriteBack::start(&core);
        Ok(Self { core })
    }

    /// Changes a setting by its name.
    pub fn set(&self, name: &str, value: &str) -> Result<(), String> {
        {
            let mut settings = self.core.settings.write().unwrap_or_else(PoisonError::into_inner);
            let mut changed = settings.clone();
            changed.set(name, value)?;
            if !self.core.options.has_cache() && changed.writes_back() {
                return Err(NO_CACHE_TEXT.to_owned());
            }
            *settings = changed;
            self.core.connection.set_server_timeout(Duration::from_secs(settings.patience));
        }
        self.core.writeback.wake();
        Ok(())
    }

    /// Writes everything back, durably. Fails if the server refused something.
    pub fn flush(&self) -> Result<(), Errno> {
        self.core.flush_all(true)
    }

    /// Drops cached names, attributes and unmodified data, so that everything is requested again.
    pub fn invalidate(&self) -> Result<(), Errno> {
        self.core.invalidate()
    }

    /// Ends the session: writes everything back and closes the cache. Data that cannot be written back stays
    /// in the cache, or is put aside if there is none, with an event.
    pub fn end(&self) -> Result<(), Errno> {
        let flushed = self.core.flush_all(true);
        if flushed.is_err() && !self.core.options.has_cache() {
            let dirty = self.core.cache.dirty_files();
            dirty.into_iter().for_each(|file| self.core.conflict(file, "it could not be written back"));
        }
        if let Err(error) = self.core.save_read_history() {
            tracing::warn!(%error, "cannot store the read history for the next session");
        }
        let ended = self.core.cache.end().map_err(errno_of);
        self.core.writeback.stop();
        if self.core.connection.is_up() {
            // A server that does not receive it ends the session after a timeout.
            let _ = self.core.connection.call::<EndCall, _>(End {});
        }
        flushed.and(ended)
    }

    /// Ends the session as a crash of the process would: nothing is written back or sent.
    pub fn abandon(self) {
        self.core.writeback.stop();
        self.core.connection.abandon();
    }

    /// Directory of the cache.
    pub fn cache_dir(&self) -> &std::path::Path {
        self.core.cache_dir.path()
    }

    /// File of the key of the cache, if that is encrypted.
    pub fn cache_key(&self) -> Option<&std::path::Path> {
        self.core.options.cache_key.as_deref()
    }

    /// Number of programs that wait for the server now.
    pub fn waiting(&self) -> u64 {
        self.core.connection.waiters()
    }

    /// Whether the server holds locks of programs.
    pub fn has_locks(&self) -> bool {
        self.core.connection.renewal().is_some()
    }

    /// Current status of the session.
    pub fn status(&self) -> SessionStatus {
        self.core.status()
    }

    /// Sets the notifier of the kernel, once the session is mounted.
    pub fn mounted(&self, notifier: Notifier) {
        // A session is mounted only once.
        let _ = self.core.notifier.set(notifier);
    }

    /// Whether nothing can be written: the export is read-only, or the policy forbids all writes.
    pub fn is_read_only(&self) -> bool {
        self.core.read_only
            || self.core.settings().policy == Policy::None && self.core.settings().rules.is_empty()
    }
}

/// The error number of a cache error, for programs.
pub(super) fn errno_of(error: CacheError) -> Errno {
    tracing::warn!(error = &error as &dyn std::error::Error, "an operation of the cache failed");
    match error {
        CacheError::Full => Errno::ENOSPC,
        CacheError::Io { source, .. } => Errno::from(source),
        CacheError::NoSuchFile => Errno::ESTALE,
        CacheError::Latched { .. } | CacheError::Damaged { .. } => Errno::EIO,
    }
}

pub(super) fn errno_of_fail(fail: CallFailure) -> Errno {
    fail.errno()
}

impl Core {
    pub(super) fn inodes(&self) -> MutexGuard<'_, InodeTable> {
        lock(&self.inodes)
    }

    pub(super) fn read_history(&self) -> MutexGuard<'_, ReadHistory> {
        lock(&self.read_history)
    }

    pub(super) fn settings(&self) -> MountSettings {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn policy_of(&self, path: &RelPath) -> Policy {
        if self.read_only {
            return Policy::None;
        }
        self.settings.read().unwrap_or_else(PoisonError::into_inner).policy_of(path.as_bytes())
    }

    pub(super) fn event(&self, text: String) {
        tracing::warn!("{text}");
        let mut events = lock(&self.events);
        events.push_back(Event { at: Time::now().seconds, text });
        if events.len() > MAX_EVENTS {
            events.pop_front();
        }
    }

    /// The current time, but later than every earlier stamp: it distinguishes this client's changes from all
    /// others.
    pub(super) fn stamp(&self) -> Time {
        let mut last = lock(&self.clock);
        let mut now = Time::now();
        if now <= *last {
            now = *last;
            now.nanos += 1;
            if now.nanos >= 1_000_000_000 {
                now = Time { seconds: now.seconds + 1, nanos: 0 };
            }
        }
        *last = now;
        now
    }

    fn status(&self) -> SessionStatus {
        let (broken, calls, mean) = self.connection.counters();
        let (waits, waited) = self.connection.waits();
        let (sent, received) = self.connection.traffic();
        let (hits, all) = (self.reads[0].load(Ordering::Relaxed), self.reads[1].load(Ordering::Relaxed));
        let stats = self.cache.stats();
        SessionStatus {
            server: self.server_address.clone(),
            directory: self.options.directory.escape_ascii().to_string(),
            connected: self.connection.is_up(),
            round_trip_ms: self.connection.round_trip().map(|time| time.as_secs_f64() * 1e3),
            call_ms: mean as f64 / 1e3,
            calls,
            requests: self.connection.requests(),
            waits,
            waited_ms: waited.as_secs_f64() * 1e3,
            known: self.inodes().len() as u64,
            zero_blocks: self.zero_blocks.load(Ordering::Relaxed),
            holes: self.cache.holes(),
            ahead_blocks: self.ahead_blocks.load(Ordering::Relaxed),
            known_pages: self.dedup.table_pages.load(Ordering::Relaxed),
            found_pages: self.dedup.found_pages.load(Ordering::Relaxed),
            spared_pages: self.write_comparison.skipped_pages(),
            broken,
            sent,
            received,
            hit_ratio: (all > 0).then(|| hits as f64 / all as f64),
            capacity: stats.capacity,
            used: stats.used,
            dirty: stats.dirty,
            dirty_files: self.cache.dirty_files().len() as u64,
            queued: self.writeback.queued(),
            damaged: stats.damaged,
            pins: self.cache.pins().iter().map(RelPath::to_string).collect(),
            settings: self.settings(),
            events: lock(&self.events).iter().cloned().collect(),
        }
    }
}
