//! Scrub: reading and checking all chunks of a benefactor again and again, slowly.
//!
//! A round reads every segment on the disk once, from front to back, within a set time; those that are begun
//! meanwhile are left to the next. Each second it reads as many bytes as are needed for that, up to a set
//! rate, so it waits by counting bytes and not by measuring reads. A damaged chunk leaves the index and is
//! reported to the manager, which has another copy made. Chunks in an object store are left out: they are
//! checked when they are read. Position and counts outlive a restart (`docs/formats/pool.md`).

use super::{
    ChunkStore,
    segment_check::{SegmentCheck, SegmentStep},
};
use crate::protocol::ScrubReport;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::Digest;
use whimbrel_wire::atomic_file;

const NAME: &str = "scrub";

/// Pace of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Time in which every chunk is to be read.
    pub every: Duration,
    /// Most bytes read a second; 0 reads nothing.
    pub rate: u64,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        Self { every: Duration::from_secs(7 * 86_400), rate: 20 << 20 }
    }
}

/// Progress of a scrub, as stored in the file. Times are seconds since 1970 by the wall clock.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Progress {
    /// The segment and the offset from which the scrub continues.
    segment: u32,
    offset: u64,
    /// The last segment of this round; none before the first is read.
    until: Option<u32>,
    started: u64,
    bytes: u64,
    damaged: u64,
    ended: u64,
    last_damaged: u64,
}

/// A scrub of one chunk store.
#[derive(Debug)]
pub struct Scrub {
    path: PathBuf,
    options: ScrubOptions,
    progress: Progress,
    /// The segment that is being read.
    segment: Option<SegmentCheck>,
    /// Bytes that may be read now; negative after a chunk that was longer.
    allowed: i64,
}

fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Scrub {
    /// Continues the scrub of the benefactor with the folder `data`. A file that cannot be read starts a
    /// round.
    pub fn open(data: &Path, options: ScrubOptions) -> Self {
        let path = data.join(NAME);
        let stored = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Progress>(&bytes).ok());
        let mut progress = stored.unwrap_or_default();
        if progress.started == 0 {
            progress.started = wall_clock();
        }
        Self { path, options, progress, segment: None, allowed: 0 }
    }

    /// Bytes a second that read what is left of `used` bytes in what is left of the set time, up to the set
    /// rate. So a benefactor that was off, or slow, makes up for it.
    fn rate(&self, used: u64) -> u64 {
        let since = wall_clock().saturating_sub(self.progress.started);
        let left = self.options.every.as_secs().saturating_sub(since).max(1);
        used.saturating_sub(self.progress.bytes).div_ceil(left).min(self.options.rate).max(1)
    }

    /// Reads what is due in one second, and returns the damaged chunks; blocks. After the last chunk, the
    /// next round starts when its time has come.
    pub fn tick(&mut self, store: &ChunkStore) -> Vec<Digest> {
        let now = wall_clock();
        let is_over = self.progress.ended >= self.progress.started;
        // A clock that was set back must not end the scrubs.
        let waits = now.abs_diff(self.progress.started) < self.options.every.as_secs();
        if self.options.rate == 0 || (is_over && waits) {
            return Vec::new();
        }
        if is_over {
            let Progress { ended, last_damaged, .. } = self.progress;
            self.progress =
                Progress { started: now.max(ended + 1), ended, last_damaged, ..Progress::default() };
        }
        if self.progress.until.is_none() {
            // A position of an earlier version of this program, which had another order, is dropped.
            let (until, bytes) = (Some(store.newest_segment()), 0);
            self.progress = Progress { segment: 0, offset: 0, until, bytes, ..self.progress.clone() };
        }
        self.allowed += i64::try_from(self.rate(store.usage().used)).unwrap_or(i64::MAX);
        let mut damaged = Vec::new();
        while (self.allowed > 0 || self.ends_here(store)) && self.step(store, &mut damaged) {}
        damaged
    }

    /// Whether the next step reads nothing, because the segment or the round is at its end.
    fn ends_here(&mut self, store: &ChunkStore) -> bool {
        self.segment(store).is_none_or(|segment| segment.is_over())
    }

    /// Checks the next record; false at the end of the round.
    fn step(&mut self, store: &ChunkStore, damaged: &mut Vec<Digest>) -> bool {
        let Some(segment) = self.segment(store) else { return self.end_round() };
        let (found, (number, offset)) = (segment.step(store), segment.position());
        let before = damaged.len();
        match found {
            SegmentStep::Passed { bytes, damaged: found } => {
                self.allowed -= bytes as i64;
                self.progress.bytes += bytes;
                self.progress.offset = offset;
                damaged.extend(found);
            }
            SegmentStep::End { damaged: found } => {
                (self.progress.segment, self.progress.offset, self.segment) = (number + 1, 0, None);
                damaged.extend(found);
            }
        }
        for chunk in &damaged[before..] {
            tracing::warn!(%chunk, "a damaged copy was found; another is made");
            self.progress.damaged += 1;
        }
        true
    }

    /// The segment that is being read, or the next one of the round.
    fn segment(&mut self, store: &ChunkStore) -> Option<&mut SegmentCheck> {
        while self.segment.is_none() {
            let (number, length) = store.segment_from(self.progress.segment)?;
            if self.progress.until.is_none_or(|until| number > until) {
                return None;
            }
            if number != self.progress.segment {
                (self.progress.segment, self.progress.offset) = (number, 0);
            }
            match SegmentCheck::open(store, number, length, self.progress.offset) {
                Ok(check) => self.segment = Some(check),
                Err(error) => {
                    // Compacted or uploaded just now; a disk that opens no files has louder reports.
                    tracing::debug!(%error, segment = number, "a segment is left out of the scrub");
                    (self.progress.segment, self.progress.offset) = (number + 1, 0);
                }
            }
        }
        self.segment.as_mut()
    }

    fn end_round(&mut self) -> bool {
        (self.segment, self.allowed) = (None, 0);
        self.progress.ended = wall_clock().max(self.progress.started);
        self.progress.last_damaged = self.progress.damaged;
        false
    }

    /// Stores the progress.
    pub fn save(&self) -> io::Result<()> {
        atomic_file::replace(&self.path, &serde_json::to_vec(&self.progress)?)
    }

    /// Progress for the status of the pool, for a store that has `used` bytes.
    pub fn report(&self, used: u64) -> ScrubReport {
        let Progress { started, bytes, damaged, ended, last_damaged, .. } = self.progress;
        let now = wall_clock();
        ScrubReport {
            age: now.saturating_sub(started),
            bytes,
            of: used,
            damaged,
            ended: (ended > 0).then(|| now.saturating_sub(ended)),
            last_damaged,
            late: used / self.options.rate.max(1) > self.options.every.as_secs(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use whimbrel_image::pack_frame::{Encoder, Kind};

    const LENGTH: usize = 10_000;

    fn store(dir: &Path, chunks: u64) -> ChunkStore {
        let store = ChunkStore::open(&dir.join("chunks"), 1 << 30, 0).unwrap();
        let mut state = 1_u64;
        for _ in 0..chunks {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as u8
            };
            let raw: Vec<u8> = (0..LENGTH).map(|_| next()).collect();
            let frame = Encoder::new(1).encode(Kind::Blob, &raw, &[raw.len()]).unwrap();
            store.put(&[(Digest::of(&raw), Bytes::from(frame))]).unwrap();
        }
        store
    }

    #[test]
    fn a_round_reads_each_chunk_once_at_the_set_rate_and_continues_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path(), 300);
        let used = store.usage().used;
        let options = ScrubOptions { every: Duration::from_secs(3600), rate: 3 * LENGTH as u64 };
        let paced = Scrub::open(dir.path(), options);
        // The clock may move on by a second here.
        let needed = used.div_ceil(3600)..=used.div_ceil(3590);
        assert!(needed.contains(&paced.rate(used)), "no faster than the set time needs");
        let late = Progress { started: wall_clock() - 3000, bytes: used / 2, ..paced.progress.clone() };
        let late = Scrub { progress: late, ..Scrub::open(dir.path(), options) };
        let needed = (used / 2).div_ceil(600)..=(used / 2 + 1).div_ceil(590);
        assert!(needed.contains(&late.rate(used)), "it makes up for lost time");
        let fast = ScrubOptions { every: Duration::from_secs(1), ..options };
        let (mut scrub, mut ticks) = (Scrub::open(dir.path(), fast), 0);
        while scrub.progress.ended == 0 {
            assert_eq!(scrub.tick(&store), []);
            ticks += 1;
            let bytes = scrub.progress.bytes;
            // A chunk longer than what is left delays the next ones; a restart forgets that.
            let longest = (LENGTH as u64 + 200) * (1 + ticks / 7);
            assert!(bytes <= ticks * options.rate + longest, "{bytes} after {ticks} seconds");
            assert!(ticks < 200, "it goes on");
            if ticks % 7 == 0 {
                scrub.save().unwrap();
                scrub = Scrub::open(dir.path(), fast);
            }
        }
        assert_eq!(scrub.progress.bytes, used, "each chunk once");
        assert!(scrub.report(used).late, "the set rate is too low for the set time");
        scrub.save().unwrap();
        let mut next = Scrub::open(dir.path(), options);
        assert!(
            next.tick(&store).is_empty() && next.progress.bytes == used,
            "the next round has its own time"
        );
    }

    #[test]
    fn a_round_starts_when_the_time_of_the_last_is_over_and_a_rate_of_nothing_reads_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path(), 3);
        let options = ScrubOptions { every: Duration::ZERO, rate: 1 << 30 };
        let mut scrub = Scrub::open(dir.path(), options);
        for _ in 0..3 {
            scrub.tick(&store);
            assert_eq!(scrub.progress.bytes, store.usage().used);
            assert!(scrub.progress.ended >= scrub.progress.started);
        }
        let other = tempfile::tempdir().unwrap();
        let mut off = Scrub::open(other.path(), ScrubOptions { rate: 0, ..options });
        off.tick(&store);
        assert_eq!(off.progress.bytes, 0);
        fs::write(other.path().join(NAME), "not a scrub").unwrap();
        let mut fresh = Scrub::open(other.path(), options);
        fresh.tick(&store);
        assert_eq!(fresh.progress.bytes, store.usage().used, "a damaged file starts a round");
    }
}
