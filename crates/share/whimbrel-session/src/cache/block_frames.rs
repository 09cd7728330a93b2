//! Pages in frames: storing them in the right order with their records, and reading them with a checksum.
//!
//! Pages of zeros are not stored. A dirty page is recorded before it is written to its frame, unless the
//! frame is new: then it is written first, because a record must never exist without its page. A failed write
//! of dirty pages latches the cache.

use super::{
    block_cache::{BlockCache, CacheError, State, io_error, page_numbers, page_sum, record_of},
    block_index::{CacheFull, Key, PageMask, WritePlan, ZERO},
    journal_record::JournalRecord,
    storage::StoragePart,
};
use crate::proto::PAGE;
use std::{io, sync::atomic::Ordering};
use whimbrel_core::lock;

/// Space that the cache leaves free on its disk, for the journal and for others: with less, it does not use
/// more frames than before.
pub(super) const MIN_ROOM: u64 = 128 << 20;

/// Pages to be stored, from page `first` of a block on: those with a sum in `sums`.
#[derive(Clone, Copy)]
struct PageRun<'a> {
    first: u32,
    content: &'a [u8],
    sums: &'a [(u32, u32)],
}

/// A short last page, filled up with zeros.
fn padded(page: &[u8]) -> [u8; PAGE] {
    let mut whole = [0; PAGE];
    whole[..page.len()].copy_from_slice(page);
    whole
}

/// Numbers and sums of the pages in `content`, from page `first` on, without those of `have`.
fn sums_without(have: PageMask, first: u32, content: &[u8]) -> Vec<(u32, u32)> {
    let sum_of = |page: &[u8]| if page.len() == PAGE { page_sum(page) } else { page_sum(&padded(page)) };
    let pages = (first..).zip(content.chunks(PAGE));
    pages.filter(|(number, _)| have >> number & 1 == 0).map(|(number, page)| (number, sum_of(page))).collect()
}

impl BlockCache {
    /// Fills `out` with adjacent stored pages from page `first` of a block on, and returns the number of
    /// bytes. `None` if there are fewer than two, or if one is damaged: the caller then reads page by page.
    pub(super) fn read_run(&self, state: &State, key: Key, first: u32, out: &mut [u8]) -> Option<usize> {
        let block = state.index.get(key)?;
        let frame = block.frame?;
        let stored = |page: &u32| block.valid >> page & 1 == 1 && block.sums[*page as usize] != ZERO;
        let most = (self.geometry.pages - first).min((out.len() / PAGE) as u32);
        let run = (first..first + most).take_while(stored).count();
        let place = &mut out[..run * PAGE];
        if run < 2
            || self.storage.read(StoragePart::Frames, self.frame_at(frame, first), place).ok()? != place.len()
        {
            return None;
        }
        self.used[frame as usize].store(true, Ordering::Relaxed);
        let mut pages = place.chunks(PAGE).zip(&block.sums[first as usize..]);
        pages.all(|(page, sum)| page_sum(page) == *sum).then_some(place.len())
    }

    /// Copies a part of a page if it is here and undamaged. A damaged clean page is added to `bad`.
    pub(super) fn read_page(
        &self,
        state: &State,
        key: Key,
        page: u32,
        within: usize,
        out: &mut [u8],
        bad: &mut Vec<(Key, u32)>,
    ) -> Result<bool, CacheError> {
        let Some(block) = state.index.get(key).filter(|block| block.valid >> page & 1 == 1) else {
            return Ok(false);
        };
        let Some(frame) = block.frame.filter(|_| block.sums[page as usize] != ZERO) else {
            out.fill(0);
            return Ok(true);
        };
        self.used[frame as usize].store(true, Ordering::Relaxed);
        let mut bytes = [0; PAGE];
        if self.load(frame, page, &mut bytes).is_ok() && page_sum(&bytes) == block.sums[page as usize] {
            out.copy_from_slice(&bytes[within..within + out.len()]);
            return Ok(true);
        }
        if block.dirty >> page & 1 == 1 {
            let offset = key.block * self.geometry.block() + u64::from(page) * PAGE as u64;
            return Err(CacheError::Damaged { offset });
        }
        bad.push((key, page));
        Ok(false)
    }

