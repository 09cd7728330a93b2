//! Pager: fills the pages of lazy memory when the target touches them, and in the background before that.
//!
//! Some threads handle faults, several at once: first the page that is waited for, then its neighbours in the
//! same frame. Another prefetches at lower priority and pauses while a fault is being handled. Filled
//! pages do
//! not count as written.
//!
//! A source that fails, or a full tmpfs, ends no process: the fault stays pending, [`PagerState::stalled`]
//! has the reason, and the fill is retried with growing pauses. When the target ends, so do the threads.
//!
//! A pager that stops leaves the registration in place: threads that touch an absent page then wait for the
//! next pager, which wakes them all at its start, so faults that a dead process had read are not lost. The
//! registration stays even when every page is present, since ending it would mark all memory as written; the
//! fault thread then only handles first touches of zero pages, without the source.
//!
//! Zero pages are filled like others, with `UFFDIO_COPY`: on tmpfs `UFFDIO_ZEROPAGE` allocates a page as
//! well, and leaves it marked as written.

mod fault_queue;
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
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet, lock};
use whimbrel_machine::PageError;
use whimbrel_metrics::{Histogram, bounds};

/// Time after the start in which faults count as touched, see [`Pager::touched`].
const TOUCH_WINDOW: Duration = Duration::from_secs(10);

/// Times for which the targets of this process waited for pages, since it started. One for all pagers, as
/// only their sum is asked for.
pub static PAGE_WAITS: Histogram = Histogram::new(bounds::PAUSE);

/// Running pager, which stops when dropped.
#[derive(Debug)]
pub struct Pager {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Progress of a pager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagerState {
    /// Pages of the source that are not zero.
    pub total: u64,
    /// Number of these pages that are present.
    pub resident: u64,
    /// Faults handled, including those of zero pages.
    pub faults: u64,
    /// Reason why pages cannot be filled at the moment; cleared when they can again.
    pub stalled: Option<String>,
    /// State of the background thread.
    pub prefetch: Prefetch,
    /// Reason why faults are not handled any more.
    pub end: Option<PagerEnd>,
}

/// State of the background thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// No pages are wanted, or all wanted ones are present.
    Idle,
    /// Pages are being fetched.
    Running,
    /// Paused by the caller.
    Paused,
}

/// Reason why a pager ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagerEnd {
    /// Stopped by [`Pager::stop`].
    Stopped,
    /// The target has ended, or no longer maps the memory.
    TargetEnded,
}

