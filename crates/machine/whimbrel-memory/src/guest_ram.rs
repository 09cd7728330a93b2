//! Guest RAM: a target's memory as a page array with dirty sets and checked copies.
//!
//! Guest memory is neither referenced nor mapped: `pread` on the RAM file does not allocate absent pages, and
//! a truncated file or a full tmpfs is an error here, where a mapping would raise `SIGBUS` and end the daemon
//! with all its machines. It costs about 1 us a page more than a copy from a mapping, a millisecond an epoch.
//!
//! Absent pages of lazy memory are read from the pager's source; [`crate::residency`] explains why that is
//! right at every instant. Such a read waits as long as the source does.
//!
//! A page that a balloon releases is not in the dirty set (the kernel retains its mark through `fallocate`):
//! memory that the guest called free may have any content later, including the old one.

use crate::{
    AttachError,
    attachment::{Backing, Inner, Mode},
    pagemap::{Pagemap, Scan},
    residency::{self, LazyMemory},
    scan_order::ScanOrder,
    tracked_blocks::TrackedBlocks,
};
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, PoisonError},
};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};

/// Memory of an attached process. Outlives its [`Attachment`](crate::Attachment).
#[derive(Debug)]
pub struct GuestRam {
    inner: Arc<Inner>,
    pagemap: Pagemap,
    /// Dirty pages that the caller put back, or of a scan that then failed.
    pending_dirty: PageSet,
    /// Blocks of shared memory that a scan has armed.
    tracked: TrackedBlocks,
}

/// Lazy memory was read before a pager set its source.
#[derive(Debug, thiserror::Error)]
#[error("the page is absent and no pager has been started")]
struct NoSource;

impl GuestRam {
    pub(crate) fn new(inner: Arc<Inner>, order: ScanOrder) -> Result<Self, AttachError> {
        let pid = inner.process.number();
        let file = inner.pagemap.try_clone().map_err(AttachError::io(pid, "open the page map"))?;
        let pagemap = Pagemap::new(file, inner.span, order);
        let pages = inner.page_count();
        Ok(Self { inner, pagemap, pending_dirty: PageSet::empty(pages), tracked: TrackedBlocks::none(pages) })
    }

    fn error(&self, action: &'static str) -> impl FnOnce(io::Error) -> PageError {
        let name = self.name().to_owned();
        move |source| PageError { array: name, action, source: source.into() }
    }

    /// A target that has ended has no pages, and would appear unwritten.
    fn alive(&self, action: &'static str) -> Result<(), PageError> {
        self.inner.process.alive().map_err(|gone| PageError::new(self.name(), action, gone))
    }

