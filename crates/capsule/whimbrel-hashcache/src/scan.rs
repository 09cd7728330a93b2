//! Scan of a source: hashes its pages and inserts their locations, with at most [`MAX_WORKERS`] threads.
//!
//! Workers take ranges from one walk, read them into buffers of their own and insert the pages that are not
//! zero. A range at the end of a file that shrank is shorter. Workers call the caller's callback, one call at
//! a time for each worker; `Break` ends the scan, and pages inserted before stay.

use crate::HashCache;
use crate::error::{CacheError, Result};
use crate::location::{Location, SourceId};
use crate::scan_ranges::{RANGE_PAGES, ScanRange, ScanRanges, WalkError};
use crate::source_files::fill;
use crate::table::Inserted;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use whimbrel_core::{Digest, PAGE_SIZE, is_zero};

const MAX_WORKERS: usize = 8;

/// Progress of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Offset in the image up to which ranges have been scanned.
    pub done: u64,
    /// Size of the image in bytes.
    pub total: u64,
    /// Pages hashed, without zero pages.
    pub pages: u64,
}

/// Result of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Number of the file.
    pub source: SourceId,
    /// False if the file was known and unchanged, so that it was not read.
    pub scanned: bool,
    /// Pages hashed, without zero pages.
    pub pages: u64,
    /// Zero pages read; holes are not read.
    pub zero: u64,
    /// Digests that were new to the table.
    pub new: u64,
    /// Existing entries that got a new location.
    pub moved: u64,
    /// Entries of other pages that were evicted.
    pub evicted: u64,
}

pub(crate) struct Job<'a> {
    pub(crate) source: SourceId,
    pub(crate) path: &'a Path,
    pub(crate) file: &'a File,
    pub(crate) total: u64,
    pub(crate) ranges: ScanRanges,
    pub(crate) progress: &'a (dyn Fn(Progress) -> ControlFlow<()> + Sync),
}

#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    pages: AtomicU64,
    zero: AtomicU64,
    new: AtomicU64,
    moved: AtomicU64,
    evicted: AtomicU64,
}

impl Tally {
    fn added(self, source: SourceId) -> Added {
        Added {
            source,
            scanned: true,
            pages: self.pages.into_inner(),
            zero: self.zero.into_inner(),
            new: self.new.into_inner(),
            moved: self.moved.into_inner(),
            evicted: self.evicted.into_inner(),
        }
    }
}

/// Runs a scan; which sources are volatile is determined once.
pub(crate) fn scan(cache: &HashCache, job: Job<'_>) -> Result<Added> {
    let volatile: Vec<bool> =
        std::iter::once(true).chain(cache.sources().ids().map(|id| cache.is_volatile(id))).collect();
    let is_volatile = |id: SourceId| volatile.get(usize::from(id.0)).copied().unwrap_or(true);
    let Job { source, path, file, total, ranges: pieces, progress } = job;
    let pieces = Mutex::new(pieces);
    let (tally, stop) = (Tally::default(), AtomicBool::new(false));
    let work = || {
        let mut buffer = vec![0; RANGE_PAGES as usize * PAGE_SIZE];
        while !stop.load(Relaxed) {
            let next = pieces.lock().unwrap_or_else(|e| e.into_inner()).next();
            let Some(piece) = next.transpose().map_err(|error| walk_error(path, error))? else { break };
            let read = read_range(file, &piece, &mut buffer);
            let read =
                read.map_err(|source| CacheError::Io { action: "read", path: path.to_owned(), source })?;
            insert_pages(cache, source, piece.offset, &buffer[..read], &is_volatile, &tally);
            tally.done.fetch_max(piece.end.min(total), Relaxed);
            let (done, pages) = (tally.done.load(Relaxed), tally.pages.load(Relaxed));
            if progress(Progress { done, total, pages }).is_break() {
                return Err(CacheError::Cancelled);
            }
        }
        Ok(())
    };
    let guarded = || work().inspect_err(|_| stop.store(true, Relaxed));
    let count = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..count).map(|_| scope.spawn(guarded)).collect();
        let own = guarded();
        let joined =
            others.into_iter().map(|other| other.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
        joined.fold(own, |all, one| all.and(one))
    })?;
    Ok(tally.added(source))
}

fn walk_error(path: &Path, error: WalkError) -> CacheError {
    let path = path.to_owned();
    match error {
        WalkError::Io(source) => CacheError::Io { action: "find the holes of", path, source },
        WalkError::Qcow2(source) => CacheError::Qcow2 { path, source },
    }
}

fn read_range(file: &File, piece: &ScanRange, buffer: &mut [u8]) -> io::Result<usize> {
    let wanted = piece.pages as usize * PAGE_SIZE;
    fill(file, piece.offset, &mut buffer[..wanted])
}

fn insert_pages(
    cache: &HashCache,
    source: SourceId,
    offset: u64,
    bytes: &[u8],
    volatile: &impl Fn(SourceId) -> bool,
    tally: &Tally,
) {
    for (i, page) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
        if is_zero(page) {
            tally.zero.fetch_add(1, Relaxed);
            continue;
        }
        tally.pages.fetch_add(1, Relaxed);
        let location = Location { source, offset: offset + (i * PAGE_SIZE) as u64 };
        match cache.insert(&Digest::of(page), location, volatile) {
            Inserted::Known => {}
            Inserted::Moved => _ = tally.moved.fetch_add(1, Relaxed),
            Inserted::Added => _ = tally.new.fetch_add(1, Relaxed),
            Inserted::Evicted => {
                tally.new.fetch_add(1, Relaxed);
                tally.evicted.fetch_add(1, Relaxed);
            }
        }
    }
}
