//! File content: open, read, write, truncate, close and sync.
//!
//! Reads come from the cache and wait only for blocks that are missing. Writes go to the cache; the policy
//! decides when the server gets them.

use super::fetcher::FetchSubject;
use crate::client::{
    connection::server_connection::CallFailure,
    leases::lease_state::Reliance,
    policy::{Glob, Policy},
    prefetch::readahead::Reader,
    session::{Core, errno_of},
};
use crate::{
    cache::{CacheError, CacheRead, FileId, FileRecord},
    proto::{FileRef, Kind, PAGE, RelPath, Sync, SyncCall, Time},
};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_fuse::{Access, Errno, Opened, Result};

/// Largest readahead in bytes.
const MAX_READAHEAD: u64 = 8 << 20;
/// Files of at least this size bypass the page cache if their name says that they are disks.
const MIN_DIRECT_SIZE: u64 = 1 << 20;
/// Pause before a full cache without anything to write back is tried again.
const FETCH_TIME: Duration = Duration::from_millis(20);
/// Attempts to read a file that changes meanwhile.
const TRIES: usize = 8;

pub(in crate::client) struct FileHandle {
    reader: Mutex<Reader>,
}

impl Core {
    /// The cached file of an inode, added if there is none.
    pub(in crate::client) fn file_of(&self, id: u64) -> Result<FileId> {
        let mut nodes = self.inodes();
        let node = nodes.get(id).ok_or(Errno::ESTALE)?;
        if node.attr.kind != Kind::File {
            return Err(Errno::EINVAL);
        }
        if let Some(file) = node.file {
            return Ok(file);
        }
        let (attr, path) = (node.attr, nodes.path(id).unwrap_or_default());
        let known = lock(&self.known_files).get(&attr.ident).copied();
        let file = match known.and_then(|file| Some((file, self.cache.file(file)?))) {
            Some((file, record)) => {
                if record.base != attr.version() && !record.dirty && !record.is_newer_than(&attr) {
                    self.adopt_version(file, &attr);
                }
                self.cache.update_file(file, |record| record.path = path).map_err(errno_of)?;
                file
            }
            None => {
                let record = FileRecord {
                    path,
                    ident: Some(attr.ident),
                    made_by: None,
                    base: attr.version(),
                    size: attr.size,
                    zero_from: attr.size,
                    mtime: None,
                    stamps: Vec::new(),
                    dirty: false,
                    removed: false,
                };
                let file = self.cache.add_file(record).map_err(errno_of)?;
                lock(&self.known_files).insert(attr.ident, file);
                file
            }
        };
        if let Some(node) = nodes.get_mut(id) {
            node.file = Some(file);
        }
        Ok(file)
    }

    pub(in crate::client) fn fetch_subject(&self, id: u64, file: FileId) -> Option<FetchSubject> {
        let record = self.cache.file(file)?;
        let path = self.inodes().path(id).unwrap_or(record.path);
        Some(FetchSubject { file, file_ref: FileRef { path, ident: record.ident? }, size: record.zero_from })
    }

