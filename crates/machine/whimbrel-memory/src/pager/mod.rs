//! Brings the pages of lazy memory: when the target touches them, and ahead of that in the background.
//!
//! Two threads. One answers faults: first the page that is waited for, then its neighbours in the same frame.
//! The other prefetches at lower priority and steps aside while a fault is being served. Filled pages do not
//! count as written.
//!
//! A source that fails, or a full tmpfs, kills nobody: the fault stays pending, [`PagerState::stalled`] says
//! why, and it is tried again with growing pauses. When the target ends, so do the threads.
//!
//! A pager that stops leaves the registration in place: threads that touch a missing page then wait until the
//! next pager, which wakes them all at its start, so faults that a dead process had read are not lost. The
//! registration stays even when every page is here, since ending it would mark all memory as written; the
//! fault thread then only answers first touches of zero pages, without the source.
//!
//! Zero pages are filled like others, with `UFFDIO_COPY`: on tmpfs `UFFDIO_ZEROPAGE` allocates a page all the
//! same, and leaves it marked as written.

mod faults;
mod filler;
mod prefetch;
mod retry;

use crate::{
    Attachment, PageSource,
    attachment::{Backing, Inner, Mode},
    residency::{self, LazyMemory},
};
use filler::{FillError, Filler};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageError;

/// Faults in this time after the start count as touched, see [`Pager::touched`].
const TOUCH_WINDOW: Duration = Duration::from_secs(10);

/// A running pager; stops when dropped.
#[derive(Debug)]
pub struct Pager {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// How far a pager is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagerState {
    /// Pages of the source that are not zero.
    pub total: u64,
    /// Those of them that are here.
    pub resident: u64,
    /// Faults answered, zero pages included.
    pub faults: u64,
    /// Why pages cannot be had at the moment; cleared when they can again.
    pub stalled: Option<String>,
    /// What the background thread does.
    pub prefetch: Prefetch,
    /// Why no faults are answered any more.
    pub end: Option<PagerEnd>,
}

/// What the background thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// Nothing was asked of it yet, or everything that was is here.
    Idle,
    /// Fetching.
    Running,
    /// Told to wait.
    Paused,
}

/// Why a pager ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagerEnd {
    /// [`Pager::stop`].
    Stopped,
    /// The target has ended, or no longer maps the memory.
    TargetEnded,
}

