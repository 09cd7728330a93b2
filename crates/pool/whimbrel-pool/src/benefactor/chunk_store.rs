//! The chunk store of a benefactor: append-only segment files and an index in memory.
//!
//! A put is in the page cache when it returns and durable when [`ChunkStore::flush`] returns; clients flush
//! chunks before they commit. A flush waits for one that is under way, because that one may be syncing the
//! chunks in question. A full segment is synced before the next one starts, so only the newest can be torn by
//! a crash; opening the store checks it completely.
//!
//! The capsule store is not used because its garbage collection follows refs; here the manager decides on
//! each chunk. After a failed write or sync the store is latched until it is opened again, and offers no
//! room. A full disk is no such failure: the write is undone and refused, and chunks can still be read,
//! deleted and compacted.
//!
//! With an object tier, full segments are in an object store; see `remote_segments`.

use super::{
    error::{ChunkError, Result},
    readahead::Readahead,
    remote_segments::{self, ObjectTier, REMOTE_SEGMENT},
    segment::{self, RECORD, SegmentRecord, open_frame},
    segment_heads,
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    num::NonZeroU64,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::PackFrame;

/// Length at which a segment is full.
pub(crate) const SEGMENT: u64 = 64 << 20;
/// Bytes of small records that are gathered into one write.
const GATHERED: usize = 64 << 10;
const LOCK: &str = "lock";

#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkSlot {
    pub(super) segment: u32,
    pub(super) offset: u64,
    pub(super) length: u32,
    pub(super) touched: Instant,
}

#[derive(Debug)]
pub(super) struct Segment {
    /// None if the segment is in the object store.
    pub(super) file: Option<Arc<File>>,
    pub(super) length: u64,
    pub(super) live: u64,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Sorted, so that a range of digests is listed without reading all.
    pub(super) index: BTreeMap<Digest, ChunkSlot>,
    pub(super) segments: BTreeMap<u32, Segment>,
    unsynced: bool,
}

impl State {
    /// Fills the index at once, which is much faster than chunk by chunk. Of a chunk with several records,
    /// the last counts.
    fn fill(&mut self, found: Vec<(Digest, ChunkSlot)>) {
        self.index = found.into_iter().collect();
        for slot in self.index.values() {
            if let Some(segment) = self.segments.get_mut(&slot.segment) {
                segment.live += RECORD as u64 + u64::from(slot.length);
            }
        }
    }
}

/// The chunk store in a folder.
#[derive(Debug)]
pub struct ChunkStore {
    pub(super) dir: PathBuf,
    capacity: u64,
    keep_free: u64,
    pub(super) object_tier: Option<ObjectTier>,
    pub(super) readahead: Readahead,
    /// Locked while full segments are uploaded.
    pub(super) offloading: Mutex<()>,
    state: Mutex<State>,
    /// Locked while the newest segment grows.
    pub(super) writing: Mutex<()>,
    /// Locked while the newest segment is synced.
    syncing: Mutex<()>,
    latched: AtomicBool,
    _lock: File,
}

/// Usage of a chunk store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of all segments.
    pub used: u64,
    /// Bytes that can still be stored.
    pub free: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Bytes to free, because the disk has less free space than `keep_free` or the capacity is exceeded.
    pub bytes_to_free: u64,
}

impl ChunkStore {
    /// Opens or creates the store in `dir`, which uses at most `capacity` bytes and leaves `keep_free` free.
    pub fn open(dir: &Path, capacity: u64, keep_free: u64) -> Result<Self> {
        Self::open_with_tier(dir, capacity, keep_free, None)
    }