    pub(in crate::client) fn open(&self, id: u64, access: Access) -> Result<(Opened, FileHandle)> {
        let path = self.inodes().path(id).ok_or(Errno::ESTALE)?;
        if (access.writes() || access.truncates()) && self.policy_of(&path) == Policy::None {
            return Err(Errno::EROFS);
        }
        self.revalidate(id)?;
        let file = self.file_of(id)?;
        if access.truncates() {
            self.truncate(id, 0)?;
        }
        let record = self.cache.file(file).ok_or(Errno::ESTALE)?;
        let epoch = self.cache.content_epoch(file);
        let (direct, whole) = {
            let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
            let has = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
            (record.size >= MIN_DIRECT_SIZE && has(&settings.direct), has(&settings.whole))
        };
        let keep_cache = {
            let mut nodes = self.inodes();
            let node = nodes.get_mut(id).ok_or(Errno::ESTALE)?;
            node.opens += 1;
            let same = node.epoch == epoch;
            node.epoch = epoch;
            same
        };
        // The hint of this file takes precedence over the patterns of the session.
        let note = self.hint_of(id, file, record.size);
        if note.and_then(|note| note.fetch_whole).unwrap_or(whole) {
            self.fetch_all(id, file);
        }
        self.query_holes(id, file, record.zero_from);
        if !direct && access.reads() {
            self.prefetch_siblings(id, file, record.zero_from);
        }
        let block = self.cache.block_size();
        let handle = FileHandle { reader: Mutex::new(Reader::new(MAX_READAHEAD / block)) };
        // A file opened for reading has nothing to send at close.
        let no_flush = !access.writes() && !access.truncates();
        Ok((Opened { direct, parallel_writes: direct, keep_cache, no_flush, handle: 0 }, handle))
    }

    pub(in crate::client) fn fetch_all(&self, id: u64, file: FileId) {
        // A file larger than the cache would evict itself before it is read.
        let room = self.cache.stats().capacity;
        if let Some(source) = self.fetch_subject(id, file).filter(|source| source.size <= room) {
            let blocks: Vec<u64> = (0..source.size.div_ceil(self.cache.block_size())).collect();
            self.fetch(&source, &blocks, true);
        }
    }

    pub(in crate::client) fn read(
        &self,
        id: u64,
        handle: Option<&FileHandle>,
        offset: u64,
        size: u32,
    ) -> Result<Vec<u8>> {
        self.check_lock(id)?;
        self.revalidate_leased(id);
        let file = self.file_of(id)?;
        let record = self.cache.file(file).ok_or(Errno::ESTALE)?;
        let len = u64::from(size).min(record.size.saturating_sub(offset));
        let mut out = vec![0; len as usize];
        if len == 0 {
            return Ok(out);
        }
        self.reads[1].fetch_add(1, Ordering::Relaxed);
        match self.cache.read(file, offset, &mut out).map_err(errno_of)? {
            CacheRead::Complete => {
                self.read_ahead(id, file, record.zero_from, handle, (offset, len));
                self.reads[0].fetch_add(1, Ordering::Relaxed);
            }
            CacheRead::Missing(blocks) => {
                let next = self.next_reads(file, record.zero_from, handle, (offset, len));
                self.fetch_missing(id, file, offset, &mut out, blocks, next)?;
            }
        }
        Ok(out)
    }

    /// Content is read without a question for as long as it is leased. A file that was replaced stays
    /// readable for who has it open.
    fn revalidate_leased(&self, id: u64) {
        let recalled = self.inodes().get(id).is_some_and(|node| node.recalled);
        if recalled || self.reliance() == Reliance::Nothing {
            // The read says what is wrong, if anything is.
            let _ = self.revalidate(id);
        }
    }

    /// Whether a range is in the cache.
    pub(in crate::client) fn has_content(&self, id: u64, offset: u64, size: u32) -> bool {
        let Some(file) = self.inodes().get(id).and_then(|node| node.file) else { return false };
        let Some(record) = self.cache.file(file) else { return false };
        let mut out = vec![0; u64::from(size).min(record.size.saturating_sub(offset)) as usize];
        matches!(self.cache.read(file, offset, &mut out), Ok(CacheRead::Complete))
    }

    /// Records a read, and fetches ahead what is likely to be read next.
    pub(in crate::client) fn read_ahead(
        &self,
        id: u64,
        file: FileId,
        size: u64,
        handle: Option<&FileHandle>,
        read: (u64, u64),
    ) {
        let next = self.next_reads(file, size, handle, read);
        if !next.is_empty()
            && let Some(source) = self.fetch_subject(id, file)
        {
            next.into_iter().for_each(|range| _ = self.fetch(&source, &range.collect::<Vec<_>>(), true));
        }
    }

