//! A session: everything of one mount but the mount.

use super::{
    dedup::DedupTable,
    fetcher::Fetcher,
    hints::Hints,
    hole_query::HoleQueries,
    id_map::IdMap,
    inodes::InodeTable,
    policy::{MountSettings, Policy},
    read_history::ReadHistory,
    server_connection::{CallFailure, Connector, FirstConnection, LinkSettings, ServerConnection},
    shared_cache::SharedCache,
    sibling_prefetch::PrefetchDistance,
    write_dedup::WriteComparison,
    writeback::WriteBack,
};
use crate::{
    cache::{BlockCache, CacheError, DiskStorage, FileId, Geometry, MemoryStorage, Storage, has_unsent},
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
use whimbrel_fuse::{Errno, Notifier};
use whimbrel_wire::{CallError, ConnectError};

/// Bytes in memory of a session that keeps nothing: what is on its way, and what is read ahead.
const PASSING: u64 = 16 << 20;
/// Said to who wants write-back of a session that keeps nothing.
const NOTHING_KEPT: &str = "without a cache nothing can be written later: write none or through";

/// Round trip of a link that is worth the time of packing.
const SLOW: Duration = Duration::from_millis(4);

/// Events kept.
const EVENTS: usize = 1000;

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The server cannot be reached.
    #[error("cannot reach {to}")]
    Connect {
        /// Where to.
        to: String,
        /// Why.
        #[source]
        source: Box<ConnectError>,
    },
    /// The server lets nobody have that directory, or not us.
    #[error("{to} opens no session")]
    Open {
        /// Where to.
        to: String,
        /// Why.
        #[source]
        source: CallError,
    },
    /// The cache cannot be used.
    #[error("cannot use the cache in {}", dir.display())]
    Cache {
        /// Its folder.
        dir: PathBuf,
        /// Why.
        #[source]
        source: CacheError,
    },
    /// The folder of the cache cannot be used.
    #[error("cannot use the folder {}", dir.display())]
    Folder {
        /// The folder.
        dir: PathBuf,
        /// Why; `WouldBlock` if another session has it.
        #[source]
        source: io::Error,
    },
    /// Write-back needs a cache.
    #[error("{NOTHING_KEPT}")]
    NothingKept,
    /// What an earlier session left there has to be written back first.
    #[error("the cache in {} has what was not written back yet: mount it once with a capacity", dir.display())]
    Owed {
        /// Its folder.
        dir: PathBuf,
    },
    /// Blocks of that size, or so few of them, cannot be.
    #[error("a cache of {capacity} bytes in blocks of {block} cannot be made")]
    Shape {
        /// Bytes of a block.
        block: u64,
        /// Bytes in all.
        capacity: u64,
    },
}

/// How a session is made.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// The directory on the server.
    pub directory: Vec<u8>,
    /// Where the cache is.
    pub cache: PathBuf,
    /// Bytes it may hold. With 0 nothing of the server's is kept on this host: what is on its way is in
    /// memory, the kernel has its page cache, and nothing can be written back later.
    pub capacity: u64,
    /// Bytes of a block.
    pub block: u64,
    /// What can be changed later.
    pub settings: MountSettings,
    /// Who on this side is seen as owner of what who owns there.
    pub owners: IdMap,
    /// Files on this side whose content may be on the server as well: what is found in them is not sent over
    /// a slow link.
    pub known: Vec<PathBuf>,
    /// A directory in which the users of this host share what they may read.
    pub shared: Option<PathBuf>,
    /// A link with this round trip is slow: content is packed for it, and what the other side has is not
    /// sent. With zero, any link is.
    pub slow: Duration,
}

impl SessionOptions {
    /// The usual ones: 8 GiB in blocks of 64 KiB, this process's user as owner.
    pub fn new(directory: impl Into<Vec<u8>>, cache: PathBuf) -> Self {
        let settings = MountSettings::default();
        Self {
            directory: directory.into(),
            cache,
            capacity: 8 << 30,
            block: 64 << 10,
            settings,
            owners: IdMap::default(),
            known: Vec::new(),
            shared: None,
            slow: SLOW,
        }
    }

    /// Whether it keeps what it reads and is given.
    pub(super) fn has_cache(&self) -> bool {
        self.capacity > 0
    }

