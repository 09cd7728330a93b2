//! The block cache: index, journal and frames under one lock.
//!
//! Readers hold the lock shared, so a frame is not reused while they read from it. A dirty write is in the
//! journal before it is in its frame. Both are in the page cache when the write returns, so a crash of this
//! process loses nothing. Both are on the disk when a later [`BlockCache::sync`] returns, so a power failure
//! loses nothing then.

use super::{
    block_index::{Block, BlockIndex, Geometry, Key, PageMask, ZERO},
    holes::Holes,
    journal::Journal,
    journal_record::{FileId, FileRecord, JournalRecord},
    pinned_files::is_pinned,
    recovery::{Replayed, replay},
    storage::{Storage, StoragePart},
};
use crate::proto::{Op, PAGE, RelPath, is_zero};
use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    io,
    ops::Range,
    sync::{
        Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use whimbrel_core::lock;

/// A journal is restarted when it is longer than this and four times as long as its live records.
const MIN_JOURNAL: u64 = 16 << 20;

/// Errors of the block cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The disk of the cache failed or is full.
    #[error("cannot {action} the cache")]
    Io {
        /// `read`, `write`, `sync` or `open`.
        action: &'static str,
        /// Cause reported by the system.
        source: io::Error,
    },
    /// Earlier writes may not be durable, so no more are accepted (the latch).
    #[error("the cache accepts no more writes after a failed {action}")]
    Latched {
        /// The action that failed.
        action: &'static str,
    },
    /// Everything in the cache is unsent.
    #[error("the cache is full of data that was not written back yet")]
    Full,
    /// A page that only this cache has is damaged.
    #[error("data at byte {offset} that was not written back yet is damaged")]
    Damaged {
        /// Byte offset in the file.
        offset: u64,
    },
    /// The cache has no such file.
    #[error("the cache has no such file")]
    NoSuchFile,
}

/// Result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheRead {
    /// Every page was here.
    Complete,
    /// Blocks that are not here, or not completely.
    Missing(Vec<u64>),
}

/// A block with pages that the server does not have yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyBlock {
    /// Number of the block in the file.
    pub block: u64,
    /// Generation to return when the block has been sent.
    pub generation: u32,
    /// Mask of the dirty pages.
    pub pages: u64,
    /// Runs of pages with their byte offset in the file.
    pub runs: Vec<(u64, Vec<u8>)>,
    /// Size of the file when the block was taken: no run extends beyond it.
    pub size: u64,
}

/// An unsynced write that a power failure destroyed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostWrite {
    /// Path of the file.
    pub path: RelPath,
    /// Byte offset of the block.
    pub offset: u64,
    /// Number of pages lost.
    pub pages: u32,
}

/// Findings when a cache was opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recovered {
    /// Files with changes that the server does not have.
    pub dirty: Vec<FileId>,
    /// Unsynced writes that are lost.
    pub lost: Vec<LostWrite>,
    /// Whether the previous session did not end in order.
    pub unclean: bool,
}

/// Counters of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes of frames in use.
    pub used: u64,
    /// Bytes of pages that are here.
    pub valid: u64,
    /// Bytes that the server does not have yet.
    pub dirty: u64,
    /// Damaged pages that were fetched again.
    pub damaged: u64,
}

pub(super) struct FileGeneration {
    pub(super) record: FileRecord,
    /// Counts events after which content requested earlier may not be stored any more.
    pub(super) epoch: u64,
    /// Counts events after which content read earlier is outdated.
    pub(super) content: u64,
    /// Holes of the file: a page in one that is not here is zeros.
    pub(super) holes: Holes,
    /// Counts evictions of blocks that were written here.
    pub(super) evictions: u64,
    /// Whether a pin covers it.
    pub(super) pinned: bool,
}

/// State of a file's content, to see whether an answer about the whole file is older than what is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentMark {
    epoch: u64,
    evictions: u64,
}

impl FileGeneration {
    pub(super) fn mark(&self) -> ContentMark {
        ContentMark { epoch: self.epoch, evictions: self.evictions }
    }

    pub(super) fn new(record: FileRecord, pins: &[RelPath]) -> Self {
        let pinned = is_pinned(pins, &record);
        Self { record, epoch: 0, content: 0, holes: Holes::default(), evictions: 0, pinned }
    }
}