    fn lazy(&self) -> Result<Arc<LazyMemory>, PageError> {
        let slot = self.inner.lazy.read().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| PageError::new(self.name(), "read", NoSource))
    }

    /// Reads from the file, and the file's holes from the source.
    fn read_lazy(&self, file: &File, offset: u64, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let lazy = self.lazy()?;
        let filled: Vec<bool> = run.pages().map(|page| lazy.is_filled(page)).collect();
        let mut page = run.start;
        while page < run.end() {
            let data = residency::next_data(file, offset, run, page).map_err(self.error("read"))?;
            // A balloon cannot release pages of a template, so a hole there has not been filled.
            let is_template = matches!(self.inner.backing, Backing::Template(..));
            let given_away = |page: u64| !is_template && filled[(page - run.start) as usize];
            for piece in split_runs(PageRun::new(page, data - page), given_away) {
                let part = part(out, run, piece);
                if given_away(piece.start) { part.fill(0) } else { lazy.source.read(piece, part)? }
            }
            page = data;
            if page < run.end() {
                let hole = residency::next_hole(file, offset, run, page).map_err(self.error("read"))?;
                let piece = PageRun::new(page, hole.max(page + 1) - page);
                self.read_here(piece, part(out, run, piece)).map_err(self.error("read"))?;
                page = piece.end();
            }
        }
        Ok(())
    }

    fn read_here(&self, run: PageRun, out: &mut [u8]) -> io::Result<()> {
        match (&self.inner.backing, &self.inner.memory) {
            (Backing::Shared(file, offset), _) => file.read_exact_at(out, offset + run.offset()),
            // The target's own page, or that of the file if it has none.
            (Backing::Template(..) | Backing::Anonymous, Some(memory)) => {
                memory.read_exact_at(out, self.inner.span.start + run.offset())
            }
            (Backing::Template(..) | Backing::Anonymous, None) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl PageArray for GuestRam {
    fn name(&self) -> &str {
        "memory"
    }

    fn page_count(&self) -> u64 {
        self.inner.page_count()
    }

    fn populated(&mut self) -> Result<PageSet, PageError> {
        let pages = self.page_count();
        let mut set = match &self.inner.backing {
            Backing::Shared(file, offset) | Backing::Template(file, offset) => {
                residency::extents(file, *offset, pages).map_err(self.error("list"))?
            }
            Backing::Anonymous => PageSet::empty(pages),
        };
        if !matches!(self.inner.backing, Backing::Shared(..)) {
            let scanned = self.pagemap.scan(Scan::Anonymous, &mut set);
            scanned.map_err(self.error("list"))?;
        }
        if self.inner.mode == Mode::Lazy {
            set.union(self.lazy()?.source.present());
        }
        self.alive("list")?;
        Ok(set)
    }

    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        let scanned = match &self.inner.backing {
            Backing::Template(..) => self.pagemap.scan(Scan::TakeWrittenPrivate, &mut self.pending_dirty),
            Backing::Shared(file, offset) => {
                scan_shared(&mut self.pagemap, (file, *offset), &mut self.tracked, &mut self.pending_dirty)
            }
            Backing::Anonymous => self.pagemap.scan(Scan::TakeWritten, &mut self.pending_dirty),
        };
        scanned.map_err(self.error("scan"))?;
        self.alive("scan")?;
        Ok(self.pending_dirty.take())
    }

    fn put_back(&mut self, pages: &PageSet) {
        self.pending_dirty.union(pages);
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let end = run.start.checked_add(run.len);
        let fits =
            end.is_some_and(|end| end <= self.page_count()) && out.len() == run.len as usize * PAGE_SIZE;
        if !fits {
            return Err(self.error("read")(io::ErrorKind::InvalidInput.into()));
        }
        match (&self.inner.backing, self.inner.mode) {
            (Backing::Shared(file, offset) | Backing::Template(file, offset), Mode::Lazy) => {
                self.read_lazy(file, *offset, run, out)
            }
            _ => self.read_here(run, out).map_err(self.error("read")),
        }
    }
}

/// Scans the blocks that hold data. What the target touches meanwhile in another block is in the next scan:
/// its page is there by then, and not armed.
///
/// The first scan of a block arms its absent pages and returns them as written. Such pages are holes in the
/// file and are removed again. The file is queried after the scan, so that a page filled and written in
/// between is not removed. If the query fails they stay in, which is safe.
fn scan_shared(
    pagemap: &mut Pagemap,
    (file, offset): (&File, u64),
    tracked: &mut TrackedBlocks,
    owed: &mut PageSet,
) -> io::Result<()> {
    let new = tracked.find_new(file, offset)?;
    for run in tracked.runs() {
        pagemap.scan_run(Scan::TakeWritten, run, owed)?;
    }
    if new.is_empty() {
        return Ok(());
    }
    let mut found = PageSet::empty(owed.len());
    let scanned = new.into_iter().try_for_each(|run| {
        pagemap.scan_run(Scan::TakeWritten, run, &mut found)?;
        tracked.insert(run);
        Ok(())
    });
    if residency::insert_present(file, offset, &found, owed).is_err() {
        owed.union(&found);
    }
    scanned
}

/// Part of the buffer for `run` that belongs to `piece`.
fn part(out: &mut [u8], run: PageRun, piece: PageRun) -> &mut [u8] {
    let start = (piece.start - run.start) as usize * PAGE_SIZE;
    &mut out[start..start + piece.bytes()]
}

/// Splits `run` where the result of `kind` changes.
fn split_runs(run: PageRun, kind: impl Fn(u64) -> bool) -> Vec<PageRun> {
    let mut pieces: Vec<PageRun> = Vec::new();
    for page in run.pages() {
        match pieces.last_mut() {
            Some(last) if kind(last.start) == kind(page) => last.len += 1,
            _ => pieces.push(PageRun::new(page, 1)),
        }
    }
    pieces
}
