//! Statistics of a cache. The counters are in the table file, so they continue over restarts and processes;
//! nothing checks them, so damage can falsify them.

use crate::location::SourceId;
use crate::{HashCache, SourceKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug, Clone, Copy)]
pub(crate) enum Counter {
    Hits = 0,
    Misses = 1,
    Dropped = 2,
    Evictions = 3,
    ReadAhead = 4,
}

/// Counter page of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counters<'a>(pub(crate) &'a [AtomicU64]);

impl Counters<'_> {
    pub(crate) fn add(&self, counter: Counter, by: u64) {
        self.0[counter as usize].fetch_add(by, Relaxed);
    }

    fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Relaxed)
    }
}

/// Statistics of the complete cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the table file.
    pub bytes: u64,
    /// Entries of the table.
    pub slots: u64,
    /// Entries that have a location.
    pub used: u64,
    /// Requested pages that were found with the right content.
    pub hits: u64,
    /// Hits found only because the page before was a hit; the table did not have them.
    pub read_ahead: u64,
    /// Requested pages that were not found.
    pub misses: u64,
    /// Entries that proved wrong on use.
    pub dropped: u64,
    /// Entries that were replaced by others.
    pub evictions: u64,
    /// Source records of the table.
    pub max_sources: u32,
    /// Statistics of each source file.
    pub sources: Vec<SourceStats>,
}

/// Statistics of one source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStats {
    /// Number of the source.
    pub id: SourceId,
    /// Path of the file.
    pub path: PathBuf,
    /// Format of the file.
    pub kind: SourceKind,
    /// Size in bytes at the last scan.
    pub size: u64,
    /// Entries that point into it.
    pub pages: u64,
    /// Pages that the last scan found, without zero pages.
    pub scanned: u64,
    /// Whether a scan has finished.
    pub complete: bool,
    /// Pages read from the file.
    pub hits: u64,
    /// Entries of the file that proved wrong on use.
    pub dropped: u64,
}

impl HashCache {
    /// Collects all statistics; walks over the complete table.
    pub fn stats(&self) -> Stats {
        let (sources, counters, geometry) = (self.sources(), self.counters(), self.geometry());
        let pages = self.table().count_by_source(geometry.sources());
        let source = |(id, record): (SourceId, crate::format::SourceRecord)| {
            let (hits, dropped) = sources.counters(id);
            SourceStats {
                id,
                kind: record.kind,
                size: record.size,
                pages: pages[usize::from(id.0)],
                scanned: record.pages,
                complete: record.changed != (0, 0),
                hits,
                dropped,
                path: record.path,
            }
        };
        Stats {
            bytes: geometry.file_size(),
            slots: geometry.slots(),
            used: pages.iter().sum(),
            hits: counters.get(Counter::Hits),
            read_ahead: counters.get(Counter::ReadAhead),
            misses: counters.get(Counter::Misses),
            dropped: counters.get(Counter::Dropped),
            evictions: counters.get(Counter::Evictions),
            max_sources: geometry.sources(),
            sources: sources.all().map(source).collect(),
        }
    }
}
