//! Residency of lazily filled memory: which pages are present, and the source of the others.
//!
//! The RAM file decides: a page that is a hole in it has never been touched by the target, since a touch
//! raises a fault that fills the page first. In addition `filled` records which pages were ever present,
//! because a balloon can release a page, which then is zeros and not the content of the source. The order of
//! the two queries matters: first `filled`, then the file. Otherwise a page filled between the two would look
//! like a released one.

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

pub(crate) type LazyMemoryCell = RwLock<Option<Arc<LazyMemory>>>;

pub(crate) struct LazyMemory {
    pub(crate) source: Arc<dyn PageSource>,
    filled: Vec<AtomicU64>,
}

impl LazyMemory {
    pub(crate) fn new(source: Arc<dyn PageSource>) -> Self {
        let words = source.page_count().div_ceil(64) as usize;
        Self { source, filled: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Whether `page` is or was present.
    pub(crate) fn is_filled(&self, page: u64) -> bool {
        self.filled[(page / 64) as usize].load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Pages that are or were present.
    pub(crate) fn filled(&self) -> PageSet {
        let words = self.filled.iter().map(|word| word.load(Ordering::Acquire)).collect();
        let pages = self.source.page_count();
        // Only pages of the source are recorded, so the words always fit.
        PageSet::from_words(pages, words).unwrap_or_else(|| PageSet::empty(pages))
    }

    /// Records that the pages of `run` are present; returns how many non-zero pages of the source are so for
    /// the first time.
    pub(crate) fn record_filled(&self, run: PageRun) -> u64 {
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

/// First page of `run` at or after `page` that the file has (`data`) or does not have; the end of the run if
/// there is none.
pub(crate) fn next(file: &File, offset: u64, run: PageRun, page: u64, data: bool) -> io::Result<u64> {
    let at = offset + page * PAGE;
    let found = rustix::fs::seek(file, if data { SeekFrom::Data(at) } else { SeekFrom::Hole(at) });
    match found {
        // With larger pages a hole ends at the page's end at the latest; data begins where its page does.
        Ok(found) => Ok(((found - offset) / PAGE).clamp(page, run.end())),
        Err(Errno::NXIO) => Ok(run.end()),
        Err(error) => Err(error.into()),
    }
}

/// Pages that the file has.
pub(crate) fn extents(file: &File, offset: u64, pages: u64) -> io::Result<PageSet> {
    let mut set = PageSet::empty(pages);
    insert_extents(file, offset, PageRun::new(0, pages), &mut set)?;
    Ok(set)
}

/// Adds the pages of `run` that the file has to `set`.
pub(crate) fn insert_extents(file: &File, offset: u64, run: PageRun, set: &mut PageSet) -> io::Result<()> {
    let mut page = run.start;
    while page < run.end() {
        let start = next(file, offset, run, page, true)?;
        if start == run.end() {
            break;
        }
        // A page released at this instant makes an empty run; the walk has to advance in any case.
        page = next(file, offset, run, start, false)?.max(start + 1);
        set.insert_run(PageRun::new(start, page - start));
    }
    Ok(())
}
