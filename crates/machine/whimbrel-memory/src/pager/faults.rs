//! Fault threads of the pager: fill the pages that the target waits for.
//!
//! One thread reads the faults; up to [`WORKERS_MAX`] workers, started as they are needed, serve them, each
//! one page at a time: first that page, then those fetched with it. A source that takes long for one page
//! keeps no other waiting.

use super::{
    Filling, PagerEnd, Shared,
    fault_queue::FaultQueue,
    filler::{FillError, Filler},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread::{self, Scope},
    time::{Duration, Instant},
};
use whimbrel_core::{PAGE_SIZE, lock};

/// Most faults that are served at once. A guest has about one a virtual CPU at a time.
const WORKERS_MAX: usize = 8;

pub(super) fn run(shared: Arc<Shared>) {
    let queue = Mutex::new(FaultQueue::new());
    let server = Server { shared: &shared, queue, changed: Condvar::new() };
    thread::scope(|scope| {
        let end = server.serve(scope);
        // Before the workers are joined, which may wait for the source.
        shared.end(end);
        drop(server.queue());
        server.changed.notify_all();
    });
}

struct Server<'a> {
    shared: &'a Arc<Shared>,
    queue: Mutex<FaultQueue>,
    /// Wakes workers that wait for a page.
    changed: Condvar,
}

impl Server<'_> {
    fn queue(&self) -> MutexGuard<'_, FaultQueue> {
        lock(&self.queue)
    }

    /// Reads faults until the pager ends.
    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> PagerEnd {
        let (mut addresses, mut workers) = (Vec::new(), 0);
        while !self.shared.stopped() {
            if self.wait() {
                return PagerEnd::TargetEnded;
            }
            addresses.clear();
            if let Err(error) = self.shared.inner.uffd.faults(&mut addresses) {
                // Reading does not involve the target; its failure means a broken descriptor and would repeat
                // for ever.
                tracing::error!(%error, "cannot read page faults");
                return PagerEnd::TargetEnded;
            }
            let most = WORKERS_MAX.min(workers + self.add(&addresses));
            while workers < most {
                let worker = thread::Builder::new().name("page-fault".into());
                match worker.spawn_scoped(scope, || self.work()) {
                    Ok(_) => workers += 1,
                    Err(error) if workers == 0 => {
                        tracing::warn!(%error, "no thread for page faults: they are served one after the other");
                        self.work_off(&mut Filler::new(self.shared.clone()), false);
                        break;
                    }
                    Err(_) => break,
                }
            }
        }
        // A worker may have found that the target has ended.
        self.shared.progress().state.end.unwrap_or(PagerEnd::Stopped)
    }

    /// Adds faults and retries to the queue. Returns how many workers more they need.
    fn add(&self, addresses: &[u64]) -> usize {
        let (start, count) = (self.shared.inner.span.start, self.shared.inner.page_count());
        let pages = addresses.iter().filter_map(|address| address.checked_sub(start));
        let pages = pages.map(|at| at / PAGE_SIZE as u64).filter(|page| *page < count);
        let mut queue = self.queue();
        pages.for_each(|page| queue.add(page));
        queue.add_due(Instant::now());
        self.changed.notify_all();
        queue.workers_needed()
    }

    /// Waits for faults, a wake-up, or the next retry. True if the target has ended.
    fn wait(&self) -> bool {
        let inner = &self.shared.inner;
        let pidfd = inner.process.pidfd();
        let mut fds = [
            PollFd::new(&inner.uffd, PollFlags::IN),
            PollFd::new(&self.shared.wakeup, PollFlags::IN),
            PollFd::new(&pidfd, PollFlags::IN),
        ];
        let timeout = self.queue().retry_wait(Instant::now()).map(timespec);
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        let ended = !fds[2].revents().is_empty();
        // Empty unless somebody has rung.
        let _ = rustix::io::read(&self.shared.wakeup, &mut [0; 8]);
        ended
    }

    /// A worker: serves faults until the pager ends.
    fn work(&self) {
        self.work_off(&mut Filler::new(self.shared.clone()), true);
    }

    /// Serves faults; `stays` says whether to wait for more.
    fn work_off(&self, filler: &mut Filler, stays: bool) {
        let mut queue = self.queue();
        while !self.shared.stopped() {
            let Some(page) = queue.take() else {
                if !stays {
                    return;
                }
                queue.set_idle(true);
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.set_idle(false);
                continue;
            };
            drop(queue);
            let run = filler.run_around(page);
            queue = self.queue();
            if queue.begin(page, run) {
                self.shared.busy.fetch_add(1, Ordering::AcqRel);
                drop(queue);
                let begun = Instant::now();
                let filled = filler.fault(page, run);
                self.shared.busy.fetch_sub(1, Ordering::AcqRel);
                queue = self.record(page, filled, begun.elapsed());
            }
        }
    }

    /// Records how a fault ended.
    fn record(&self, page: u64, filled: Result<(), FillError>, took: Duration) -> MutexGuard<'_, FaultQueue> {
        let mut queue = self.queue();
        match filled {
            Ok(()) => {
                super::PAGE_WAITS.observe_time(took);
                let all_well = queue.filled(page);
                self.count(page);
                if all_well {
                    self.shared.set_stalled(Filling::Faults, None);
                }
            }
            Err(FillError::TargetEnded) => {
                self.shared.end(PagerEnd::TargetEnded);
            }
            Err(error) => {
                queue.failed(page, Instant::now());
                self.shared.set_stalled(Filling::Faults, Some(reason(&error)));
                // The thread that reads faults does not know yet when to try again.
                self.shared.wake_faults();
            }
        }
        if !queue.is_idle() {
            self.changed.notify_all();
        }
        queue
    }

    fn count(&self, page: u64) {
        let mut progress = self.shared.progress();
        progress.state.faults += 1;
        if self.shared.started.elapsed() < super::TOUCH_WINDOW {
            progress.touched.insert(page);
        }
    }
}

fn timespec(wait: Duration) -> Timespec {
    // One nanosecond more, so that the wait does not end just before the deadline.
    let wait = wait + Duration::from_nanos(1);
    Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() }
}

/// Text of the error with its causes in one line.
pub(super) fn reason(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