pub(super) struct State {
    pub(super) index: BlockIndex,
    pub(super) journal: Journal,
    pub(super) files: HashMap<FileId, FileGeneration>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) pins: Vec<RelPath>,
    pub(super) next_file: FileId,
    pub(super) next_op: u64,
    /// Changes below this number may have been sent.
    pub(super) sent: u64,
    pub(super) latched: Option<&'static str>,
}

/// The cache of a session.
pub struct BlockCache {
    pub(super) storage: Box<dyn Storage>,
    pub(super) geometry: Geometry,
    state: RwLock<State>,
    pub(super) used: Vec<AtomicBool>,
    damaged: AtomicU64,
    /// Blocks being fetched, each with the number of requests.
    pub(super) fetching: Mutex<HashMap<Key, u32>>,
    pub(super) barrier: Mutex<()>,
    pub(super) barriers_started: AtomicU64,
    pub(super) barriers_done: AtomicU64,
}

/// The checksum of a page; a page of zeros has the one that is never looked up.
pub(super) fn page_sum(page: &[u8]) -> u32 {
    if is_zero(page) {
        return ZERO;
    }
    match xxhash_rust::xxh3::xxh3_64(page) as u32 {
        ZERO => 1,
        sum => sum,
    }
}

pub(super) fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> CacheError {
    move |source| CacheError::Io { action, source }
}

pub(super) fn page_numbers(pages: PageMask) -> impl Iterator<Item = u32> {
    (0..64).filter(move |page| pages >> page & 1 == 1)
}

pub(super) fn page_runs(mut pages: PageMask) -> impl Iterator<Item = Range<u32>> {
    std::iter::from_fn(move || {
        let first = pages.trailing_zeros();
        let end = first + pages.checked_shr(first)?.trailing_ones();
        pages &= u64::MAX.checked_shl(end).unwrap_or(0);
        Some(first..end)
    })
}

impl BlockCache {
    /// Opens the cache on a storage. The cache is new if there is none, or if the existing one has another
    /// geometry and nothing dirty.
    pub fn open(medium: Box<dyn Storage>, geometry: Geometry) -> Result<(Self, Recovered), CacheError> {
        let read = Journal::read(&*medium).map_err(io_error("open"))?;
        let (old, stored, records) = match read {
            Some((journal, stored, records)) => (Some(journal), stored, records),
            None => (None, geometry, Vec::new()),
        };
        let mut replayed = replay(&*medium, stored, records).map_err(io_error("open"))?;
        let owed = replayed.has_unsent();
        // Unsent data keeps its geometry.
        let geometry = if owed { stored } else { geometry };
        if geometry != stored {
            replayed.index = BlockIndex::new(geometry);
        }
        let Replayed { index, files, ops, next_file, next_op, sent, lost, ended } = replayed;
        let mut dirty: Vec<FileId> = files
            .iter()
            .filter(|(_, record)| record.dirty && !record.removed)
            .map(|(file, _)| *file)
            .collect();
        dirty.sort_unstable();
        // What survived a process crash is not necessarily on the disk.
        medium.sync(StoragePart::Frames).map_err(io_error("open"))?;
        let recovered = Recovered { dirty, lost, unclean: old.is_some() && !ended };
        let files: HashMap<FileId, FileGeneration> = files
            .into_iter()
            .filter(|(_, record)| !record.removed)
            .map(|(file, record)| (file, FileGeneration::new(record, &[])))
            .collect();
        let journal =
            Journal::start(&*medium, old.as_ref(), geometry, snapshot(&index, &files, (sent, &ops)));
        let journal = journal.map_err(io_error("open"))?;
        let pins = Vec::new();
        let state = State { index, journal, files, ops, pins, next_file, next_op, sent, latched: None };
        let used = (0..geometry.frames).map(|_| AtomicBool::new(false)).collect();
        let cache = Self {
            storage: medium,
            geometry,
            state: RwLock::new(state),
            used,
            damaged: AtomicU64::new(0),
            fetching: Mutex::default(),
            barrier: Mutex::new(()),
            barriers_started: AtomicU64::new(0),
            barriers_done: AtomicU64::new(0),
        };
        Ok((cache, recovered))
    }

