//! Read history: what was read, in order, so that the next session can prefetch it while no program waits.
//!
//! It is stored in the cache's directory when a session ends (`docs/formats/session-cache.md`). It is advice
//! only: an invalid history, missing files and blocks that are here already cost nothing. It is bounded in
//! blocks when recorded, in bytes when read, and by half of the cache when used.

use crate::client::session::Core;
use crate::{
    cache::{CacheDir, FileId},
    proto::{Kind, RelPath},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};
use whimbrel_fuse::Errno;

const VERSION: u32 = 1;
/// Name of the history in the directory of the cache.
const FILE: &str = "reads";
/// Most blocks recorded in one session: 4 GiB in blocks of 64 KiB.
const MAX_BLOCKS: usize = 65_536;
/// Longest history file that is read.
const MAX_FILE_SIZE: u64 = 4 << 20;
/// Bytes fetched at once: few, so that other requests do not wait for them.
const REQUEST_SIZE: u64 = 128 << 10;
/// Time between checks whether a program waits.
const WAIT_INTERVAL: Duration = Duration::from_millis(5);

/// Adjacent blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    path: RelPath,
    first: u64,
    count: u32,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    block: u64,
    runs: Vec<Run>,
}

#[derive(Debug, Default)]
pub(in crate::client) struct ReadHistory {
    seen: HashMap<FileId, HashSet<u64>>,
    order: Vec<(FileId, u64, u32)>,
    blocks: usize,
}

impl ReadHistory {
    /// Records that blocks `first..=last` were read.
    pub(in crate::client) fn record(&mut self, file: FileId, first: u64, last: u64) {
        let seen = self.seen.entry(file).or_default();
        for block in first..=last {
            if self.blocks >= MAX_BLOCKS || !seen.insert(block) {
                continue;
            }
            self.blocks += 1;
            match self.order.last_mut() {
                Some((of, start, count)) if *of == file && *start + u64::from(*count) == block => *count += 1,
                _ => self.order.push((file, block, 1)),
            }
        }
    }
}

fn load(cache: &CacheDir, block: u64) -> io::Result<Vec<Run>> {
    let bytes = cache.load(FILE, MAX_FILE_SIZE)?;
    let record: Record = postcard::from_bytes(&bytes).map_err(io::Error::other)?;
    let fits = record.version == VERSION && record.block == block;
    Ok(if fits { record.runs } else { Vec::new() })
}

impl Core {
    /// Stores the read history for the next session; an older one stays if nothing was read.
    pub(in crate::client) fn save_read_history(&self) -> io::Result<()> {
        let order = self.read_history().order.clone();
        let named = |(file, first, count): (FileId, u64, u32)| {
            let path = self.cache.file(file).filter(|record| !record.removed)?.path;
            (!path.is_root()).then_some(Run { path, first, count })
        };
        let runs: Vec<Run> = order.into_iter().filter_map(named).collect();
        if runs.is_empty() || !self.options.has_cache() {
            return Ok(());
        }
        let record = Record { version: VERSION, block: self.cache.block_size(), runs };
        let bytes = postcard::to_allocvec(&record).map_err(io::Error::other)?;
        self.cache_dir.replace(FILE, &bytes)
    }

    /// Prefetches the blocks that an earlier session read, in a thread of its own.
    pub(in crate::client) fn prefetch_read_history(self: &Arc<Self>) {
        if !self.options.has_cache() {
            return;
        }
        let runs = match load(&self.cache_dir, self.cache.block_size()) {
            Ok(runs) => runs,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                tracing::warn!(%error, "cannot load the read history of an earlier session");
                return;
            }
        };
        let weak = self.me.clone();
        thread::spawn(move || {
            let mut room = match weak.upgrade() {
                Some(core) => core.cache.stats().capacity / 2,
                None => return,
            };
            for run in runs {
                let mut at = run.first;
                let end = run.first.saturating_add(u64::from(run.count));
                while at < end {
                    let Some(core) = weak.upgrade().filter(|core| !core.writeback.is_stopped()) else {
                        return;
                    };
                    // The names may be on their way, and then need not be requested one by one.
                    if core.connection.has_waiters() || core.walking.load(Ordering::Acquire) {
                        drop(core);
                        thread::sleep(WAIT_INTERVAL);
                        continue;
                    }
                    let size = core.cache.block_size();
                    let next = end.min(at + (REQUEST_SIZE / size).max(1));
                    let bytes = (next - at) * size;
                    if bytes > room || !core.connection.is_up() {
                        return;
                    }
                    room -= bytes;
                    // No program reads a file that was removed.
                    let Ok(brought) = core.prefetch(&run.path, at..next) else { break };
                    core.ahead_blocks.fetch_add(brought, Ordering::Relaxed);
                    at = next;
                }
            }
        });
    }

    /// Fetches blocks and returns how many were not here before.
    fn prefetch(&self, path: &RelPath, blocks: std::ops::Range<u64>) -> Result<u64, Errno> {
        let held = self.hold_names();
        let id = self.resolve(&held, path)?;
        if self.inodes().get(id).is_none_or(|node| node.attr.kind != Kind::File) {
            return Err(Errno::EINVAL);
        }
        let file = self.file_of(id)?;
        let source = self.fetch_subject(id, file).ok_or(Errno::ESTALE)?;
        drop(held);
        let (size, end) = (self.cache.block_size(), source.size.div_ceil(self.cache.block_size()));
        let missing: Vec<u64> = (blocks.start..blocks.end.min(end))
            .filter(|block| !self.cache.has_block(file, *block, source.size))
            .collect();
        assert!(missing.len() as u64 * size <= REQUEST_SIZE.max(size));
        for flight in self.fetch(&source, &missing, true) {
            flight.wait().map_err(|fail| fail.errno())?;
        }
        Ok(missing.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn reads_are_noted_once_in_their_order_and_no_more_than_fit() {
        let mut reads = ReadHistory::default();
        for (file, first, last) in [(1, 5, 6), (1, 7, 7), (2, 0, 0), (1, 5, 9), (1, 3, 3)] {
            reads.record(file, first, last);
        }
        assert_eq!(reads.order, [(1, 5, 3), (2, 0, 1), (1, 8, 2), (1, 3, 1)]);
        reads.record(3, 0, 10 * MAX_BLOCKS as u64);
        assert_eq!(reads.order.iter().map(|(.., count)| *count as usize).sum::<usize>(), MAX_BLOCKS);
    }

    #[test]
    fn a_record_of_something_else_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let cache = CacheDir::open(dir.path(), None).unwrap();
        let run = Run { path: RelPath::new(b"a").unwrap(), first: 1, count: 2 };
        let record = |version| Record { version, block: 4096, runs: vec![run.clone()] };
        let store = |record: &Record| fs::write(&path, postcard::to_allocvec(record).unwrap()).unwrap();
        store(&record(VERSION));
        assert_eq!(load(&cache, 4096).unwrap(), std::slice::from_ref(&run));
        assert_eq!(load(&cache, 8192).unwrap(), []);
        store(&record(VERSION + 1));
        assert_eq!(load(&cache, 4096).unwrap(), []);
        fs::write(&path, [0xff; 100]).unwrap();
        assert!(load(&cache, 4096).is_err());
        fs::write(&path, vec![0; MAX_FILE_SIZE as usize + 1]).unwrap();
        assert!(load(&cache, 4096).is_err());
    }
}
