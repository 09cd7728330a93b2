//! Source records: the records of source files in the table, read and written word by word.
//!
//! The checksum is cleared first and written last, so a reader finds no record while it is being written. Two
//! processes could still choose the same free record; [`SourceLock`] prevents that if all of them take it.
//! Without the lock, the loser's entries point into the winner's file and are dropped on use.

use crate::error::{CacheError, Result, io_at};
use crate::format::{Geometry, RECORD_SIZE, RECORD_SUM_AT, SourceRecord};
use crate::location::SourceId;
use crate::mapped_table::Mapped;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

const WORDS: usize = RECORD_SIZE / 8;
const HITS: usize = 0;
const DROPPED: usize = 1;
const SUM: usize = RECORD_SUM_AT / 8;
/// Attempts to get the lock. Another process has it for a few reads and writes, or a pass over the table.
const TRIES: u32 = 1000;

#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceRecords<'a> {
    words: &'a [AtomicU64],
    geometry: Geometry,
}

impl<'a> SourceRecords<'a> {
    pub(crate) fn new(map: &'a Mapped, geometry: Geometry) -> Self {
        Self { words: map.words(), geometry }
    }

    /// Number of every record, used or free.
    pub(crate) fn ids(&self) -> impl Iterator<Item = SourceId> + use<> {
        (1..=self.geometry.sources() as u16).map(SourceId)
    }

    /// Words of a record; none for an invalid number in a damaged entry.
    fn record(&self, id: SourceId) -> Option<&'a [AtomicU64]> {
        let known = (1..=self.geometry.sources()).contains(&u32::from(id.0));
        known.then(|| &self.words[self.geometry.record_word(id.0)..][..WORDS])
    }

    /// Number that changes when the record does.
    pub(crate) fn stamp(&self, id: SourceId) -> u64 {
        self.record(id).map_or(0, |words| words[SUM].load(SeqCst))
    }

    /// Decodes a record; none if it is free, damaged or just being written.
    pub(crate) fn read(&self, id: SourceId) -> Option<SourceRecord> {
        let words = self.record(id)?;
        let mut bytes = [0; RECORD_SIZE];
        for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(SeqCst).to_le_bytes());
        }
        SourceRecord::decode(&bytes)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (SourceId, SourceRecord)> {
        self.ids().filter_map(|id| Some((id, self.read(id)?)))
    }

    /// Writes a record without its counters.
    pub(crate) fn write(&self, id: SourceId, record: &SourceRecord) -> Result<()> {
        let length = record.path.as_os_str().len();
        let limit = crate::format::MAX_PATH;
        let bytes = record.encode().ok_or(CacheError::PathTooLong { length, limit })?;
        self.store(id, &bytes);
        Ok(())
    }

    /// Frees a record and resets its counters.
    pub(crate) fn clear(&self, id: SourceId) {
        self.store(id, &[0; RECORD_SIZE]);
        if let Some(words) = self.record(id) {
            words[HITS].store(0, Relaxed);
            words[DROPPED].store(0, Relaxed);
        }
    }

    fn store(&self, id: SourceId, bytes: &[u8; RECORD_SIZE]) {
        let Some(words) = self.record(id) else { return };
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at * 8 + i]));
        words[SUM].store(0, SeqCst);
        (SUM + 1..WORDS).for_each(|at| words[at].store(word(at), SeqCst));
        words[SUM].store(word(SUM), SeqCst);
    }

    pub(crate) fn hit(&self, id: SourceId) {
        self.record(id).inspect(|words| _ = words[HITS].fetch_add(1, Relaxed));
    }

    /// Counts a wrong entry of this source.
    pub(crate) fn dropped(&self, id: SourceId) {
        self.record(id).inspect(|words| _ = words[DROPPED].fetch_add(1, Relaxed));
    }

    /// Number of hits and of dropped entries.
    pub(crate) fn counters(&self, id: SourceId) -> (u64, u64) {
        self.record(id).map_or((0, 0), |words| (words[HITS].load(Relaxed), words[DROPPED].load(Relaxed)))
    }
}

/// Lock of the source list between processes. It belongs to the open file, so threads of one process need a
/// mutex as well.
#[derive(Debug)]
pub(crate) struct SourceLock<'a>(&'a File);

impl<'a> SourceLock<'a> {
    /// Takes the lock, or fails after ten seconds: a stopped process must not block others.
    pub(crate) fn take(file: &'a File, path: &Path) -> Result<Self> {
        for _ in 0..TRIES {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(10)),
                Err(error) => return io_at("lock", path, Err(error.into())),
            }
        }
        Err(CacheError::Busy { path: path.to_owned() })
    }
}

impl Drop for SourceLock<'_> {
    fn drop(&mut self) {
        // Fails only for an invalid descriptor; closing the file would unlock it too.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}