    /// Opens or creates the store with an object tier. Blocks while it lists the object store.
    pub fn open_with_tier(
        dir: &Path,
        capacity: u64,
        keep_free: u64,
        behind: Option<ObjectTier>,
    ) -> Result<Self> {
        let io = |action| move |source| ChunkError::Io { action, path: dir.to_owned(), source };
        create_dir(dir).map_err(io("create"))?;
        let lock = File::options().create(true).append(true).open(dir.join(LOCK)).map_err(io("lock"))?;
        lock.try_lock().map_err(|_| ChunkError::InUse { path: dir.to_owned() })?;
        let mut numbers = Vec::new();
        for entry in fs::read_dir(dir).map_err(io("read"))? {
            let name = entry.map_err(io("read"))?.file_name();
            numbers.extend(name.to_str().and_then(number_of));
        }
        numbers.sort_unstable();
        // A killed process may have left unsynced data in the page cache.
        let mut state = State { unsynced: !numbers.is_empty(), ..State::default() };
        let mut found = Vec::new();
        for number in &numbers {
            found.extend(load(dir, *number, Some(number) == numbers.last(), &mut state)?);
        }
        state.fill(found);
        match &behind {
            Some(behind) => remote_segments::load(dir, behind, &mut state)?,
            None if remote_segments::heads_in(dir).map_err(io("read"))?.is_empty() => {}
            None => return Err(ChunkError::TierMissing { path: dir.to_owned() }),
        }
        let (state, writing, syncing) = (Mutex::new(state), Mutex::default(), Mutex::default());
        let (dir, latched, offloading) = (dir.to_owned(), AtomicBool::new(false), Mutex::default());
        let (ahead, _lock) = (Readahead::default(), lock);
        Ok(Self {
            dir,
            capacity,
            keep_free,
            object_tier: behind,
            readahead: ahead,
            offloading,
            state,
            writing,
            syncing,
            latched,
            _lock,
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn failed(&self, action: &'static str, number: u32) -> impl FnOnce(io::Error) -> ChunkError {
        self.latched.store(true, Ordering::Relaxed);
        let path = self.dir.join(name_of(number));
        move |source| ChunkError::Io { action, path, source }
    }

    /// Bytes and chunks of the store.
    pub fn usage(&self) -> Usage {
        let state = self.state();
        let used = state.segments.values().map(|segment| segment.length).sum();
        let chunks = state.index.len() as u64;
        drop(state);
        let on_disk = rustix::fs::statvfs(&self.dir).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        let kept = self.keep_free.max(self.full_segment() / 2);
        let free = match self.latched.load(Ordering::Relaxed) {
            true => 0,
            false => self.capacity.saturating_sub(used).min(on_disk.saturating_sub(kept)),
        };
        let owed = self.keep_free.saturating_sub(on_disk).max(used.saturating_sub(self.capacity)).min(used);
        Usage { used, free, chunks, bytes_to_free: owed }
    }

    /// Whether each chunk is in the store; those that are count as just put.
    pub fn touch(&self, digests: &[Digest]) -> Vec<bool> {
        let now = Instant::now();
        let mut state = self.state();
        let touch = |digest| state.index.get_mut(digest).map(|slot| slot.touched = now).is_some();
        digests.iter().map(touch).collect()
    }

    /// Stores chunks whose frames the caller has checked. Waits for uploads if they are too far behind.
    pub fn put(&self, chunks: &[(Digest, Bytes)]) -> Result<()> {
        if self.latched.load(Ordering::Relaxed) {
            return Err(ChunkError::Latched);
        }
        if self.must_offload() {
            self.offload()?;
        }
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let digests: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
        let here = self.touch(&digests);
        let mut new: Vec<&(Digest, Bytes)> =
            chunks.iter().zip(here).filter(|(_, here)| !here).map(|(c, _)| c).collect();
        new.sort_by_key(|(digest, _)| *digest);
        new.dedup_by_key(|(digest, _)| *digest);
        let needed: u64 = new.iter().map(|(_, frame)| (RECORD + frame.len()) as u64).sum();
        let free = self.usage().free;
        if needed > free {
            return Err(ChunkError::Full { needed, free });
        }
        if new.is_empty() { Ok(()) } else { self.append(&new, Instant::now()) }
    }

    /// Length at which a segment is full.
    fn full_segment(&self) -> u64 {
        if self.object_tier.is_some() { REMOTE_SEGMENT } else { SEGMENT }
    }

    /// The caller holds `writing`.
    pub(super) fn append(&self, chunks: &[&(Digest, Bytes)], touched: Instant) -> Result<()> {
        let (number, file, at) = self.newest()?;
        let mut slots = Vec::with_capacity(chunks.len());
        let mut end = at;
        for (digest, frame) in chunks {
            let (offset, length) = (end + RECORD as u64, frame.len() as u32);
            slots.push((*digest, ChunkSlot { segment: number, offset, length, touched }));
            end = offset + u64::from(length);
        }
        if let Err(error) = write_records(&file, at, chunks) {
            // Without its torn records, the segment is as before.
            let undone = is_full(&error) && file.set_len(at).is_ok();
            return match undone {
                true => Err(ChunkError::Full { needed: end - at, free: 0 }),
                false => Err(self.failed("write", number)(error)),
            };
        }
        let mut state = self.state();
        state.unsynced = true;
        if let Some(segment) = state.segments.get_mut(&number) {
            segment.length = end;
            segment.live += end - at;
        }
        for (digest, slot) in slots {
            // A chunk that compaction moves has two records for a moment.
            if let Some(old) = state.index.insert(digest, slot) {
                release(&mut state, &old);
            }
        }
        Ok(())
    }

    /// The segment that grows, or a new one after syncing the full one.
    fn newest(&self) -> Result<(u32, Arc<File>, u64)> {
        let newest = {
            let state = self.state();
            state.segments.last_key_value().map(|(number, s)| (*number, s.file.clone(), s.length))
        };
        let number = match newest {
            Some((number, Some(file), length)) if length < self.full_segment() => {
                return Ok((number, file, length));
            }
            Some((number, None, _)) => number + 1,
            Some((number, Some(file), _)) => {
                file.sync_data().map_err(|error| self.failed("sync", number)(error))?;
                if let Ok((records, _)) = segment::scan(&file, false) {
                    segment_heads::write(&self.dir, number, &records);
                }
                number + 1
            }
            None => 1,
        };
        let path = self.dir.join(name_of(number));
        let made = File::options().read(true).write(true).create_new(true).open(&path);
        let file = Arc::new(made.map_err(|error| match is_full(&error) {
            true => ChunkError::Full { needed: RECORD as u64, free: 0 },
            false => self.failed("create", number)(error),
        })?);
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(|error| self.failed("sync", number)(error))?;
        self.state().segments.insert(number, Segment { file: Some(file.clone()), length: 0, live: 0 });
        Ok((number, file, 0))
    }

    /// Makes all chunks durable and returns which of `digests` are in the store.
    pub fn flush(&self, digests: &[Digest]) -> Result<Vec<bool>> {
        let _syncing = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.latched.load(Ordering::Relaxed) {
            return Err(ChunkError::Latched);
        }
        let newest = {
            let mut state = self.state();
            let newest = state.segments.last_key_value();
            let newest = newest.and_then(|(number, segment)| Some((*number, segment.file.clone()?)));
            newest.filter(|_| std::mem::take(&mut state.unsynced))
        };
        if let Some((number, file)) = newest {
            file.sync_data().map_err(|error| self.failed("sync", number)(error))?;
        }
        Ok(self.touch(digests))
    }

    /// Reads the frame of a chunk and checks its checksum. A damaged chunk is removed from the index.
    pub fn get(&self, digest: &Digest) -> Result<Bytes> {
        let found = {
            let state = self.state();
            let slot = state.index.get(digest).copied();
            slot.and_then(|slot| Some((slot, state.segments.get(&slot.segment)?.file.clone())))
        };
        let (slot, file) = found.ok_or(ChunkError::Missing { digest: *digest })?;
        let bytes = match file {
            Some(file) => {
                let mut bytes = vec![0; slot.length as usize];
                file.read_exact_at(&mut bytes, slot.offset).is_ok().then(|| Bytes::from(bytes))
            }
            None => self.read_remote(&slot)?.filter(|bytes| bytes.len() == slot.length as usize),
        };
        let damage = match bytes.as_ref().map(|bytes| PackFrame::parse(bytes)) {
            Some(Ok(_)) => return Ok(bytes.unwrap_or_default()),
            Some(Err(source)) => segment::FrameFault::NoFrame { source },
            None => segment::FrameFault::Length,
        };
        match self.remove_if(digest, |now| now.offset == slot.offset && now.segment == slot.segment) {
            true => Err(ChunkError::Damaged { digest: *digest, source: damage }),
            // The chunk was moved or deleted during the read, so this is no damage.
            false => self.get(digest),
        }
    }

    /// Appends the frame of a chunk to `out`, which is left as it was if that fails.
    pub fn get_into(&self, digest: &Digest, out: &mut Vec<u8>) -> Result<()> {
        let found = {
            let state = self.state();
            let slot = state.index.get(digest).copied();
            slot.and_then(|slot| Some((slot, state.segments.get(&slot.segment)?.file.clone()?)))
        };
        let before = out.len();
        if let Some((slot, file)) = found {
            out.resize(before + slot.length as usize, 0);
            let read = file.read_exact_at(&mut out[before..], slot.offset);
            if read.is_ok() && PackFrame::parse(&out[before..]).is_ok() {
                return Ok(());
            }
            out.truncate(before);
        }
        // The chunk is in the object store, was moved just now, or is damaged.
        out.extend_from_slice(&self.get(digest)?);
        Ok(())
    }

    pub(super) fn remove_if(&self, digest: &Digest, condition: impl FnOnce(&ChunkSlot) -> bool) -> bool {
        let mut state = self.state();
        let Some(slot) = state.index.get(digest).copied().filter(condition) else { return false };
        state.index.remove(digest);
        release(&mut state, &slot);
        true
    }

    /// Reads every chunk and compares its digest. Damaged chunks are removed from the index. Returns the
    /// number of intact chunks and the damaged ones.
    pub fn verify(&self) -> (u64, Vec<Digest>) {
        let all: Vec<Digest> = self.state().index.keys().copied().collect();
        let (mut right, mut damaged) = (0, Vec::new());
        for digest in all {
            match self.get(&digest).map(|frame| open_frame(&digest, &frame)) {
                Ok(Ok(_)) => right += 1,
                Err(ChunkError::Missing { .. }) => {}
                Err(ChunkError::Tier(error)) => {
                    // Unreachable segments tell nothing about damage, and every further one would take time.
                    tracing::error!(error = &error as &dyn std::error::Error, "the verification ended early");
                    break;
                }
                Ok(Err(_)) | Err(_) => {
                    self.remove_if(&digest, |_| true);
                    damaged.push(digest);
                }
            }
        }
        (right, damaged)
    }

    /// Reads a chunk from the disk and compares its digest. Returns the length of its frame and whether it is
    /// intact; a damaged one is removed from the index. None if it is gone, or in the object store.
    pub(super) fn check(&self, digest: &Digest) -> Option<(u64, bool)> {
        let (slot, file) = {
            let state = self.state();
            let slot = *state.index.get(digest)?;
            (slot, state.segments.get(&slot.segment)?.file.clone()?)
        };
        // What the kernel still has in memory would say nothing of the disk. Where this fails, it is read.
        let (offset, length) = (slot.offset, NonZeroU64::new(slot.length.into()));
        let _ = rustix::fs::fadvise(&file, offset, length, rustix::fs::Advice::DontNeed);
        let right = match self.get(digest).map(|frame| open_frame(digest, &frame)) {
            Ok(Ok(_)) => true,
            // Deleted, or moved to the object store.
            Err(ChunkError::Missing { .. } | ChunkError::Tier(_)) => return None,
            Ok(Err(_)) => {
                self.remove_if(digest, |now| now.offset == slot.offset && now.segment == slot.segment);
                false
            }
            Err(_) => false,
        };
        Some((slot.length.into(), right))
    }

    /// At most `most` chunks from a digest on, in order, with the seconds since each was last put.
    pub fn list(&self, from: &Digest, most: usize) -> Vec<(Digest, u32)> {
        let now = Instant::now();
        let state = self.state();
        let age = |slot: &ChunkSlot| {
            now.saturating_duration_since(slot.touched).as_secs().min(u32::MAX.into()) as u32
        };
        state.index.range(from..).take(most).map(|(digest, slot)| (*digest, age(slot))).collect()
    }

    /// Removes chunks not put again since `listed` from the index. [`ChunkStore::compact`] frees the space.
    pub fn delete(&self, digests: &[Digest], listed: Instant) -> u64 {
        digests.iter().filter(|digest| self.remove_if(digest, |slot| slot.touched < listed)).count() as u64
    }
}

/// Whether a disk or a quota has no room: nothing that was stored is in doubt then.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Writes the records of chunks at `at`. Small ones are written together; a large frame is not copied.
fn write_records(file: &File, at: u64, chunks: &[&(Digest, Bytes)]) -> io::Result<()> {
    let (mut end, mut small) = (at, Vec::new());
    let mut write = |bytes: &[u8]| {
        file.write_all_at(bytes, end)?;
        end += bytes.len() as u64;
        io::Result::Ok(())
    };
    for (digest, frame) in chunks {
        small.extend(segment::head(digest, frame.len()));
        let is_large = frame.len() > GATHERED;
        if !is_large {
            small.extend_from_slice(frame);
        }
        if is_large || small.len() > GATHERED {
            write(&small)?;
            small.clear();
        }
        if is_large {
            write(frame)?;
        }
    }
    write(&small)
}

/// Creates a folder and its parents, each durably.
fn create_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let above = dir.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create_dir(above)?;
    fs::create_dir(dir)?;
    File::open(above)?.sync_all()
}

pub(super) fn name_of(number: u32) -> String {
    format!("{number:08}.seg")
}

pub(super) fn number_of(name: &str) -> Option<u32> {
    name.strip_suffix(".seg").filter(|digits| digits.len() == 8)?.parse().ok()
}

pub(super) fn release(state: &mut State, slot: &ChunkSlot) {
    if let Some(segment) = state.segments.get_mut(&slot.segment) {
        segment.live = segment.live.saturating_sub(RECORD as u64 + u64::from(slot.length));
    }
}

/// Opens a segment and returns its chunks. The newest is checked completely and truncated where it is torn.
fn load(dir: &Path, number: u32, newest: bool, state: &mut State) -> Result<Vec<(Digest, ChunkSlot)>> {
    let path = dir.join(name_of(number));
    let io = |action| {
        let path = path.clone();
        move |source| ChunkError::Io { action, path, source }
    };
    let file = File::options().read(true).write(true).open(&path).map_err(io("open"))?;
    let (length, touched) = (file.metadata().map_err(io("read"))?.len(), Instant::now());
    if let Some(found) = segment_heads::read(dir, number, length, touched).filter(|_| !newest) {
        state.segments.insert(number, Segment { file: Some(Arc::new(file)), length, live: 0 });
        return Ok(found);
    }
    let (found, end) = segment::scan(&file, newest).map_err(io("read"))?;
    if !newest && end == length {
        segment_heads::write(dir, number, &found);
    }
    if end < length {
        tracing::warn!(segment = %path.display(), at = end, lost = length - end, "a segment is torn");
        if newest {
            file.set_len(end).map_err(io("truncate"))?;
        }
    }
    let length = if newest { end } else { length };
    state.segments.insert(number, Segment { file: Some(Arc::new(file)), length, live: 0 });
    let slot = |record: SegmentRecord| {
        let SegmentRecord { digest, offset, length } = record;
        (digest, ChunkSlot { segment: number, offset, length, touched })
    };
    Ok(found.into_iter().map(slot).collect())
}

#[cfg(test)]
mod tests;