    /// Its shape, if it can be one.
    fn geometry(&self) -> Result<Geometry, SessionError> {
        if !self.has_cache() && self.settings.writes_back() {
            return Err(SessionError::NothingKept);
        }
        let capacity = if self.has_cache() { self.capacity } else { PASSING };
        let shape = || SessionError::Shape { block: self.block, capacity: self.capacity };
        Geometry::new(self.block, capacity).ok_or_else(shape)
    }

    /// Where the cache lies.
    fn medium(&self, folder: DiskStorage) -> Result<Box<dyn Storage>, SessionError> {
        if self.has_cache() {
            return Ok(Box::new(folder));
        }
        let dir = || self.cache.clone();
        match has_unsent(&folder).map_err(|source| SessionError::Cache { dir: dir(), source })? {
            true => Err(SessionError::Owed { dir: dir() }),
            false => Ok(Box::new(MemoryStorage::instead_of(folder))),
        }
    }
}

/// Something worth knowing that no call could say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds since 1970.
    pub at: i64,
    /// What happened.
    pub text: String,
}

/// What `whimbrel session show` shows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Where the server is.
    pub server: String,
    /// The directory there.
    pub directory: String,
    /// Whether it answers.
    pub connected: bool,
    /// Round trip in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// Mean time of a call in milliseconds.
    pub call_ms: f64,
    /// Calls so far.
    pub calls: u64,
    /// Of each kind.
    #[serde(default)]
    pub requests: BTreeMap<String, u64>,
    /// How often a program waited for the server.
    #[serde(default)]
    pub waits: u64,
    /// For how many milliseconds in all.
    #[serde(default)]
    pub waited_ms: f64,
    /// Files and directories of which names and attributes are known here.
    #[serde(default)]
    pub known: u64,
    /// Blocks that notes beside files tell to be zeros, and that were not asked for.
    #[serde(default)]
    pub zero_blocks: u64,
    /// Bytes in holes of the server's files, which are zeros and never asked for.
    #[serde(default)]
    pub holes: u64,
    /// Blocks brought ahead because an earlier session had read them.
    #[serde(default)]
    pub ahead_blocks: u64,
    /// Pages on this side that are known by their content.
    #[serde(default)]
    pub known_pages: u64,
    /// Pages that were here already under another name, and were not sent.
    #[serde(default)]
    pub found_pages: u64,
    /// Pages that the server had already where they were to be written back, and that were not sent.
    #[serde(default)]
    pub spared_pages: u64,
    /// How often the connection broke.
    pub broken: u64,
    /// Bytes sent on the connection there is.
    pub sent: u64,
    /// Bytes received on it.
    pub received: u64,
    /// Reads answered from the cache, of all.
    pub hit_ratio: Option<f64>,
    /// Bytes the cache may hold.
    pub capacity: u64,
    /// Bytes of frames in use.
    pub used: u64,
    /// Bytes the server lacks.
    pub dirty: u64,
    /// Files the server lacks something of.
    pub dirty_files: u64,
    /// Changes of names the server has yet to make.
    pub queued: u64,
    /// Damaged pages that were fetched again.
    pub damaged: u64,
    /// Settings.
    pub settings: MountSettings,
    /// The latest events.
    pub events: Vec<Event>,
}

/// A session. Clones are one session.
#[derive(Clone)]
pub struct Session {
    pub(super) core: Arc<Core>,
}

pub(super) struct Core {
    pub(super) me: Weak<Core>,
    pub(super) to: String,
    pub(super) options: SessionOptions,
    pub(super) link: Arc<ServerConnection>,
    pub(super) cache: BlockCache,
    pub(super) nodes: Mutex<InodeTable>,
    pub(super) known_files: Mutex<HashMap<Ident, FileId>>,
    pub(super) fetcher: Fetcher,
    pub(super) writeback: WriteBack,
    pub(super) settings: RwLock<MountSettings>,
    pub(super) events: Mutex<VecDeque<Event>>,
    pub(super) notifier: OnceLock<Notifier>,
    pub(super) read_only: bool,
    pub(super) server_ids: (u32, u32),
    pub(super) reads: [AtomicU64; 2],
    /// Names are learnt ahead at this moment.
    pub(super) walking: AtomicBool,
    pub(super) ahead: Mutex<PrefetchDistance>,
    pub(super) room: Mutex<Option<(Instant, FilesystemSpace)>>,
    pub(super) notes: Hints,
    pub(super) holes: HoleQueries,
    /// Blocks that were known to be zeros and not asked for.
    pub(super) zero_blocks: AtomicU64,
    reading: Mutex<ReadHistory>,
    /// Blocks that came because an earlier session had read them.
    pub(super) ahead_blocks: AtomicU64,
    pub(super) twins: DedupTable,
    pub(super) compared: WriteComparison,
    pub(super) shared: Option<SharedCache>,
    clock: Mutex<Time>,
}