    /// Records a read; returns the blocks that are likely to be read next.
    fn next_reads(
        &self,
        file: FileId,
        size: u64,
        handle: Option<&FileHandle>,
        (offset, len): (u64, u64),
    ) -> Vec<Range<u64>> {
        let block = self.cache.block_size();
        let (first, last, total) = (offset / block, (offset + len - 1) / block, size.div_ceil(block));
        self.read_history().record(file, first, last);
        handle.map_or_else(Vec::new, |handle| lock(&handle.reader).read(first, last, total))
    }

    /// Fetches what is missing of these blocks and fills `out`. The rest of the blocks, and the blocks `next`
    /// if this read is one of a sequence, are requested after the pages that are waited for.
    fn fetch_missing(
        &self,
        id: u64,
        file: FileId,
        offset: u64,
        out: &mut [u8],
        mut missing: Vec<u64>,
        next: Vec<Range<u64>>,
    ) -> Result<()> {
        let _waits = self.connection.waiting();
        let mut next = Some(next);
        for _ in 0..TRIES {
            self.flush_changes(id)?;
            let source = self.fetch_subject(id, file).ok_or(Errno::ESTALE)?;
            let epoch = self.cache.epoch(file);
            let mut brought = Vec::new();
            let read = (offset, out.len() as u64);
            // Others get only whole blocks from the shared cache.
            let whole = self.shared.is_some();
            let flights = match whole {
                true => self.fetch(&source, &missing, false),
                false => self.fetch_read(&source, &missing, read),
            };
            if let Some(next) = next.take() {
                let room = match whole {
                    true => 0,
                    // The next reads want the block, whatever room there is.
                    false if !next.is_empty() => u64::MAX,
                    false => self.room(),
                };
                self.fetch_rest(&source, &missing, read, room);
                next.into_iter().for_each(|range| _ = self.fetch(&source, &range.collect::<Vec<_>>(), true));
            }
            for flight in flights {
                match flight.wait() {
                    Ok(content) => brought.push(content),
                    // The file changed meanwhile: the content is outdated.
                    Err(CallFailure::Outdated) => {}
                    Err(fail) => return Err(fail.errno()),
                }
            }
            match self.cache.read(file, offset, out).map_err(errno_of)? {
                CacheRead::Complete => return Ok(()),
                CacheRead::Missing(still) => {
                    // A cache full of dirty blocks stores nothing else: take each page from the reply or the
                    // cache.
                    let whole = self.fill_from_replies(file, offset, out, &brought)?;
                    if whole && self.cache.epoch(file) == epoch {
                        return Ok(());
                    }
                    missing = still;
                }
            }
        }
        Err(Errno::EIO)
    }

