//! What a cache can say of itself. Counters are kept in the table file, so they go on over restarts and
//! processes; they are not checked and worth what a damaged file makes of them.

use crate::location::SourceId;
use crate::{HashCache, SourceKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A word of the counter page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counter {
    Hits = 0,
    Misses = 1,
    Dropped = 2,
    Evictions = 3,
    ReadAhead = 4,
}

/// The counter page.
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

/// The whole cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the table file.
    pub bytes: u64,
    /// Entries there are.
    pub slots: u64,
    /// Entries that point somewhere.
    pub used: u64,
    /// Pages asked for and found, right content.
    pub hits: u64,
    /// Of these, found only because the page before was: the table did not know them.
    pub read_ahead: u64,
    /// Pages asked for and not found.
    pub misses: u64,
    /// Entries that were wrong when used.
    pub dropped: u64,
    /// Entries that made room for others.
    pub evictions: u64,
    /// Source files there can be.
    pub max_sources: u32,
    /// Source files there are.
    pub sources: Vec<SourceStats>,
}

/// One source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStats {
    /// Its number.
    pub id: SourceId,
    /// Where it is.
    pub path: PathBuf,
    /// What it is.
    pub kind: SourceKind,
    /// Bytes it had when it was scanned.
    pub size: u64,
    /// Entries that point into it.
    pub pages: u64,
    /// Pages the last scan found in it, without zero pages.
    pub scanned: u64,
    /// Whether a scan came to its end.
    pub complete: bool,
    /// Pages used from it.
    pub hits: u64,
    /// Entries of it that were wrong when used.
    pub dropped: u64,
}

impl HashCache {
    /// Counts everything; walks over the whole table.
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