    pub(super) fn read_state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write_state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.geometry.block()
    }

    /// Current counters of the cache.
    pub fn stats(&self) -> CacheStats {
        let state = self.read_state();
        let page = PAGE as u64;
        CacheStats {
            capacity: u64::from(self.geometry.frames) * self.geometry.block(),
            used: u64::from(state.index.used_frames()) * self.geometry.block(),
            valid: state.index.valid_pages() * page,
            dirty: state.index.dirty_pages() * page,
            damaged: self.damaged.load(Ordering::Relaxed),
        }
    }

    /// Bytes known to be in holes. Iterates over all of them.
    pub fn holes(&self) -> u64 {
        self.read_state().files.values().map(|held| held.holes.pages()).sum::<u64>() * PAGE as u64
    }

    /// Fills `out` from `offset` if every page is here. Pages that are not here and lie beyond `zero_from` or
    /// in a hole are zeros.
    pub fn read(&self, file: FileId, offset: u64, out: &mut [u8]) -> Result<CacheRead, CacheError> {
        let mut bad = Vec::new();
        let missing = {
            let state = self.read_state();
            let held = state.files.get(&file).ok_or(CacheError::NoSuchFile)?;
            let mut missing = Vec::new();
            let page = PAGE as u64;
            let mut at = offset;
            let end = offset + out.len() as u64;
            while at < end {
                let (number, within) = (at / page, (at % page) as usize);
                let len = (PAGE - within).min((end - at) as usize);
                let (block, in_block) =
                    (number / u64::from(self.geometry.pages), number % u64::from(self.geometry.pages));
                let key = Key { file, block };
                let whole = &mut out[(at - offset) as usize..];
                if within == 0
                    && let Some(read) = self.read_run(&state, key, in_block as u32, whole)
                {
                    at += read as u64;
                    continue;
                }
                let place = &mut out[(at - offset) as usize..][..len];
                if !self.read_page(&state, key, in_block as u32, within, place, &mut bad)? {
                    if number * page >= held.record.zero_from || held.holes.contains(number) {
                        place.fill(0);
                    } else if missing.last() != Some(&block) {
                        missing.push(block);
                    }
                }
                at += len as u64;
            }
            missing
        };
        if !bad.is_empty() {
            self.drop_damaged(&bad);
        }
        Ok(if missing.is_empty() { CacheRead::Complete } else { CacheRead::Missing(missing) })
    }

    fn drop_damaged(&self, bad: &[(Key, u32)]) {
        let mut state = self.write_state();
        for (key, page) in bad {
            let dirty = state.index.get(*key).is_some_and(|block| block.dirty >> page & 1 == 1);
            if !dirty {
                state.index.remove_pages(*key, 1 << page);
                self.damaged.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(block = key.block, page, "fetching a damaged page of the cache again");
            }
        }
    }

    /// Whether all pages of a block below `size` are here or known to be zeros.
    pub(crate) fn has_block(&self, file: FileId, block: u64, size: u64) -> bool {
        self.missing_pages(file, block, size) == Some(0)
    }

    /// Pages of a block below `size` that are neither here nor known to be zeros, one bit each.
    pub(crate) fn missing_pages(&self, file: FileId, block: u64, size: u64) -> Option<PageMask> {
        let state = self.read_state();
        let held = state.files.get(&file)?;
        let (start, page) = (block * self.geometry.block(), PAGE as u64);
        let end = size.min(held.record.zero_from).min(start + self.geometry.block());
        let pages = end.saturating_sub(start).div_ceil(page) as u32;
        let needed = if pages == 0 { 0 } else { u64::MAX >> (64 - pages) };
        let valid = state.index.get(Key { file, block }).map_or(0, |block| block.valid);
        let unknown = |number: &u32| !held.holes.contains(start / page + u64::from(*number));
        Some(page_numbers(needed & !valid).filter(unknown).fold(0, |pages, number| pages | 1 << number))
    }

    /// The epoch that a fill must present: content requested in an earlier one is void.
    pub fn epoch(&self, file: FileId) -> Option<u64> {
        self.read_state().files.get(&file).map(|held| held.epoch)
    }

    /// Counter that distinguishes contents of a file read at different times.
    pub fn content_epoch(&self, file: FileId) -> Option<u64> {
        self.read_state().files.get(&file).map(|held| held.content)
    }

    /// Marks blocks as being fetched, so that they stay until [`BlockCache::unmark_fetching`]. A block that
    /// was written here, sent and evicted meanwhile could otherwise come back with its old content.
    pub fn mark_fetching(&self, file: FileId, blocks: &[u64]) {
        let mut flights = lock(&self.fetching);
        for block in blocks {
            *flights.entry(Key { file, block: *block }).or_default() += 1;
        }
    }

    /// Unmarks blocks whose fetch was stored or failed.
    pub fn unmark_fetching(&self, file: FileId, blocks: &[u64]) {
        let mut flights = lock(&self.fetching);
        for block in blocks {
            if let Entry::Occupied(mut flight) = flights.entry(Key { file, block: *block }) {
                *flight.get_mut() -= 1;
                if *flight.get() == 0 {
                    flight.remove();
                }
            }
        }
    }

    /// State of a file's content at the time of a question about the whole file.
    pub fn content_mark(&self, file: FileId) -> Option<ContentMark> {
        self.read_state().files.get(&file).map(FileGeneration::mark)
    }

    /// Stores content from the server at `offset`, a page boundary; pages that are here already stay. Content
    /// requested in another epoch is ignored.
    pub fn fill(&self, file: FileId, epoch: u64, offset: u64, content: &[u8]) -> Result<bool, CacheError> {
        let mut state = self.write_state();
        self.restart_journal_if_grown(&mut state)?;
        let Some(held) = state.files.get(&file).filter(|held| held.epoch == epoch) else { return Ok(false) };
        let keep = held.record.zero_from.saturating_sub(offset).min(content.len() as u64) as usize;
        let mut records = Vec::new();
        let block_bytes = self.geometry.block();
        let mut at = 0;
        while at < keep {
            let here = offset + at as u64;
            let len = (block_bytes - here % block_bytes).min((keep - at) as u64) as usize;
            let key = Key { file, block: here / block_bytes };
            let first = (here % block_bytes / PAGE as u64) as u32;
            // A full cache serves the content without storing it.
            match self.store_block(&mut state, key, first, &content[at..at + len], false) {
                Ok(record) => records.extend(record),
                Err(CacheError::Full) => break,
                Err(error) => return Err(error),
            }
            at += len;
        }
        self.log(&mut state, &records)?;
        Ok(true)
    }

    /// Appends records. If that fails, the whole state goes to the other journal; if that fails as well, the
    /// cache is latched.
    pub(super) fn log(&self, state: &mut State, records: &[JournalRecord]) -> Result<(), CacheError> {
        if records.is_empty() {
            return Ok(());
        }
        if let Some(action) = state.latched {
            return Err(CacheError::Latched { action });
        }
        if let Err(source) = state.journal.append(&*self.storage, records) {
            return self.log_elsewhere(state, records, source);
        }
        Ok(())
    }

    /// Restarts the journal if it has grown. Must not be called between the steps of a change: a new journal
    /// promises every record in it.
    pub(super) fn restart_journal_if_grown(&self, state: &mut State) -> Result<(), CacheError> {
        let live =
            (u64::from(state.index.used_frames()) + state.files.len() as u64 + state.ops.len() as u64) * 128;
        if state.journal.len() > MIN_JOURNAL.max(4 * live) { self.restart_journal(state) } else { Ok(()) }
    }
}

