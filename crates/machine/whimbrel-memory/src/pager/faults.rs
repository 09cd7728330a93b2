//! Fault thread of the pager: fills the pages that the target waits for.

use super::{
    Filling, PagerEnd, Shared,
    filler::{FillError, Filler},
    retry::Retry,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::PAGE_SIZE;

pub(super) fn run(shared: Arc<Shared>) {
    let end =
        Server { filler: Filler::new(shared.clone()), retry: Retry::new(), shared: shared.clone() }.serve();
    shared.end(end);
}

struct Server {
    shared: Arc<Shared>,
    filler: Filler,
    retry: Retry,
}

impl Server {
    fn serve(&mut self) -> PagerEnd {
        let mut addresses = Vec::new();
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
            let due = self.retry.take_due(Instant::now());
            let (start, count) = (self.shared.inner.span.start, self.shared.inner.page_count());
            let pages = addresses.iter().filter_map(|address| address.checked_sub(start));
            let pages = pages.map(|at| at / PAGE_SIZE as u64).filter(|page| *page < count);
            self.shared.busy.store(true, Ordering::Release);
            let alive = pages.chain(due).try_for_each(|page| self.answer(page));
            self.shared.busy.store(false, Ordering::Release);
            if alive.is_err() {
                return PagerEnd::TargetEnded;
            }
        }
        PagerEnd::Stopped
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
        let timeout = self.retry.wait(Instant::now()).map(timespec);
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        !fds[2].revents().is_empty()
    }

    fn answer(&mut self, page: u64) -> Result<(), PagerEnd> {
        if self.shared.stopped() {
            return Ok(());
        }
        let begun = Instant::now();
        match self.filler.fault(page) {
            Ok(()) => {
                super::PAGE_WAITS.observe_time(begun.elapsed());
                self.retry.succeeded();
                self.count(page);
                if self.retry.is_empty() {
                    self.shared.set_stalled(Filling::Faults, None);
                }
            }
            Err(FillError::TargetEnded) => return Err(PagerEnd::TargetEnded),
            Err(error) => {
                self.retry.failed(page, Instant::now());
                self.shared.set_stalled(Filling::Faults, Some(reason(&error)));
            }
        }
        Ok(())
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
