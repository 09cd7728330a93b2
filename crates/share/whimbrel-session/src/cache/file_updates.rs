//! Updates of a file in the cache: writes, truncation, write-back and file records.

use super::{
    block_cache::{
        BlockCache, CacheError, CacheRead, ContentMark, DirtyBlock, FileGeneration, State, page_numbers,
        page_runs, record_of,
    },
    block_index::Key,
    holes::Holes,
    journal_record::{FileId, FileRecord, JournalRecord},
    pinned_files::is_pinned,
};
use crate::proto::{Ident, PAGE, Version};
use std::ops::Range;

impl BlockCache {
    /// Adds a file and returns its number.
    pub fn add_file(&self, record: FileRecord) -> Result<FileId, CacheError> {
        let mut state = self.write_state();
        let file = state.next_file;
        state.next_file += 1;
        let held = FileGeneration::new(record.clone(), &state.pins);
        state.files.insert(file, held);
        self.log(&mut state, &[JournalRecord::File { file, record }])?;
        Ok(file)
    }

    /// Record of a file.
    pub fn file(&self, file: FileId) -> Option<FileRecord> {
        self.read_state().files.get(&file).map(|held| held.record.clone())
    }

    /// Every file of the cache.
    pub fn files(&self) -> Vec<(FileId, FileRecord)> {
        self.read_state().files.iter().map(|(file, held)| (*file, held.record.clone())).collect()
    }

    /// Changes the record of a file, and logs it if it differs.
    pub fn update_file(&self, file: FileId, change: impl FnOnce(&mut FileRecord)) -> Result<(), CacheError> {
        let mut locked = self.write_state();
        let state = &mut *locked;
        let held = state.files.get_mut(&file).ok_or(CacheError::NoSuchFile)?;
        let before = held.record.clone();
        change(&mut held.record);
        if held.record == before {
            return Ok(());
        }
        held.pinned = is_pinned(&state.pins, &held.record);
        let record = held.record.clone();
        self.log(state, &[JournalRecord::File { file, record }])
    }

    /// Writes. Every page that is partly overwritten must be here or beyond `zero_from`; otherwise the blocks
    /// needed are returned and nothing is written.
    pub fn write(&self, file: FileId, offset: u64, data: &[u8]) -> Result<CacheRead, CacheError> {
        let mut state = self.write_state();
        if let Some(action) = state.latched {
            return Err(CacheError::Latched { action });
        }
        self.restart_journal_if_grown(&mut state)?;
        let held = state.files.get(&file).ok_or(CacheError::NoSuchFile)?;
        let (page, end, zero_from) = (PAGE as u64, offset + data.len() as u64, held.record.zero_from);
        let (first, last) = (offset / page * page, end.div_ceil(page) * page);
        if (first, last) == (offset, end) {
            self.put_dirty(&mut state, file, first, data, end)?;
            return Ok(CacheRead::Complete);
        }
        let mut whole = vec![0; (last - first) as usize];
        let mut missing = Vec::new();
        for edge in [first, last - page] {
            let covered = edge >= offset && edge + page <= end;
            let place = &mut whole[(edge - first) as usize..][..PAGE];
            if !covered && !self.old_page(&state, file, edge, zero_from, place)? {
                let block = edge / self.geometry.block();
                if missing.last() != Some(&block) {
                    missing.push(block);
                }
            }
        }
        if !missing.is_empty() {
            return Ok(CacheRead::Missing(missing));
        }
        whole[(offset - first) as usize..][..data.len()].copy_from_slice(data);
        self.put_dirty(&mut state, file, first, &whole, end)?;
        Ok(CacheRead::Complete)
    }

    /// Reads the old content of a page that is partly overwritten; false if it is not known.
    fn old_page(
        &self,
        state: &State,
        file: FileId,
        at: u64,
        zero_from: u64,
        out: &mut [u8],
    ) -> Result<bool, CacheError> {
        let (block, within) = (at / self.geometry.block(), at % self.geometry.block());
        let mut bad = Vec::new();
        let key = Key { file, block };
        let here = self.read_page(state, key, (within / PAGE as u64) as u32, 0, out, &mut bad)?;
        let in_hole = || state.files.get(&file).is_some_and(|held| held.holes.contains(at / PAGE as u64));
        Ok(here || at >= zero_from || in_hole())
    }

