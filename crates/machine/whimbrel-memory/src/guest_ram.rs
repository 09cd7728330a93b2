//! A target's memory as an array of pages: dirty sets and checked copies.
//!
//! Never a reference into guest memory, and no mapping of it either: `pread` on the RAM file does not
//! allocate what it finds missing, and a file cut short or a full tmpfs is an error here where a mapping
//! would raise `SIGBUS` and end the daemon with all its machines. It costs about 1 us a page more than a copy
//! from a mapping, a millisecond an epoch.
//!
//! Not yet filled pages of lazy memory are read from the pager's source; see [`crate::residency`] for why
//! that is right at every instant. Such a read waits as long as the source does.
//!
//! A page that a balloon gives away is not in the dirty set (the kernel keeps its mark through `fallocate`):
//! what the guest called free may have any content later, the old one included.

use crate::{
    AttachError,
    attachment::{Backing, Inner, Mode},
    pagemap::{Pagemap, Scan},
    residency::{self, LazyMemory},
};
use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd,
};
use std::{
    fs::File,
    io::{self, IoSliceMut},
    os::unix::fs::FileExt,
    sync::{Arc, PoisonError},
};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};

/// The memory of an attached process. Outlives the [`Attachment`](crate::Attachment) it came from.
#[derive(Debug)]
pub struct GuestRam {
    inner: Arc<Inner>,
    pagemap: Pagemap,
    /// Given back by the caller, or scanned by a call that then failed.
    owed: PageSet,
    /// Whether pages that are not here have been armed by a scan.
    armed: bool,
}

/// Lazy memory was read before a pager brought its source.
#[derive(Debug, thiserror::Error)]
#[error("the page is not here and no pager has been started to say where it is")]
struct NoSource;

impl GuestRam {
    pub(crate) fn new(inner: Arc<Inner>) -> Result<Self, AttachError> {
        let pagemap = Pagemap::new(inner.process.file("pagemap")?, inner.span);
        let owed = PageSet::empty(inner.page_count());
        Ok(Self { inner, pagemap, owed, armed: false })
    }

    fn error(&self, action: &'static str) -> impl FnOnce(io::Error) -> PageError {
        let name = self.name().to_owned();
        move |source| PageError { array: name, action, source: source.into() }
    }

    /// A target that has ended has no pages, and would look as if nothing had been written.
    fn alive(&self, action: &'static str) -> Result<(), PageError> {
        self.inner.process.alive().map_err(|gone| PageError::new(self.name(), action, gone))
    }

    fn lazy(&self) -> Result<Arc<LazyMemory>, PageError> {
        let slot = self.inner.lazy.read().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| PageError::new(self.name(), "read", NoSource))
    }

    /// Reads from the file, and what is a hole in it from the source.
    fn read_lazy(&self, file: &File, offset: u64, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let lazy = self.lazy()?;
        let filled: Vec<bool> = run.pages().map(|page| lazy.is_filled(page)).collect();
        let mut page = run.start;
        while page < run.end() {
            let data = residency::next(file, offset, run, page, true).map_err(self.error("read"))?;
            // Nobody can take pages out of a template: what is a hole there has not come.
            let is_template = matches!(self.inner.backing, Backing::Template(..));
            let given_away = |page: u64| !is_template && filled[(page - run.start) as usize];
            for piece in pieces(PageRun::new(page, data - page), given_away) {
                let part = part(out, run, piece);
                if given_away(piece.start) { part.fill(0) } else { lazy.source.read(piece, part)? }
            }
            page = data;
            if page < run.end() {
                let hole = residency::next(file, offset, run, page, false).map_err(self.error("read"))?;
                let piece = PageRun::new(page, hole.max(page + 1) - page);
                self.read_here(piece, part(out, run, piece)).map_err(self.error("read"))?;
                page = piece.end();
            }
        }
        Ok(())
    }

    fn read_here(&self, run: PageRun, out: &mut [u8]) -> io::Result<()> {
        match &self.inner.backing {
            Backing::Shared(file, offset) => file.read_exact_at(out, offset + run.offset()),
            Backing::Template(..) | Backing::Anonymous => self.read_target(run, out),
        }
    }

    fn read_target(&self, run: PageRun, out: &mut [u8]) -> io::Result<()> {
        let pid = unistd::Pid::from_raw(self.inner.process.number());
        let mut done = 0;
        while done < out.len() {
            let base = (self.inner.span.start + run.offset()) as usize + done;
            let remote = [RemoteIoVec { base, len: out.len() - done }];
            match process_vm_readv(pid, &mut [IoSliceMut::new(&mut out[done..])], &remote)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => done += got,
            }
        }
        Ok(())
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
            Backing::Template(..) => self.pagemap.scan(Scan::TakeWrittenPrivate, &mut self.owed),
            Backing::Shared(file, offset) if self.inner.mode == Mode::Lazy && !self.armed => {
                first_scan(&mut self.pagemap, file, *offset, &mut self.owed)
            }
            Backing::Shared(..) | Backing::Anonymous => self.pagemap.scan(Scan::TakeWritten, &mut self.owed),
        };
        scanned.map_err(self.error("scan"))?;
        self.alive("scan")?;
        self.armed = true;
        Ok(self.owed.take())
    }

    fn put_back(&mut self, pages: &PageSet) {
        self.owed.union(pages);
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

/// The first scan of lazy memory, which nobody armed at the start because that would cost something a page:
/// it returns what is not here as written. Such pages are holes in the file and are left out again. The file
/// is asked after the scan, so that a page brought and written in between is not left out. When the file
/// cannot be asked they stay in, which is safe.
fn first_scan(pagemap: &mut Pagemap, file: &File, offset: u64, owed: &mut PageSet) -> io::Result<()> {
    let mut scanned = PageSet::empty(owed.len());
    let result = pagemap.scan(Scan::TakeWritten, &mut scanned);
    if let Ok(here) = residency::extents(file, offset, owed.len()) {
        scanned.intersect(&here);
    }
    owed.union(&scanned);
    result
}

/// The bytes of `piece` in the buffer for `run`.
fn part(out: &mut [u8], run: PageRun, piece: PageRun) -> &mut [u8] {
    let start = (piece.start - run.start) as usize * PAGE_SIZE;
    &mut out[start..start + piece.bytes()]
}

/// `run` cut where the answer of `kind` changes.
fn pieces(run: PageRun, kind: impl Fn(u64) -> bool) -> Vec<PageRun> {
    let mut pieces: Vec<PageRun> = Vec::new();
    for page in run.pages() {
        match pieces.last_mut() {
            Some(last) if kind(last.start) == kind(page) => last.len += 1,
            _ => pieces.push(PageRun::new(page, 1)),
        }
    }
    pieces
}
