//! Which pages of lazily filled memory are here, and where the others are.
//!
//! The truth is the RAM file: a page that is a hole in it has never been touched by the target, since
//! touching it brings a fault that fills it first. `filled` remembers beside it what was here once, because a
//! balloon takes pages away again, and such a page is zeros from then on and not what the source says. The
//! order in which the two are asked matters: first `filled`, then the file. The other way round, a page
//! filled between the two questions would look like one given away.

use crate::PageSource;
use rustix::{fs::SeekFrom, io::Errno};
use std::{
    fs::File,
    io,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};

const PAGE: u64 = PAGE_SIZE as u64;

/// Where a pager leaves its source for those who read memory.
pub(crate) type LazyMemoryCell = RwLock<Option<Arc<LazyMemory>>>;

/// Lazily filled memory.
pub(crate) struct LazyMemory {
    pub(crate) source: Arc<dyn PageSource>,
    filled: Vec<AtomicU64>,
}

impl LazyMemory {
    pub(crate) fn new(source: Arc<dyn PageSource>) -> Self {
        let words = source.page_count().div_ceil(64) as usize;
        Self { source, filled: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Whether `page` is or was here.
    pub(crate) fn is_filled(&self, page: u64) -> bool {
        self.filled[(page / 64) as usize].load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Notes that the pages of `run` are here; returns how many of the source's present pages are so for the
    /// first time.
    pub(crate) fn mark(&self, run: PageRun) -> u64 {
        let is_new = |page: &u64| {
            let bit = 1 << (page % 64);
            let before = self.filled[(page / 64) as usize].fetch_or(bit, Ordering::AcqRel);
            before & bit == 0 && self.source.present().contains(*page)
        };
        run.pages().filter(is_new).count() as u64
    }
}

impl std::fmt::Debug for LazyMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lazy({} pages)", self.source.page_count())
    }
}

/// The first page of `run` at or after `page` that the file holds (`data`) or does not hold; the run's end if
/// none.
pub(crate) fn next(file: &File, offset: u64, run: PageRun, page: u64, data: bool) -> io::Result<u64> {
    let at = offset + page * PAGE;
    let found = rustix::fs::seek(file, if data { SeekFrom::Data(at) } else { SeekFrom::Hole(at) });
    match found {
        // A hole ends at the page's end at the latest where pages are larger; data begins where its page
        // does.
        Ok(found) => Ok(((found - offset) / PAGE).clamp(page, run.end())),
        Err(Errno::NXIO) => Ok(run.end()),
        Err(error) => Err(error.into()),
    }
}

/// The pages that the file holds.
pub(crate) fn extents(file: &File, offset: u64, pages: u64) -> io::Result<PageSet> {
    let (mut set, all) = (PageSet::empty(pages), PageRun::new(0, pages));
    let mut page = 0;
    while page < pages {
        let start = next(file, offset, all, page, true)?;
        if start == pages {
            break;
        }
        // A page given away in this instant makes an empty run; stepping over it keeps the walk going.
        page = next(file, offset, all, start, false)?.max(start + 1);
        set.insert_run(PageRun::new(start, page - start));
    }
    Ok(set)
}