/// Cause of a pager that cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The attachment was not created with [`Mode::Lazy`].
    #[error("the memory was not attached for lazy pages")]
    NotLazy,
    /// Another pager serves this attachment.
    #[error("another pager serves this memory")]
    Served,
    /// The source and the memory differ in length.
    #[error("the source has {source_pages} pages and the memory {pages}")]
    WrongLength {
        /// Pages of the source.
        source_pages: u64,
        /// Pages of the memory.
        pages: u64,
    },
    /// The operating system returned an error.
    #[error("cannot {action}")]
    Io {
        /// Verb of the operation: `start a thread`, …
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

#[derive(Debug)]
struct Shared {
    inner: Arc<Inner>,
    lazy: Arc<LazyMemory>,
    started: Instant,
    /// Eventfd that wakes the fault thread from its poll.
    wakeup: OwnedFd,
    stop: AtomicBool,
    /// Number of faults that are being handled.
    busy: AtomicUsize,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// A thread that fills pages, and can be stalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Filling {
    Faults,
    Prefetch,
}

#[derive(Debug)]
struct Progress {
    state: PagerState,
    /// Why each thread is stalled, the fault thread first.
    stalled: [Option<String>; 2],
    touched: PageSet,
    /// Pages requested of the background thread and not fetched yet.
    wanted: PageSet,
    /// Threads that have not ended.
    threads: usize,
}

impl Pager {
    /// Starts to handle the faults of `attachment` from `source`, including those that wait already.
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
        if inner.has_pager.swap(true, Ordering::AcqRel) {
            return Err(StartError::Served);
        }
        let here = residency::extents(file, *offset, pages).map_err(io_error("list the filled pages"));
        here.and_then(|here| Self::serve(inner.clone(), source, &here))
            .inspect_err(|_| inner.has_pager.store(false, Ordering::Release))
    }

    fn serve(inner: Arc<Inner>, source: Arc<dyn PageSource>, here: &PageSet) -> Result<Self, StartError> {
        let lazy = Arc::new(LazyMemory::new(source));
        let before = lock(&inner.filled_before).take();
        let present = before.iter().flat_map(PageSet::runs).chain(here.runs());
        let resident = present.map(|run| lazy.record_filled(run)).sum();
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

    /// Present state and progress.
    pub fn state(&self) -> PagerState {
        self.shared.progress().state.clone()
    }

    /// Fetches `pages` in the background, in addition to those requested before.
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

    /// Fetches all pages in the background.
    pub fn prefetch_all(&self) {
        self.prefetch(&PageSet::full(self.shared.inner.page_count()));
    }

    /// Stores `content` in the absent pages of `run`. A present page is not changed, so content that arrives
    /// late never overwrites what the target wrote.
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

    /// Pages of the source that have never been present.
    pub fn missing(&self) -> PageSet {
        let mut missing = self.shared.lazy.source.present().clone();
        for page in self.shared.lazy.source.present().iter().filter(|page| self.shared.lazy.is_filled(*page))
        {
            missing.remove(page);
        }
        missing
    }

    /// Pauses the background thread after its current run, or lets it continue.
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

    /// Waits until every page of the source is present; false after `timeout`, or if the pager ended before
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

    /// Pages that the target touched in the first ten seconds: the prefetch list for the next time.
    pub fn touched(&self) -> PageSet {
        self.shared.progress().touched.clone()
    }

    /// Stops all threads, after the source reads in progress. Memory stays readable through
    /// [`GuestRam`](crate::GuestRam); threads of the target that touch absent pages wait for the next pager.
    pub fn stop(mut self) -> PagerState {
        self.end_threads();
        self.state()
    }

    /// Tells all threads to end, and waits at most `patience` for the source reads in progress. False if some
    /// go on: then nobody may have the memory yet, and [`Pager::stop`] waits for the rest.
    pub fn end_within(&mut self, patience: Duration) -> bool {
        if !self.threads.is_empty() {
            self.shared.end(PagerEnd::Stopped);
            let progress = self.shared.progress();
            let waited =
                self.shared.changed.wait_timeout_while(progress, patience, |progress| progress.threads > 0);
            if waited.unwrap_or_else(PoisonError::into_inner).0.threads > 0 {
                return false;
            }
        }
        self.end_threads();
        true
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
        self.shared.inner.has_pager.store(false, Ordering::Release);
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
        let (touched, wanted) = (PageSet::empty(pages), PageSet::empty(pages));
        let progress = Progress { state, stalled: [None, None], touched, wanted, threads: 0 };
        Arc::new(Self {
            inner,
            lazy,
            started: Instant::now(),
            wakeup: bell,
            stop: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Every update of the state is a single assignment, so a panicking holder leaves no partial update.
        lock(&self.progress)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends both threads; the first reason remains.
    fn end(&self, reason: PagerEnd) {
        self.progress().state.end.get_or_insert(reason);
        self.stop.store(true, Ordering::Release);
        self.wake_faults();
        self.changed.notify_all();
    }

    /// Counts a thread that begins, or one that ends.
    fn count_thread(&self, begins: bool) {
        let mut progress = self.progress();
        progress.threads = if begins { progress.threads + 1 } else { progress.threads - 1 };
        self.changed.notify_all();
    }

    /// Wakes the thread that reads faults.
    fn wake_faults(&self) {
        // The counter is read back at each wake-up, and one that is set already is as good.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    fn add_resident(&self, pages: u64) {
        if pages > 0 {
            self.progress().state.resident += pages;
            self.changed.notify_all();
        }
    }

    fn set_stalled(&self, filling: Filling, stalled: Option<String>) {
        let mut progress = self.progress();
        progress.stalled[filling as usize] = stalled;
        let stalled = progress.stalled.iter().flatten().next().cloned();
        if progress.state.stalled != stalled {
            if let Some(reason) = &stalled {
                tracing::warn!(pid = self.inner.process.number(), reason, "the pager is stalled");
            }
            progress.state.stalled = stalled;
            self.changed.notify_all();
        }
    }
}

/// A thread of the pager, which counts until its end, also if it panics or never begins.
struct Counted(Arc<Shared>);

impl Counted {
    fn begin(shared: Arc<Shared>) -> Self {
        shared.count_thread(true);
        Self(shared)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count_thread(false);
    }
}

fn spawn(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, StartError> {
    let start = |name: &str, body: fn(Arc<Shared>)| {
        let counted = Counted::begin(shared.clone());
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let counted = counted;
                body(counted.0.clone());
            })
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