    fn fill_from_replies(
        &self,
        file: FileId,
        offset: u64,
        out: &mut [u8],
        brought: &[(u64, std::sync::Arc<Vec<u8>>)],
    ) -> Result<bool> {
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            let next = ((at / PAGE as u64 + 1) * PAGE as u64).min(end);
            let place = &mut out[(at - offset) as usize..(next - offset) as usize];
            if self.cache.read(file, at, place).map_err(errno_of)? != CacheRead::Complete {
                let piece = brought.iter().find_map(|(start, content)| {
                    let from = usize::try_from(at.checked_sub(*start)?).ok()?;
                    content.get(from..from + place.len())
                });
                let Some(piece) = piece else { return Ok(false) };
                place.copy_from_slice(piece);
            }
            at = next;
        }
        Ok(true)
    }

    pub(in crate::client) fn write(&self, id: u64, offset: u64, data: &[u8]) -> Result<u32> {
        self.check_lock(id)?;
        let path = self.inodes().path(id);
        if path.as_ref().is_some_and(|path| self.policy_of(path) == Policy::None) {
            return Err(Errno::EROFS);
        }
        let file = self.file_of(id)?;
        let deadline = Instant::now() + Duration::from_secs(self.settings().patience);
        if data.is_empty() {
            return Ok(0);
        }
        self.checked_end(offset, data.len() as u64)?;
        for round in 0.. {
            match self.cache.write(file, offset, data) {
                Ok(CacheRead::Complete) => break,
                Ok(CacheRead::Missing(_)) if round > TRIES => return Err(Errno::EIO),
                Ok(CacheRead::Missing(blocks)) => {
                    if round > 1 {
                        // The fetched blocks were not stored, for lack of frames.
                        self.flush_all(false)?;
                    }
                    self.fetch_blocks(id, file, &blocks)?;
                }
                Err(CacheError::Full) if Instant::now() < deadline => self.make_room(round)?,
                Err(error) => return Err(errno_of(error)),
            }
        }
        self.content_changed(id, file)?;
        Ok(data.len() as u32)
    }

    /// End of a range of a file, if the server can have a file of that size.
    pub(super) fn checked_end(&self, offset: u64, length: u64) -> Result<u64> {
        let end = offset.checked_add(length).filter(|end| *end <= self.connection.size_max());
        end.ok_or(Errno::EFBIG)
    }

    /// Writes back, which alone makes room. Files that were removed and are still open are not written back:
    /// if nothing else is dirty, there is no room until they are closed.
    fn make_room(&self, round: usize) -> Result<()> {
        if self.cache.dirty_files().is_empty() {
            // Blocks that are being fetched are in use for a moment.
            std::thread::sleep(FETCH_TIME);
            return if round < TRIES { Ok(()) } else { Err(Errno::ENOSPC) };
        }
        self.flush_all(false).map_err(|errno| if errno == Errno::EIO { Errno::ENOSPC } else { errno })
    }

    fn fetch_blocks(&self, id: u64, file: FileId, blocks: &[u64]) -> Result<()> {
        let _waits = self.connection.waiting();
        self.flush_changes(id)?;
        let source = self.fetch_subject(id, file).ok_or(Errno::ESTALE)?;
        for flight in self.fetch(&source, blocks, false) {
            match flight.wait() {
                Ok(_) | Err(CallFailure::Outdated) => {}
                Err(fail) => return Err(fail.errno()),
            }
        }
        Ok(())
    }

    /// Records that the content was changed here, now.
    fn content_changed(&self, id: u64, file: FileId) -> Result<()> {
        let now = Time::now();
        {
            let mut nodes = self.inodes();
            if let Some(node) = nodes.get_mut(id) {
                node.mtime = Some(now);
            }
            // What is written through is sent before the file is closed.
            if nodes.path(id).is_some_and(|path| self.policy_of(&path) == Policy::Back) {
                self.claim(&nodes, &[id]);
            }
        }
        self.writeback.file_written(file);
        let explicit = self.cache.file(file).is_some_and(|record| record.mtime.is_some());
        if explicit {
            self.cache.update_file(file, |record| record.mtime = None).map_err(errno_of)?;
        }
        Ok(())
    }

    pub(in crate::client) fn truncate(&self, id: u64, size: u64) -> Result<()> {
        let path = self.inodes().path(id);
        if path.as_ref().is_some_and(|path| self.policy_of(path) == Policy::None) {
            return Err(Errno::EROFS);
        }
        self.checked_end(size, 0)?;
        let file = self.file_of(id)?;
        if self.cache.file(file).is_some_and(|record| record.size == size) {
            return Ok(());
        }
        self.cache.truncate(file, size).map_err(errno_of)?;
        if let (Some(node), Some(epoch)) = (self.inodes().get_mut(id), self.cache.content_epoch(file)) {
            // The kernel truncated its own pages.
            node.epoch = Some(epoch);
        }
        self.content_changed(id, file)
    }

    /// Path and file of an inode, if it has one. Fails once if what was written was put aside as a conflict.
    fn written_file(&self, id: u64) -> Result<Option<(Option<RelPath>, FileId)>> {
        let mut nodes = self.inodes();
        if nodes.get_mut(id).is_some_and(|node| std::mem::take(&mut node.conflicted)) {
            return Err(Errno::ESTALE);
        }
        Ok(nodes.get(id).and_then(|node| node.file).map(|file| (nodes.path(id), file)))
    }

    /// Called when a descriptor is closed.
    pub(in crate::client) fn close(&self, id: u64) -> Result<()> {
        let Some((path, file)) = self.written_file(id)? else { return Ok(()) };
        match path {
            Some(path) if self.policy_of(&path) == Policy::Through => self.flush_file(file, false),
            _ => Ok(()),
        }
    }

    /// Called when the last descriptor of an open is closed.
    pub(in crate::client) fn released(&self, id: u64) -> Result<()> {
        let gone = {
            let mut nodes = self.inodes();
            let Some(node) = nodes.get_mut(id) else { return Ok(()) };
            node.opens = node.opens.saturating_sub(1);
            node.lock_lost &= node.opens > 0;
            // A file may have names that were never looked up, so it is dropped only if it was removed.
            let removed = |file: &FileId| self.cache.file(*file).is_some_and(|record| record.removed);
            let last = node.opens == 0 && node.names.is_empty();
            let file = if last && node.file.as_ref().is_some_and(removed) { node.file.take() } else { None };
            nodes.remove_unused(id);
            file
        };
        match gone {
            Some(file) => self.cache.remove_file(file).map_err(errno_of),
            None => Ok(()),
        }
    }

    /// Makes a file durable where its policy requires.
    pub(in crate::client) fn fsync(&self, id: u64) -> Result<()> {
        self.check_lock(id)?;
        let Some((path, file)) = self.written_file(id)? else { return Ok(()) };
        let Some(path) = path else { return Ok(()) };
        if self.policy_of(&path) != Policy::Through {
            return self.cache.sync().map_err(errno_of);
        }
        self.sync_through(&path, file)
    }

    /// Makes a file durable on the server. Pages are clean before that under write-through, so a server that
    /// restarted since it got them is an error.
    fn sync_through(&self, path: &RelPath, file: FileId) -> Result<()> {
        let sent = || lock(&self.writeback.unsynced).take_file(file);
        let (mut since, dirty) = (sent(), self.cache.file(file).is_some_and(|record| record.dirty));
        let synced = self.flush_file(file, true).and_then(|()| {
            let meanwhile = sent();
            since = since.into_iter().chain(meanwhile).min();
            if dirty && meanwhile.is_none() {
                return Ok(());
            }
            self.connection.runtime().block_on(self.server_sync(file))
        });
        match since {
            Some(since) if synced.is_err() => lock(&self.writeback.unsynced).file_sent(file, since),
            Some(since) => self.check_restarts(since, path)?,
            None => {}
        }
        synced
    }

    /// Makes the names of a directory durable where its policy requires.
    pub(in crate::client) fn fsync_dir(&self, id: u64) -> Result<()> {
        let path = self.inodes().path(id).unwrap_or_default();
        match self.policy_of(&path) {
            Policy::None => Ok(()),
            Policy::Back => self.cache.sync().map_err(errno_of),
            Policy::Through => {
                self.flush_changes(id)?;
                self.sync_dir(id)
            }
        }
    }

    pub(in crate::client) async fn server_sync(&self, file: FileId) -> Result<()> {
        let Some(record) = self.cache.file(file) else { return Ok(()) };
        let Some(ident) = record.ident else { return Ok(()) };
        let sync = Sync { file: FileRef { path: record.path, ident } };
        let synced = self.connection.send::<SyncCall, _>(sync, bytes::Bytes::new(), None).await.0;
        synced.map(drop).map_err(|fail| fail.errno())
    }
}
