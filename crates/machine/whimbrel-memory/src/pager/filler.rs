//! Filler of absent pages: into the target with `UFFDIO_COPY`, or into the template file that it maps.

use super::Shared;
use crate::{
    attachment::Backing,
    residency,
    userfaultfd::{Filled, Span},
};
use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc, thread};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_machine::PageError;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
/// Most pages fetched at a time: an extent, which is the most that a stored frame spans.
pub(super) const MAX_RUN: u64 = whimbrel_core::EXTENT_PAGES as u64;

/// Cause of a page that could not be filled.
#[derive(Debug, thiserror::Error)]
pub(super) enum FillError {
    /// The source could not provide the page; may be temporary.
    #[error(transparent)]
    Source(#[from] PageError),
    /// The page could not be stored (memory or tmpfs is full, for example); may be temporary.
    #[error("cannot store the page")]
    Store(#[source] io::Error),
    #[error("the target has ended")]
    TargetEnded,
}

/// Filler with the buffer of one thread.
#[derive(Debug)]
pub(super) struct Filler {
    shared: Arc<Shared>,
    buffer: Vec<u8>,
}

impl Filler {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, buffer: Vec::new() }
    }

    /// Pages to fetch with `page`: itself alone, if nothing has to be fetched for it.
    pub(super) fn run_around(&self, page: u64) -> PageRun {
        match self.is_missing(page) {
            true => {
                let preferred = self.shared.lazy.source.preferred_run(page);
                around(preferred, page, self.shared.inner.page_count())
            }
            false => PageRun::new(page, 1),
        }
    }

    /// Handles a fault at `page`, and fills the other pages of `run`, which are fetched with it.
    pub(super) fn fault(&mut self, page: u64, run: PageRun) -> Result<(), FillError> {
        let shared = self.shared.clone();
        if let Backing::Template(file, offset) = &shared.inner.backing {
            let one = PageRun::new(page, 1);
            if residency::next_data(file, *offset, one, page).map_err(FillError::Store)? == page {
                // The pager of another clone was faster.
                return self.record_and_wake(one);
            }
        } else if shared.lazy.is_filled(page) {
            // The page was present and a balloon released it (or this is the second fault of two, and it is
            // present).
            return self.store(PageRun::new(page, 1), &ZEROS);
        }
        if !shared.lazy.source.present().contains(page) {
            return self.store(PageRun::new(page, 1), &ZEROS);
        }
        let run = self.fetch(run)?;
        let buffer = std::mem::take(&mut self.buffer);
        let at = (page - run.start) as usize * PAGE_SIZE;
        let first = self.store(PageRun::new(page, 1), &buffer[at..at + PAGE_SIZE]);
        let result = first.and_then(|()| self.store_missing(run, &buffer));
        self.buffer = buffer;
        result
    }

    /// Fetches and fills the absent pages of `run`, at most [`MAX_RUN`] pages.
    pub(super) fn run(&mut self, run: PageRun) -> Result<(), FillError> {
        self.record_filled_by_others(run)?;
        if run.pages().all(|page| !self.is_missing(page)) {
            return Ok(());
        }
        let run = self.fetch(run)?;
        let buffer = std::mem::take(&mut self.buffer);
        let result = self.store_missing(run, &buffer);
        self.buffer = buffer;
        result
    }

    /// Fills the absent pages of `run` with content that arrived without a request.
    pub(super) fn arrived(&self, run: PageRun, content: &[u8]) -> Result<(), FillError> {
        self.store_missing(run, content)
    }

    fn fetch(&mut self, run: PageRun) -> Result<PageRun, FillError> {
        self.buffer.resize(run.bytes(), 0);
        self.shared.lazy.source.read(run, &mut self.buffer)?;
        Ok(run)
    }

    /// Zero pages do not count: they are filled when touched, or never.
    fn is_missing(&self, page: u64) -> bool {
        !self.shared.lazy.is_filled(page) && self.shared.lazy.source.present().contains(page)
    }