pub(super) fn record_of(key: Key, block: &Block) -> JournalRecord {
    JournalRecord::Block {
        file: key.file,
        block: key.block,
        frame: block.frame,
        valid: block.valid,
        dirty: block.dirty,
        sums: page_numbers(block.valid).map(|page| block.sums[page as usize]).collect(),
    }
}

/// Records of the complete state.
pub(super) fn snapshot<'a>(
    index: &'a BlockIndex,
    files: &'a HashMap<FileId, FileGeneration>,
    (sent, ops): (u64, &'a BTreeMap<u64, Op>),
) -> impl Iterator<Item = JournalRecord> + 'a {
    let files =
        files.iter().map(|(file, held)| JournalRecord::File { file: *file, record: held.record.clone() });
    let ops = ops.iter().map(|(number, op)| JournalRecord::Op { number: *number, op: op.clone() });
    // Changes of names come first: a replay applies them to the files known so far (`recovery.rs`), and the
    // files here have already been renamed.
    std::iter::once(JournalRecord::Sent { below: sent })
        .chain(ops)
        .chain(files)
        .chain(index.all().map(|(key, block)| record_of(key, block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_pages_of_a_set() {
        for pages in [0, 1, 0b0110_1110, 1 << 63, u64::MAX, u64::MAX - 1, 0xff00_0000_0000_0001] {
            assert!(page_runs(pages).flatten().eq(page_numbers(pages)), "{pages:#x}");
        }
        assert_eq!((page_runs(u64::MAX).count(), page_runs(0b101).count()), (1, 2));
    }
}
