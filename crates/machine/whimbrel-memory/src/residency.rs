//! Residency of lazily filled memory: which pages are present, and the source of the others.
//!
//! The RAM file decides: a page that is a hole in it has never been touched by the target, since a touch
//! raises a fault that fills the page first. In addition `filled` records which pages were ever present,
//! because a balloon can release a page, which then is zeros and not the content of the source. The order of
//! the two queries matters: first `filled`, then the file. Otherwise a page filled between the two would look
//! like a released one.

use crate::{PageSource, page_cache};
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

/// First page of `run` at or after `page` that the file has; the end of the run if there is none.
pub(crate) fn next_data(file: &File, offset: u64, run: PageRun, page: u64) -> io::Result<u64> {
    seek(file, offset, run, page, SeekFrom::Data)
}

/// First page of `run` at or after `page` that the file does not have; the end of the run if there is none.
/// Takes time in proportion to the run.
pub(crate) fn next_hole(file: &File, offset: u64, run: PageRun, page: u64) -> io::Result<u64> {
    let left = run.end().saturating_sub(page);
    match page_cache::pages_with_content(file, offset + page * PAGE, left) {
        Ok(pages) if pages >= left => Ok(run.end()),
        // There is one within the run, or the file is none of a tmpfs.
        _ => seek(file, offset, run, page, SeekFrom::Hole),
    }
}

/// A search for a hole passes each page of the file up to it, also beyond the run.
fn seek(file: &File, offset: u64, run: PageRun, page: u64, to: impl Fn(u64) -> SeekFrom) -> io::Result<u64> {
    match rustix::fs::seek(file, to(offset + page * PAGE)) {
        // With larger pages a hole ends at the page's end at the latest; data begins where its page does.
        Ok(found) => Ok(((found - offset) / PAGE).clamp(page, run.end())),
        Err(Errno::NXIO) => Ok(run.end()),
        Err(error) => Err(error.into()),
    }
}

/// Pages that the file has.
pub(crate) fn extents(file: &File, offset: u64, pages: u64) -> io::Result<PageSet> {
    let mut set = PageSet::empty(pages);
    insert_present(file, offset, &PageSet::full(pages), &mut set)?;
    Ok(set)
}

/// Adds those of `pages` that the file has to `set`. One pass over the file, however many runs there are: a
/// search for a hole may pass all of them, so what it has passed is known for the next.
pub(crate) fn insert_present(file: &File, offset: u64, pages: &PageSet, set: &mut PageSet) -> io::Result<()> {
    let all = PageRun::new(0, pages.len());
    let mut data = PageRun::new(0, 0);
    for run in pages.runs() {
        let mut page = run.start;
        while page < run.end() {
            if page >= data.end() {
                let start = seek(file, offset, all, page, SeekFrom::Data)?;
                let end = match start == all.end() {
                    true => start,
                    // A page released at this instant makes an empty run; the walk has to advance in any
                    // case.
                    false => seek(file, offset, all, start, SeekFrom::Hole)?.max(start + 1),
                };
                data = PageRun::new(start, end - start);
            }
            let (from, to) = (page.max(data.start), run.end().min(data.end()));
            if from >= to {
                break;
            }
            set.insert_run(PageRun::new(from, to - from));
            page = to;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    /// A file of so many pages on a tmpfs, of which these have content.
    fn file(pages: u64, content: &[u64]) -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(pages * PAGE).unwrap();
        content.iter().for_each(|page| file.write_all_at(b"x", page * PAGE).unwrap());
        file
    }

    fn set(pages: u64, all: &[u64]) -> PageSet {
        let mut set = PageSet::empty(pages);
        for page in all {
            set.insert(*page);
        }
        set
    }

    #[test]
    fn pages_with_content_are_found_in_any_runs() {
        let content = [0, 1, 2, 5, 8, 9, 10, 11, 19];
        let file = file(20, &content);
        assert_eq!(extents(&file, 0, 20).unwrap(), set(20, &content));
        let mut found = set(20, &[3]);
        let asked = set(20, &[1, 4, 5, 6, 9, 11, 12, 18, 19]);
        insert_present(&file, 0, &asked, &mut found).unwrap();
        assert_eq!(found, set(20, &[1, 3, 5, 9, 11, 19]));
        // From an offset, and of a file that ends early.
        let mut found = PageSet::empty(20);
        insert_present(&file, 8 * PAGE, &PageSet::full(20), &mut found).unwrap();
        assert_eq!(found, set(20, &[0, 1, 2, 3, 11]));
    }

    #[test]
    fn a_hole_is_searched_within_the_run_only() {
        let file = file(20, &[0, 1, 2, 3, 4, 5, 6, 9]);
        let run = PageRun::new(1, 5);
        assert_eq!(next_hole(&file, 0, run, 1).unwrap(), 6);
        assert_eq!(next_hole(&file, 0, PageRun::new(1, 8), 2).unwrap(), 7);
        assert_eq!(next_hole(&file, 0, PageRun::new(8, 4), 8).unwrap(), 8);
        assert_eq!(next_data(&file, 0, PageRun::new(7, 2), 7).unwrap(), 9);
        assert_eq!(next_data(&file, 0, PageRun::new(7, 9), 7).unwrap(), 9);
        assert_eq!(page_cache::pages_with_content(&file, 0, 20).unwrap(), 8);
        assert_eq!(page_cache::pages_with_content(&file, 7 * PAGE, 0).unwrap(), 0);
    }
}