/// A pager cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The attachment was not made with [`Mode::LazyMemory`].
    #[error("the memory was not attached for lazy pages")]
    NotLazy,
    /// Another pager serves this attachment.
    #[error("another pager serves this memory")]
    Served,
    /// The source is of another length than the memory.
    #[error("the source has {source_pages} pages and the memory {pages}")]
    WrongLength {
        /// Pages of the source.
        source_pages: u64,
        /// Pages of the memory.
        pages: u64,
    },
    /// The operating system refused.
    #[error("cannot {action}")]
    Io {
        /// `start a thread`, …
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

#[derive(Debug)]
struct Shared {
    inner: Arc<Inner>,
    lazy: Arc<LazyMemory>,
    started: Instant,
    /// Wakes the fault thread out of its poll.
    bell: OwnedFd,
    stop: AtomicBool,
    /// A fault is being served.
    busy: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    state: PagerState,
    touched: PageSet,
    /// Asked of the background thread and not fetched yet.
    wanted: PageSet,
}

impl Pager {
    /// Starts serving the faults of `attachment` from `source`, those that wait already included.
    pub fn start(attachment: &Attachment, source: Arc<dyn PageSource>) -> Result<Self, StartError> {
        let inner = attachment.inner.clone();
        let (pages, source_pages) = (inner.page_count(), source.page_count());
        let set_pages = source.present().len();
        let (Backing::Shared(file, offset) | Backing::Template(file, offset)) = &inner.backing else {
            return Err(StartError::NotLazy);
        };
        if inner.mode != Mode::Lazy {
            return Err(StartError::NotLazy);
        }
        if pages != source_pages || pages != set_pages {
            return Err(StartError::WrongLength { source_pages, pages });
        }
        if inner.served.swap(true, Ordering::AcqRel) {
            return Err(StartError::Served);
        }
        let here = residency::extents(file, *offset, pages).map_err(io_error("list the filled pages"));
        here.and_then(|here| Self::serve(inner.clone(), source, &here))
            .inspect_err(|_| inner.served.store(false, Ordering::Release))
    }

    fn serve(inner: Arc<Inner>, source: Arc<dyn PageSource>, here: &PageSet) -> Result<Self, StartError> {
        let lazy = Arc::new(LazyMemory::new(source));
        let resident = here.runs().map(|run| lazy.mark(run)).sum();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = bell.map_err(|e| io_error("make an eventfd")(e.into()))?;
        *inner.lazy.write().unwrap_or_else(PoisonError::into_inner) = Some(lazy.clone());
        let shared = Shared::new(inner, lazy, bell, resident);
        let pager = Self { threads: spawn(&shared)?, shared };
        pager
            .shared
            .inner
            .uffd
            .wake(pager.shared.inner.span)
            .map_err(io_error("wake the waiting threads"))?;
        Ok(pager)
    }

    /// How far it is.
    pub fn state(&self) -> PagerState {
        self.shared.progress().state.clone()
    }

    /// Fetches `pages` in the background, beside what was asked before.
    pub fn prefetch(&self, pages: &PageSet) {
        let mut wanted = pages.clone();
        wanted.intersect(self.shared.lazy.source.present());
        let mut progress = self.shared.progress();
        progress.wanted.union(&wanted);
        if progress.state.prefetch == Prefetch::Idle {
            progress.state.prefetch = Prefetch::Running;
        }
        self.shared.changed.notify_all();
    }

    /// Fetches everything in the background.
    pub fn prefetch_all(&self) {
        self.prefetch(&PageSet::full(self.shared.inner.page_count()));
    }

    /// Stores `content` where pages of `run` are missing. A page that is here stays as it is, so content that
    /// took long to come never overwrites what the target wrote.
    pub fn fill(&self, run: PageRun, content: &[u8]) -> Result<(), PageError> {
        let failed = |source: io::Error| PageError::new("memory", "fill", source);
        let within = run.start.checked_add(run.len).is_some_and(|end| end <= self.shared.inner.page_count());
        if !within || content.len() != run.bytes() {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        Filler::new(self.shared.clone()).arrived(run, content).map_err(|error| match error {
            FillError::Source(error) => error,
            FillError::Store(error) => failed(error),
            FillError::TargetEnded => failed(io::Error::other("the target has ended")),
        })
    }

    /// The pages of the source that have not been here yet.
    pub fn missing(&self) -> PageSet {
        let mut missing = self.shared.lazy.source.present().clone();
        for page in self.shared.lazy.source.present().iter().filter(|page| self.shared.lazy.is_filled(*page))
        {
            missing.remove(page);
        }
        missing
    }

    /// Lets the background thread wait after the run it is fetching, or go on.
    pub fn pause_prefetch(&self, pause: bool) {
        let mut progress = self.shared.progress();
        let idle = progress.wanted.is_empty();
        progress.state.prefetch = match (pause, idle) {
            (true, _) => Prefetch::Paused,
            (false, true) => Prefetch::Idle,
            (false, false) => Prefetch::Running,
        };
        self.shared.changed.notify_all();
    }

    /// Waits until every page of the source is here; false if `timeout` passed or the pager ended before
    /// that.
    pub fn wait_resident(&self, timeout: Duration) -> bool {
        let waits = |p: &mut Progress| p.state.resident < p.state.total && p.state.end.is_none();
        let (progress, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.progress(), timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        progress.state.resident == progress.state.total
    }

    /// The pages that the target touched in the first ten seconds: what to fetch first the next time.
    pub fn touched(&self) -> PageSet {
        self.shared.progress().touched.clone()
    }

    /// Stops both threads, after the reads of the source that are under way. Memory stays readable through
    /// [`GuestRam`](crate::GuestRam); threads of the target that touch missing pages wait for the next pager.
    pub fn stop(mut self) -> PagerState {
        self.end_threads();
        self.state()
    }

    fn end_threads(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        self.shared.end(PagerEnd::Stopped);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a pager thread panicked");
            }
        }
        self.shared.inner.served.store(false, Ordering::Release);
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.end_threads();
    }
}

impl Shared {
    fn new(inner: Arc<Inner>, lazy: Arc<LazyMemory>, bell: OwnedFd, resident: u64) -> Arc<Self> {
        let state = PagerState {
            total: lazy.source.present().count(),
            resident,
            faults: 0,
            stalled: None,
            prefetch: Prefetch::Idle,
            end: None,
        };
        let pages = inner.page_count();
        let progress = Progress { state, touched: PageSet::empty(pages), wanted: PageSet::empty(pages) };
        Arc::new(Self {
            inner,
            lazy,
            started: Instant::now(),
            bell,
            stop: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Every update of the state is a single assignment, so a panicking holder leaves nothing half done.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends both threads; the first reason stays.
    fn end(&self, reason: PagerEnd) {
        self.progress().state.end.get_or_insert(reason);
        self.stop.store(true, Ordering::Release);
        // The counter cannot overflow with a handful of rings, and a bell that rings already is as good.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        self.changed.notify_all();
    }

    fn add_resident(&self, pages: u64) {
        if pages > 0 {
            self.progress().state.resident += pages;
            self.changed.notify_all();
        }
    }

    fn set_stalled(&self, stalled: Option<String>) {
        let mut progress = self.progress();
        if progress.state.stalled != stalled {
            if let Some(reason) = &stalled {
                tracing::warn!(pid = self.inner.process.number(), reason, "lazy pages stall");
            }
            progress.state.stalled = stalled;
            self.changed.notify_all();
        }
    }
}

fn spawn(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, StartError> {
    let start = |name: &str, body: fn(Arc<Shared>)| {
        let shared = shared.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(shared))
            .map_err(io_error("start a thread"))
    };
    let faults = start("page-faults", faults::run)?;
    match start("page-prefetch", prefetch::run) {
        Ok(prefetch) => Ok(vec![faults, prefetch]),
        Err(error) => {
            shared.end(PagerEnd::Stopped);
            Err(error)
        }
    }
}

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Io { action, source }
}