impl Session {
    /// Connects, opens the cache, and writes back what an earlier session left in it. Must be called inside a
    /// runtime, which then carries the session's connections.
    pub async fn start(connector: Arc<dyn Connector>, options: SessionOptions) -> Result<Self, SessionError> {
        let to = connector.destination();
        let geometry = options.geometry()?;
        // First, so that a cache that is in use costs the server nothing.
        let dir = options.cache.clone();
        let opened = DiskStorage::open(&dir).and_then(|folder| Ok((folder.client()?, folder)));
        let (client, folder) = opened.map_err(|source| SessionError::Folder { dir, source })?;
        let patience = Duration::from_secs(options.settings.patience);
        let settings =
            LinkSettings { directory: options.directory.clone(), client, patience, slow: options.slow };
        let beginning = ServerConnection::start(connector, settings).await?;
        let session =
            tokio::task::spawn_blocking(move || Self::on(beginning, to, options, (folder, geometry))).await;
        session
            .map_err(|error| SessionError::Folder { dir: PathBuf::new(), source: io::Error::other(error) })?
    }

    fn on(
        beginning: FirstConnection,
        to: String,
        options: SessionOptions,
        (folder, geometry): (DiskStorage, Geometry),
    ) -> Result<Self, SessionError> {
        let dir = options.cache.clone();
        let opened = BlockCache::open(options.medium(folder)?, geometry);
        let (cache, recovered) = opened.map_err(|source| SessionError::Cache { dir, source })?;
        let known =
            cache.files().into_iter().filter_map(|(file, record)| Some((record.ident?, file))).collect();
        let FirstConnection { link, root, read_only, uid, gid } = beginning;
        let (shared, unshared) = match options.shared.as_deref().map(SharedCache::open) {
            Some(Err(error)) => (None, Some(error)),
            opened => (opened.and_then(Result::ok), None),
        };
        let core = Arc::new_cyclic(|me| Core {
            me: me.clone(),
            to,
            link,
            nodes: Mutex::new(InodeTable::new(root)),
            known_files: Mutex::new(known),
            fetcher: Fetcher::default(),
            writeback: WriteBack::default(),
            settings: RwLock::new(options.settings.clone()),
            options,
            cache,
            events: Mutex::default(),
            notifier: OnceLock::new(),
            read_only,
            server_ids: (uid, gid),
            reads: Default::default(),
            walking: AtomicBool::new(false),
            ahead: Mutex::default(),
            room: Mutex::default(),
            notes: Hints::default(),
            holes: HoleQueries::default(),
            zero_blocks: AtomicU64::new(0),
            reading: Mutex::default(),
            ahead_blocks: AtomicU64::new(0),
            twins: DedupTable::default(),
            compared: WriteComparison::default(),
            shared,
            clock: Mutex::default(),
        });
        for lost in &recovered.lost {
            core.event(format!(
                "{}: {} pages from byte {} that were written and not synced did not survive the crash",
                lost.path, lost.pages, lost.offset
            ));
        }
        if let (Some(error), Some(dir)) = (unshared, &core.options.shared) {
            core.event(format!("{} is not used to share what is read: {error}", dir.display()));
        }
        core.recover(&recovered);
        core.walk_tree();
        core.room_ahead();
        core.learn_twins();
        core.record_reads();
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
                return Err(NOTHING_KEPT.to_owned());
            }
            *settings = changed;
            self.core.link.set_patience(Duration::from_secs(settings.patience));
        }
        self.core.writeback.wake();
        Ok(())
    }

    /// Writes everything back, durably. Says what the server would not take.
    pub fn flush(&self) -> Result<(), Errno> {
        self.core.flush_all(true)
    }

    /// Forgets what is believed and clean, so that the server is asked again for everything.
    pub fn invalidate(&self) -> Result<(), Errno> {
        self.core.invalidate()
    }

    /// Ends it: writes everything back and closes the cache in order. What cannot be written back stays in
    /// the cache, or is put aside where there is none, and is said.
    pub fn end(&self) -> Result<(), Errno> {
        let flushed = self.core.flush_all(true);
        if flushed.is_err() && !self.core.options.has_cache() {
            let dirty = self.core.cache.dirty_files();
            dirty.into_iter().for_each(|file| self.core.conflict(file, "it could not be written back"));
        }
        if let Err(error) = self.core.keep_reads() {
            tracing::warn!(%error, "the next session does not know what this one read");
        }
        let ended = self.core.cache.end().map_err(errno_of);
        self.core.writeback.stop();
        if self.core.link.is_up() {
            // A server that does not hear it ends the session by itself.
            let _ = self.core.link.call::<EndCall, _>(End {});
        }
        flushed.and(ended)
    }

    /// Ends it as the death of the process would: nothing is written back, nothing is said to anybody.
    pub fn abandon(self) {
        self.core.writeback.stop();
        self.core.link.abandon();
    }

    /// What is to be known of it.
    pub fn status(&self) -> SessionStatus {
        self.core.status()
    }

    /// The kernel's ear, once it is mounted.
    pub fn mounted(&self, notifier: Notifier) {
        // A second mount of one session does not happen.
        let _ = self.core.notifier.set(notifier);
    }

    /// Whether the server exports for reading only, or the session may write nothing.
    pub fn is_read_only(&self) -> bool {
        self.core.read_only
            || self.core.settings().policy == Policy::None && self.core.settings().rules.is_empty()
    }
}