    fn store_missing(&self, run: PageRun, content: &[u8]) -> Result<(), FillError> {
        let mut page = run.start;
        while page < run.end() {
            let end = (page..run.end()).find(|page| !self.is_missing(*page)).unwrap_or(run.end());
            if end > page {
                let piece = PageRun::new(page, end - page);
                let at = (page - run.start) as usize * PAGE_SIZE;
                self.store(piece, &content[at..at + piece.bytes()])?;
            }
            page = end + 1;
        }
        Ok(())
    }

    fn store(&self, run: PageRun, content: &[u8]) -> Result<(), FillError> {
        match &self.shared.inner.backing {
            Backing::Template(file, offset) => self.store_in_file(file, offset + run.offset(), run, content),
            Backing::Shared(..) | Backing::Anonymous => self.store_in_target(run, content),
        }
    }

    /// Writes pages to the template. Processes that map it see a page completely or not at all, so a waiting
    /// thread never sees half of one. Two pagers that fill one page write the same bytes.
    fn store_in_file(&self, file: &File, at: u64, run: PageRun, content: &[u8]) -> Result<(), FillError> {
        file.write_all_at(content, at).map_err(FillError::Store)?;
        self.record_and_wake(run)
    }

    /// Fills pages of the target. Never overwrites: a page that is present belongs to the target.
    fn store_in_target(&self, run: PageRun, content: &[u8]) -> Result<(), FillError> {
        let mut page = run.start;
        while page < run.end() {
            let rest = &content[(page - run.start) as usize * PAGE_SIZE..];
            let at = self.shared.inner.span.start + page * PAGE_SIZE as u64;
            page += match self.shared.inner.uffd.copy(at, rest).map_err(store_error)? {
                Filled::Bytes(bytes) => {
                    let pages = (bytes / PAGE_SIZE) as u64;
                    self.record_filled(PageRun::new(page, pages));
                    pages
                }
                Filled::Present => {
                    self.record_and_wake(PageRun::new(page, 1))?;
                    1
                }
                Filled::Again if self.shared.stopped() => return Ok(()),
                Filled::Again => {
                    thread::yield_now();
                    0
                }
            };
        }
        Ok(())
    }

    /// Records pages that the pagers of other clones filled in the same template.
    fn record_filled_by_others(&self, run: PageRun) -> Result<(), FillError> {
        let Backing::Template(file, offset) = &self.shared.inner.backing else { return Ok(()) };
        let mut page = run.start;
        while page < run.end() {
            let data = residency::next_data(file, *offset, run, page).map_err(FillError::Store)?;
            page = residency::next_hole(file, *offset, run, data).map_err(FillError::Store)?;
            self.record_filled(PageRun::new(data, page - data));
        }
        Ok(())
    }

    fn record_filled(&self, run: PageRun) {
        self.shared.add_resident(self.shared.lazy.record_filled(run));
    }

    fn record_and_wake(&self, run: PageRun) -> Result<(), FillError> {
        self.record_filled(run);
        let start = self.shared.inner.span.start + run.offset();
        self.shared.inner.uffd.wake(Span { start, bytes: run.bytes() as u64 }).map_err(store_error)
    }
}

fn store_error(error: io::Error) -> FillError {
    match error.raw_os_error() {
        // No such process, or no such range.
        Some(libc::ESRCH | libc::ENOENT) => FillError::TargetEnded,
        _ => FillError::Store(error),
    }
}

/// Part of `run` to fetch with `page`: within the memory and at most [`MAX_RUN`] pages.
fn around(run: PageRun, page: u64, pages: u64) -> PageRun {
    let end = run.start.saturating_add(run.len).min(pages);
    if !(run.start..end).contains(&page) {
        return PageRun::new(page, 1);
    }
    let start = run.start.max((page + 1).saturating_sub(MAX_RUN));
    PageRun::new(start, (end - start).min(MAX_RUN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_senseless_preferred_run_still_brings_the_page() {
        let cases = [(0, u64::MAX), (u64::MAX, 5), (0, 0), (900, 100), (990, 100), (1, 5000), (50, 1)];
        for (start, len) in cases {
            for page in [0, 50, 950, 999] {
                let run = around(PageRun::new(start, len), page, 1000);
                assert!(
                    run.pages().contains(&page) && run.end() <= 1000 && run.len <= MAX_RUN,
                    "{start} {len} {page}"
                );
            }
        }
    }
}