    pub(super) fn load(&self, frame: u32, page: u32, out: &mut [u8; PAGE]) -> io::Result<()> {
        let at = self.frame_at(frame, page);
        let read = self.storage.read(StoragePart::Frames, at, out)?;
        if read == PAGE { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    pub(super) fn frame_at(&self, frame: u32, page: u32) -> u64 {
        u64::from(frame) * self.geometry.block() + u64::from(page) * PAGE as u64
    }

    /// Stores complete pages of one block (the last may be short) and returns the journal record. Dirty pages
    /// are recorded before they are stored.
    pub(super) fn store_block(
        &self,
        state: &mut State,
        key: Key,
        first: u32,
        content: &[u8],
        dirty: bool,
    ) -> Result<Option<JournalRecord>, CacheError> {
        // Clean pages that are there stay as they are.
        let have = state.index.get(key).filter(|_| !dirty).map_or(0, |block| block.valid);
        let sums = sums_without(have, first, content);
        if sums.is_empty() {
            return Ok(None);
        }
        let bits = |sums: &mut dyn Iterator<Item = &(u32, u32)>| {
            sums.fold(0, |bits, (number, _)| bits | 1 << number)
        };
        let pages = bits(&mut sums.iter());
        let full = bits(&mut sums.iter().filter(|(_, sum)| *sum != ZERO));
        let plan = self.plan(state, key, pages, full, dirty)?;
        self.copy(state, key, plan)?;
        let stored = PageRun { first, content, sums: &sums };
        let in_place = state.index.get(key).is_some_and(|block| block.frame == plan.frame);
        if !in_place {
            // No record names the new frame yet: write the content first, so that its record never exists
            // without it.
            self.store_in_frame(state, plan.frame, stored, dirty)?;
        }
        let record = record_of(key, state.index.apply_plan(key, plan, pages, &sums, dirty));
        if dirty {
            self.log(state, std::slice::from_ref(&record))?;
        }
        if in_place && let Err(error) = self.store_in_frame(state, plan.frame, stored, dirty) {
            // The frame holds neither the old nor the new content.
            state.index.remove(key);
            return Err(error);
        }
        Ok((!dirty).then_some(record))
    }

    fn plan(
        &self,
        state: &mut State,
        key: Key,
        pages: PageMask,
        full: PageMask,
        dirty: bool,
    ) -> Result<WritePlan, CacheError> {
        // A full disk would latch the cache, and the disk is not only the cache's.
        state.index.set_growth(self.storage.room() >= MIN_ROOM);
        let mut gone = Vec::new();
        let mut plan_now = |state: &mut State, pins_hold: bool| {
            let (flights, files) = (lock(&self.fetching), &state.files);
            let used = |frame: u32, key: Key| {
                self.used[frame as usize].swap(false, Ordering::Relaxed)
                    || flights.contains_key(&key)
                    || pins_hold && files.get(&key.file).is_some_and(|held| held.pinned)
            };
            state.index.plan(key, pages, full, dirty, used, &mut gone)
        };
        let mut plan = plan_now(state, true);
        if plan == Err(CacheFull::Barrier) {
            self.restart_journal(state)?;
            plan = plan_now(state, true);
        }
        if plan.is_err() && !self.pins_hold(state) {
            plan = plan_now(state, false);
        }
        for (key, _) in gone.iter().filter(|(_, block)| block.generation != 0) {
            // The block was sent to the server: what the server reports about the file may be older.
            if let Some(held) = state.files.get_mut(&key.file) {
                held.evictions += 1;
            }
        }
        plan.map_err(|_| CacheError::Full)
    }

    fn copy(&self, state: &State, key: Key, plan: WritePlan) -> Result<(), CacheError> {
        let (Some(frame), Some((from, pages))) = (plan.frame, plan.copy) else { return Ok(()) };
        let mut bytes = [0; PAGE];
        for page in page_numbers(pages) {
            // A page that is unreadable or damaged is copied as it is: its sum shows the damage.
            let _ = self.load(from, page, &mut bytes);
            let written = self.storage.write(StoragePart::Frames, self.frame_at(frame, page), &bytes);
            written.map_err(io_error("write"))?;
        }
        assert!(state.index.get(key).is_some());
        Ok(())
    }

    fn store_in_frame(
        &self,
        state: &mut State,
        frame: Option<u32>,
        stored: PageRun<'_>,
        dirty: bool,
    ) -> Result<(), CacheError> {
        let Some(frame) = frame else { return Ok(()) };
        if let Err(source) = self.store_pages(frame, stored) {
            if dirty {
                state.latched = Some("write");
            }
            return Err(CacheError::Io { action: "write", source });
        }
        self.used[frame as usize].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Writes runs of non-zero pages directly from the content.
    fn store_pages(&self, frame: u32, stored: PageRun<'_>) -> io::Result<()> {
        let PageRun { first, content, sums } = stored;
        let mut numbers = sums.iter().filter(|(_, sum)| *sum != ZERO).map(|(number, _)| *number).peekable();
        while let Some(start) = numbers.next() {
            let mut last = start;
            while numbers.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            let bytes = (start - first) as usize * PAGE..(last + 1 - first) as usize * PAGE;
            let at = self.frame_at(frame, start);
            if bytes.end <= content.len() {
                self.storage.write(StoragePart::Frames, at, &content[bytes])?;
            } else {
                let mut filled_up = content[bytes.start..].to_vec();
                filled_up.resize(bytes.len(), 0);
                self.storage.write(StoragePart::Frames, at, &filled_up)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{CacheRead, DiskStorage, FileRecord, Geometry, Storage},
        proto::{Op, RelPath, Version},
    };
    use std::sync::{Arc, atomic::AtomicU64};

    /// A storage on a disk with a given room.
    struct Limited(DiskStorage, Arc<AtomicU64>);

    impl Storage for Limited {
        fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
            self.0.read(part, at, out)
        }
        fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
            self.0.write(part, at, data)
        }
        fn sync(&self, part: StoragePart) -> io::Result<()> {
            self.0.sync(part)
        }
        fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
            self.0.truncate(part, len)
        }
        fn len(&self, part: StoragePart) -> io::Result<u64> {
            self.0.len(part)
        }
        fn room(&self) -> u64 {
            self.1.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_cache_on_a_full_disk_does_not_grow_and_works_on_when_there_is_room() {
        const BLOCK: u64 = 64 << 10;
        let dir = tempfile::tempdir().unwrap();
        let room = Arc::new(AtomicU64::new(u64::MAX));
        let storage = Limited(DiskStorage::open(dir.path()).unwrap(), room.clone());
        let geometry = Geometry::new(BLOCK, 8 * BLOCK).unwrap();
        let (cache, _) = BlockCache::open(Box::new(storage), geometry).unwrap();
        let record = FileRecord {
            path: RelPath::root(),
            ident: None,
            made_by: None,
            base: Version::default(),
            size: 0,
            zero_from: 0,
            mtime: None,
            stamps: Vec::new(),
            dirty: false,
            removed: false,
        };
        let file = cache.add_file(record).unwrap();
        let content = vec![7; BLOCK as usize];
        let write = |block: u64| cache.write(file, block * BLOCK, &content);
        assert_eq!(write(0).unwrap(), CacheRead::Complete);
        room.store(MIN_ROOM - 1, Ordering::Relaxed);
        assert!(matches!(write(1), Err(CacheError::Full)));
        assert_eq!(write(0).unwrap(), CacheRead::Complete, "in its place");
        assert!(dir.path().join("frames").metadata().unwrap().len() <= BLOCK);
        // Names need little room, and the journal has it.
        cache.add_op(Op::Rmdir { path: RelPath::root() }).unwrap();
        cache.sync().unwrap();
        room.store(MIN_ROOM, Ordering::Relaxed);
        assert!((1..8).all(|block| write(block).unwrap() == CacheRead::Complete));
    }
}