    fn put_dirty(
        &self,
        state: &mut State,
        file: FileId,
        first: u64,
        whole: &[u8],
        end: u64,
    ) -> Result<(), CacheError> {
        let held = state.files.get_mut(&file).ok_or(CacheError::NoSuchFile)?;
        held.holes.remove(first / PAGE as u64..end.div_ceil(PAGE as u64));
        let grown = end > held.record.size;
        held.record.size = held.record.size.max(end);
        if grown || !held.record.dirty {
            held.record.dirty = true;
            let record = held.record.clone();
            self.log(state, &[JournalRecord::File { file, record }])?;
        }
        let block_bytes = self.geometry.block();
        let mut at = 0;
        while at < whole.len() {
            let here = first + at as u64;
            let len = (block_bytes - here % block_bytes).min((whole.len() - at) as u64) as usize;
            let key = Key { file, block: here / block_bytes };
            let page = (here % block_bytes / PAGE as u64) as u32;
            self.store_block(state, key, page, &whole[at..at + len], true)?;
            at += len;
        }
        Ok(())
    }

    /// Sets the size. Content beyond it is removed here and, at the next write-back, on the server.
    pub fn truncate(&self, file: FileId, size: u64) -> Result<CacheRead, CacheError> {
        let mut state = self.write_state();
        let held = state.files.get(&file).ok_or(CacheError::NoSuchFile)?;
        let (old, zero_from, page) = (held.record.size, held.record.zero_from, PAGE as u64);
        let edge = size / page * page;
        let mut tail = None;
        if size < old && !size.is_multiple_of(page) {
            let mut bytes = vec![0; PAGE];
            if !self.old_page(&state, file, edge, zero_from, &mut bytes)? {
                // The rest of the page comes from the server, and is cut off as `zero_from` says.
                tail = None;
            } else {
                bytes[(size % page) as usize..].fill(0);
                tail = Some(bytes);
            }
        }
        let held = state.files.get_mut(&file).ok_or(CacheError::NoSuchFile)?;
        held.record.size = size;
        held.record.zero_from = held.record.zero_from.min(size);
        held.record.dirty = true;
        held.epoch += 1;
        held.content += 1;
        held.holes = Holes::default();
        let mut records = vec![JournalRecord::File { file, record: held.record.clone() }];
        self.remove_pages_from(&mut state, file, size.div_ceil(page) * page, &mut records);
        self.log(&mut state, &records)?;
        if let Some(tail) = tail {
            self.put_dirty(&mut state, file, edge, &tail, size)?;
        }
        Ok(CacheRead::Complete)
    }

    /// Removes every page from byte `from` (a page boundary) on.
    fn remove_pages_from(
        &self,
        state: &mut State,
        file: FileId,
        from: u64,
        records: &mut Vec<JournalRecord>,
    ) {
        let block_bytes = self.geometry.block();
        let blocks: Vec<u64> = state
            .index
            .blocks(file)
            .map(|(block, _)| block)
            .filter(|block| (block + 1) * block_bytes > from)
            .collect();
        for block in blocks {
            let key = Key { file, block };
            let keep = from.saturating_sub(block * block_bytes) / PAGE as u64;
            let gone = if keep == 0 { u64::MAX } else { u64::MAX << keep };
            state.index.remove_pages(key, gone);
            records.push(match state.index.get(key) {
                Some(left) => record_of(key, left),
                None => JournalRecord::NoBlock { file, block },
            });
        }
    }

    /// Files with changes that the server does not have.
    pub fn dirty_files(&self) -> Vec<FileId> {
        let state = self.read_state();
        state
            .files
            .iter()
            .filter(|(_, held)| held.record.dirty && !held.record.removed)
            .map(|(file, _)| *file)
            .collect()
    }

