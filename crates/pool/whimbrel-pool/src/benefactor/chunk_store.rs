//! The chunk store of a benefactor: append-only segment files, an index in memory, and compaction.
//!
//! A put is in the page cache when it returns and durable when [`ChunkStore::flush`] returns; clients flush
//! chunks before they commit. A flush waits for one that is under way, because that one may be syncing the
//! chunks in question. A full segment is synced before the next one starts, so only the newest can be torn by
//! a crash; opening the store checks it completely.
//!
//! The capsule store is not used because its garbage collection follows refs; here the manager decides on
//! each chunk. After a failed write or sync the store is latched until it is opened again.
//!
//! With an object tier, full segments are in an object store; see `remote_segments`.

use super::{
    error::{ChunkError, Result},
    readahead::Readahead,
    remote_segments::{self, ObjectTier, REMOTE_SEGMENT},
    segment::{self, RECORD, SegmentRecord, open_frame},
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
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
    writing: Mutex<()>,
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
        for number in &numbers {
            load(dir, *number, Some(number) == numbers.last(), &mut state)?;
        }
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
        let free = self.capacity.saturating_sub(used).min(on_disk.saturating_sub(self.keep_free));
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

    /// The caller holds `writing`.
    fn append(&self, chunks: &[&(Digest, Bytes)], touched: Instant) -> Result<()> {
        let (number, file, at) = self.newest()?;
        let mut slots = Vec::with_capacity(chunks.len());
        let mut end = at;
        let mut small = Vec::new();
        for (digest, frame) in chunks {
            small.extend(segment::head(digest, frame.len()));
            let offset = end + small.len() as u64;
            slots.push((*digest, ChunkSlot { segment: number, offset, length: frame.len() as u32, touched }));
            // Small records are written together; a large frame is not copied.
            let is_large = frame.len() > GATHERED;
            if !is_large {
                small.extend_from_slice(frame);
            }
            if is_large || small.len() > GATHERED {
                self.write(number, &file, &mut end, &small)?;
                small.clear();
            }
            if is_large {
                self.write(number, &file, &mut end, frame)?;
            }
        }
        self.write(number, &file, &mut end, &small)?;
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

    fn write(&self, number: u32, file: &File, end: &mut u64, bytes: &[u8]) -> Result<()> {
        file.write_all_at(bytes, *end).map_err(|error| self.failed("write", number)(error))?;
        *end += bytes.len() as u64;
        Ok(())
    }

    /// The segment that grows, or a new one after syncing the full one.
    fn newest(&self) -> Result<(u32, Arc<File>, u64)> {
        let newest = {
            let state = self.state();
            state.segments.last_key_value().map(|(number, s)| (*number, s.file.clone(), s.length))
        };
        let full = if self.object_tier.is_some() { REMOTE_SEGMENT } else { SEGMENT };
        let number = match newest {
            Some((number, Some(file), length)) if length < full => return Ok((number, file, length)),
            Some((number, None, _)) => number + 1,
            Some((number, Some(file), _)) => {
                file.sync_data().map_err(|error| self.failed("sync", number)(error))?;
                number + 1
            }
            None => 1,
        };
        let path = self.dir.join(name_of(number));
        let made = File::options().read(true).write(true).create_new(true).open(&path);
        let file = Arc::new(made.map_err(|error| self.failed("create", number)(error))?);
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

    fn remove_if(&self, digest: &Digest, condition: impl FnOnce(&ChunkSlot) -> bool) -> bool {
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

    /// Moves the chunks out of segments that are more than half empty and deletes these; returns bytes freed.
    pub fn compact(&self) -> Result<u64> {
        let mut freed = 0;
        loop {
            let sparse = {
                let state = self.state();
                let newest = state.segments.last_key_value().map(|(number, _)| *number);
                let sealed = state.segments.iter().filter(|(number, _)| Some(**number) != newest);
                let mut sparse = sealed.filter(|(_, segment)| segment.live * 2 < segment.length);
                sparse.next().map(|(number, segment)| (*number, segment.length))
            };
            let Some((number, length)) = sparse else { return Ok(freed) };
            let moved = self.compact_segment(number)?;
            freed += length.saturating_sub(moved);
        }
    }

    fn compact_segment(&self, number: u32) -> Result<u64> {
        let left: Vec<(Digest, ChunkSlot)> = {
            let state = self.state();
            let of_segment = state.index.iter().filter(|(_, slot)| slot.segment == number);
            of_segment.map(|(digest, slot)| (*digest, *slot)).collect()
        };
        let mut moved = 0;
        for (digest, slot) in left {
            let frame = match self.get(&digest) {
                Ok(frame) => frame,
                Err(error @ ChunkError::Tier(_)) => return Err(error),
                // Reading a damaged chunk removes it from the index.
                Err(_) => continue,
            };
            let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            if self.state().index.get(&digest).is_some_and(|now| now.segment == number) {
                moved += (RECORD + frame.len()) as u64;
                self.append(&[&(digest, frame)], slot.touched)?;
            }
        }
        // The copies must be durable before the segment is deleted.
        self.flush(&[])?;
        let _still = self.offloading.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().segments.get(&number).is_some_and(|segment| segment.file.is_none()) {
            self.remove_remote(number)?;
            self.state().segments.remove(&number);
            return Ok(moved);
        }
        self.state().segments.remove(&number);
        fs::remove_file(self.dir.join(name_of(number)))
            .map_err(|error| self.failed("remove", number)(error))?;
        Ok(moved)
    }
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

/// Loads a segment into the index. The newest is checked completely and truncated where it is torn.
fn load(dir: &Path, number: u32, newest: bool, state: &mut State) -> Result<()> {
    let path = dir.join(name_of(number));
    let io = |action| {
        let path = path.clone();
        move |source| ChunkError::Io { action, path, source }
    };
    let file = File::options().read(true).write(true).open(&path).map_err(io("open"))?;
    let (found, end) = segment::scan(&file, newest).map_err(io("read"))?;
    let length = file.metadata().map_err(io("read"))?.len();
    if end < length {
        tracing::warn!(segment = %path.display(), at = end, lost = length - end, "a segment is torn");
        if newest {
            file.set_len(end).map_err(io("truncate"))?;
        }
    }
    let length = if newest { end } else { length };
    state.segments.insert(number, Segment { file: Some(Arc::new(file)), length, live: 0 });
    let touched = Instant::now();
    for SegmentRecord { digest, offset, length } in found {
        let slot = ChunkSlot { segment: number, offset, length, touched };
        if let Some(old) = state.index.insert(digest, slot) {
            release(state, &old);
        }
        if let Some(segment) = state.segments.get_mut(&number) {
            segment.live += RECORD as u64 + u64::from(length);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};
    use whimbrel_image::pack_frame::{Encoder, Kind};

    fn chunk(seed: u64, len: usize) -> (Digest, Bytes) {
        let mut raw = vec![0; len];
        StdRng::seed_from_u64(seed).fill(&mut raw[..]);
        (Digest::of(&raw), Encoder::new(1).encode(Kind::Blob, &raw, &[len]).unwrap().into())
    }

    fn open(dir: &Path) -> ChunkStore {
        ChunkStore::open(dir, 1 << 30, 0).unwrap()
    }

    #[test]
    fn chunks_are_there_again_after_a_restart_and_a_torn_tail_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let chunks: Vec<_> = (0..20).map(|seed| chunk(seed, 5000 + seed as usize)).collect();
        let store = open(dir.path());
        store.put(&chunks).unwrap();
        store.put(&chunks[3..6]).unwrap();
        assert_eq!(store.usage().chunks, 20, "putting twice keeps once");
        drop(store);
        let path = dir.path().join(name_of(1));
        let whole = fs::metadata(&path).unwrap().len();
        for cut in [1, 47, 3000] {
            File::options().write(true).open(&path).unwrap().set_len(whole - cut).unwrap();
            let store = open(dir.path());
            assert_eq!(store.usage().chunks, 19, "cut by {cut}");
            let last = chunks.iter().filter(|(digest, _)| store.get(digest).is_err()).count();
            assert_eq!(last, 1);
            store.put(&chunks).unwrap();
            for (digest, frame) in &chunks {
                assert_eq!(store.get(digest).unwrap(), frame);
            }
        }
    }

    #[test]
    fn what_a_killed_process_left_in_the_page_cache_is_synced_by_the_next_flush() {
        let dir = tempfile::tempdir().unwrap();
        let (digest, frame) = chunk(1, 5000);
        open(dir.path()).put(&[(digest, frame)]).unwrap();
        let store = open(dir.path());
        assert!(store.state().unsynced);
        assert_eq!(store.flush(&[digest]).unwrap(), [true]);
        assert!(!store.state().unsynced);
    }

    #[test]
    fn ranges_of_digests_are_listed_in_order_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let chunks: Vec<_> = (0..50).map(|seed| chunk(seed, 100)).collect();
        store.put(&chunks).unwrap();
        let mut all: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
        all.sort();
        let (mut found, mut from) = (Vec::new(), Some(Digest([0; 32])));
        while let Some(start) = from {
            let part = store.list(&start, 7);
            from = part
                .last()
                .and_then(|(last, _)| crate::protocol::next_digest(*last))
                .filter(|_| part.len() == 7);
            found.extend(part.into_iter().map(|(digest, _)| digest));
        }
        assert_eq!(found, all);
    }

    #[test]
    fn a_damaged_chunk_is_never_served_and_can_be_put_again() {
        let dir = tempfile::tempdir().unwrap();
        let (digest, frame) = chunk(1, 9000);
        let store = open(dir.path());
        store.put(&[(digest, frame.clone())]).unwrap();
        let file = File::options().write(true).open(dir.path().join(name_of(1))).unwrap();
        file.write_all_at(b"?", 4000).unwrap();
        assert!(matches!(store.get(&digest), Err(ChunkError::Damaged { .. })));
        assert!(matches!(store.get(&digest), Err(ChunkError::Missing { .. })), "forgotten");
        store.put(&[(digest, frame)]).unwrap();
        store.get(&digest).unwrap();
        assert_eq!(store.verify(), (1, vec![]));
    }

    #[test]
    fn deleting_frees_space_and_spares_what_was_put_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let chunks: Vec<_> = (0..90).map(|seed| chunk(seed, 1 << 20)).collect();
        chunks.iter().for_each(|chunk| store.put(std::slice::from_ref(chunk)).unwrap());
        let listed = Instant::now();
        store.put(&chunks[5..6]).unwrap();
        let digests: Vec<_> = chunks[..60].iter().map(|(digest, _)| *digest).collect();
        assert_eq!(store.delete(&digests, listed), 59, "the one put again stays");
        assert!(store.compact().unwrap() > 50 << 20);
        for (at, (digest, frame)) in chunks.iter().enumerate() {
            let here = store.get(digest);
            assert_eq!(here.is_ok(), at == 5 || at >= 60, "{at}");
            if let Ok(found) = here {
                assert_eq!(found, frame);
            }
        }
        drop(store);
        assert_eq!(open(dir.path()).usage().chunks, 31);
    }

    #[test]
    fn a_full_store_refuses_before_it_writes_and_one_folder_has_one_owner() {
        let dir = tempfile::tempdir().unwrap();
        let store = ChunkStore::open(dir.path(), 10_000, 0).unwrap();
        store.put(&[chunk(1, 6000)]).unwrap();
        assert!(matches!(store.put(&[chunk(2, 6000)]), Err(ChunkError::Full { .. })));
        assert_eq!(store.usage().chunks, 1);
        assert!(matches!(ChunkStore::open(dir.path(), 1, 0), Err(ChunkError::InUse { .. })));
    }

    #[test]
    fn what_a_malicious_sender_offers_is_no_chunk() {
        let (digest, frame) = chunk(1, 5000);
        assert!(open_frame(&digest, &frame).is_ok());
        assert!(matches!(open_frame(&Digest::of(b"other"), &frame), Err(FrameFault::Digest { .. })));
        assert!(open_frame(&digest, &frame[..4000]).is_err());
        let mut longer = frame.to_vec();
        longer.push(0);
        assert_eq!(open_frame(&digest, &longer), Err(FrameFault::Length));
        use segment::FrameFault;
    }
}