/// What a program gets for an error of the cache.
pub(super) fn errno_of(error: CacheError) -> Errno {
    tracing::warn!(error = &error as &dyn std::error::Error, "the cache");
    match error {
        CacheError::Full => Errno::ENOSPC,
        CacheError::Io { source, .. } => Errno::from(source),
        CacheError::Unknown => Errno::ESTALE,
        CacheError::Latched { .. } | CacheError::Damaged { .. } => Errno::EIO,
    }
}

pub(super) fn errno_of_fail(fail: CallFailure) -> Errno {
    fail.errno()
}

impl Core {
    pub(super) fn nodes(&self) -> MutexGuard<'_, InodeTable> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reading(&self) -> MutexGuard<'_, ReadHistory> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// How long what the server said is believed. While it has yet to make changes of ours, what it would say
    /// is not the truth here, and what is known is believed on.
    pub(super) fn ttl(&self) -> Duration {
        if self.writeback.queued() > 0 || !self.link.is_up() {
            return Duration::MAX;
        }
        self.settings.read().unwrap_or_else(PoisonError::into_inner).ttl()
    }

    pub(super) fn event(&self, text: String) {
        tracing::warn!("{text}");
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push_back(Event { at: Time::now().seconds, text });
        if events.len() > EVENTS {
            events.pop_front();
        }
    }

    /// This moment, later than every one before: by it a change of ours is told from all others.
    pub(super) fn stamp(&self) -> Time {
        let mut last = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
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
        let (broken, calls, mean) = self.link.counters();
        let (waits, waited) = self.link.waits();
        let (sent, received) = self.link.traffic();
        let (hits, all) = (self.reads[0].load(Ordering::Relaxed), self.reads[1].load(Ordering::Relaxed));
        let stats = self.cache.stats();
        SessionStatus {
            server: self.to.clone(),
            directory: self.options.directory.escape_ascii().to_string(),
            connected: self.link.is_up(),
            round_trip_ms: self.link.round_trip().map(|time| time.as_secs_f64() * 1e3),
            call_ms: mean as f64 / 1e3,
            calls,
            requests: self.link.requests(),
            waits,
            waited_ms: waited.as_secs_f64() * 1e3,
            known: self.nodes().len() as u64,
            zero_blocks: self.zero_blocks.load(Ordering::Relaxed),
            holes: self.cache.holes(),
            ahead_blocks: self.ahead_blocks.load(Ordering::Relaxed),
            known_pages: self.twins.known.load(Ordering::Relaxed),
            found_pages: self.twins.found.load(Ordering::Relaxed),
            spared_pages: self.compared.spared(),
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
            settings: self.settings(),
            events: self.events.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect(),
        }
    }
}