    /// Avoids truncating the server's file when everything beyond the cut was written again. The new content
    /// can then be compared with the old, and only what is beyond the end is cut off.
    pub fn avoid_truncation(&self, file: FileId) -> Result<(), CacheError> {
        let mut state = self.write_state();
        let State { index, files, .. } = &mut *state;
        let Some(held) = files.get_mut(&file) else { return Ok(()) };
        let (from, to) = (held.record.zero_from, held.record.base.size.min(held.record.size));
        let per_block = u64::from(self.geometry.pages);
        let written = |page: u64| {
            let block = index.get(Key { file, block: page / per_block });
            block.is_some_and(|found| found.dirty >> (page % per_block) & 1 == 1)
        };
        if from >= to || !(from / PAGE as u64..to.div_ceil(PAGE as u64)).all(written) {
            return Ok(());
        }
        held.record.zero_from = to;
        let record = held.record.clone();
        self.log(&mut state, &[JournalRecord::File { file, record }])
    }

    /// Blocks of a file with at least one page here.
    pub(crate) fn cached_blocks(&self, file: FileId) -> Vec<u64> {
        self.read_state().index.blocks(file).map(|(number, _)| number).collect()
    }

    /// Blocks of a file in order, each with the sets of its pages that are here and that are dirty.
    pub(crate) fn pages_of(&self, file: FileId) -> Vec<(u64, u64, u64)> {
        let state = self.read_state();
        let mut blocks: Vec<_> =
            state.index.blocks(file).map(|(number, block)| (number, block.valid, block.dirty)).collect();
        blocks.sort_unstable();
        blocks
    }

    /// Files without content here and without changes of this host.
    pub(crate) fn empty_files(&self) -> Vec<(FileId, Ident)> {
        let state = self.read_state();
        let empty = |file: FileId| state.index.blocks(file).next().is_none();
        let idle = state
            .files
            .iter()
            .filter(|(file, held)| !held.record.dirty && !held.record.removed && empty(**file));
        idle.filter_map(|(file, held)| Some((*file, held.record.ident?))).collect()
    }

    /// Blocks of a file with dirty pages.
    pub fn dirty_blocks(&self, file: FileId) -> Vec<u64> {
        self.read_state()
            .index
            .blocks(file)
            .filter(|(_, block)| block.dirty != 0)
            .map(|(number, _)| number)
            .collect()
    }

    /// Dirty pages of a block, to be sent; none if it is clean by now.
    pub fn take_dirty(&self, file: FileId, block: u64) -> Result<Option<DirtyBlock>, CacheError> {
        let state = self.read_state();
        let key = Key { file, block };
        let size = state.files.get(&file).ok_or(CacheError::NoSuchFile)?.record.size;
        let Some(found) = state.index.get(key).filter(|found| found.dirty != 0) else { return Ok(None) };
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for page in page_numbers(found.dirty) {
            let at = block * self.geometry.block() + u64::from(page) * PAGE as u64;
            let mut bytes = vec![0; PAGE];
            self.read_page(&state, key, page, 0, &mut bytes, &mut Vec::new())?;
            bytes.truncate(size.saturating_sub(at).min(PAGE as u64) as usize);
            match runs.last_mut() {
                Some((start, run)) if *start + run.len() as u64 == at => run.extend(bytes),
                _ if bytes.is_empty() => {}
                _ => runs.push((at, bytes)),
            }
        }
        Ok(Some(DirtyBlock { block, generation: found.generation, pages: found.dirty, runs, size }))
    }

    /// Records that the server has what was sent, and that the file's version was `seen` after that. Pages
    /// written since stay dirty. If the file was truncated since its counter was `content`, all stay dirty
    /// and are sent again.
    ///
    /// Clean pages may be evicted and must then come from the server, so zeros begin after them from now on.
    pub fn mark_sent(
        &self,
        file: FileId,
        content: u64,
        sent: &DirtyBlock,
        seen: Option<Version>,
    ) -> Result<(), CacheError> {
        let mut state = self.write_state();
        let held = state.files.get_mut(&file).ok_or(CacheError::NoSuchFile)?;
        if held.content != content {
            return Ok(());
        }
        let end = (sent.block + 1).saturating_mul(self.geometry.block()).min(held.record.size);
        let before = held.record.clone();
        if let Some(Version { size, mtime, ctime }) = seen {
            // Content beyond its end does not come from the server.
            held.record.zero_from = held.record.zero_from.max(end.min(size));
            // Content read there earlier is older than what was sent.
            held.record.base.mtime = mtime;
            held.record.base.ctime = held.record.base.ctime.max(ctime);
        }
        let changed =
            (held.record != before).then(|| JournalRecord::File { file, record: held.record.clone() });
        let key = Key { file, block: sent.block };
        let block = state.index.mark_clean(key, sent.generation, sent.pages).map(|left| record_of(key, left));
        let records: Vec<JournalRecord> = changed.into_iter().chain(block).collect();
        self.log(&mut state, &records)
    }

    /// Marks a file as clean if the server has everything as of counter `content`. Otherwise only records the
    /// server's version.
    pub fn mark_clean(&self, file: FileId, content: u64, base: Version) -> Result<(), CacheError> {
        let mut state = self.write_state();
        let more = state.index.blocks(file).any(|(_, block)| block.dirty != 0);
        let held = state.files.get_mut(&file).ok_or(CacheError::NoSuchFile)?;
        let record = &mut held.record;
        record.base = base;
        record.stamps.clear();
        if !more && held.content == content && record.size == base.size {
            record.dirty = false;
            record.mtime = None;
        }
        if held.content == content {
            record.zero_from = record.zero_from.max(base.size.min(record.size));
        }
        let record = record.clone();
        self.log(&mut state, &[JournalRecord::File { file, record }])
    }

    /// Removes the clean pages of a file; content requested before this call is void.
    pub fn invalidate(&self, file: FileId) -> Result<(), CacheError> {
        let mut state = self.write_state();
        let Some(held) = state.files.get_mut(&file) else { return Ok(()) };
        held.epoch += 1;
        held.content += 1;
        held.holes = Holes::default();
        let clean: Vec<(u64, u64)> =
            state.index.blocks(file).map(|(block, found)| (block, found.valid & !found.dirty)).collect();
        let mut records = Vec::new();
        for (block, pages) in clean.into_iter().filter(|(_, pages)| *pages != 0) {
            let key = Key { file, block };
            state.index.remove_pages(key, pages);
            records.push(match state.index.get(key) {
                Some(left) => record_of(key, left),
                None => JournalRecord::NoBlock { file, block },
            });
        }
        self.log(&mut state, &records)
    }

    /// Sets the holes of the server's file, in order, unless content became void or left since `asked`. Pages
    /// that are here may have been written here, and are not holes.
    pub fn set_holes(&self, file: FileId, asked: ContentMark, stretches: &[Range<u64>]) -> bool {
        let mut state = self.write_state();
        let State { index, files, .. } = &mut *state;
        let Some(held) = files.get_mut(&file).filter(|held| held.mark() == asked) else { return false };
        held.holes = Holes::new(stretches, held.record.zero_from);
        let pages = u64::from(self.geometry.pages);
        for (block, found) in index.blocks(file) {
            for run in page_runs(found.valid) {
                held.holes.remove(block * pages + u64::from(run.start)..block * pages + u64::from(run.end));
            }
        }
        true
    }

    /// Removes a file and all of its pages, dirty or not.
    pub fn remove_file(&self, file: FileId) -> Result<(), CacheError> {
        let mut state = self.write_state();
        let blocks: Vec<u64> = state.index.blocks(file).map(|(block, _)| block).collect();
        for block in blocks {
            state.index.remove(Key { file, block });
        }
        if state.files.remove(&file).is_none() {
            return Ok(());
        }
        self.log(&mut state, &[JournalRecord::NoFile { file }])
    }
}
