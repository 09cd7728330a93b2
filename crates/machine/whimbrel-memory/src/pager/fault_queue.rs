//! Queue of page faults: the pages that the target waits for, and those that are being filled.
//!
//! A page is in it once, however many threads of the target wait for it: filling it wakes them all. A page of
//! a run that is being fetched waits until that has arrived. Pure: threads, clock and pages are outside.

use super::retry::Retry;
use std::{
    collections::{BTreeSet, VecDeque},
    time::Instant,
};
use whimbrel_core::PageRun;

/// Faults that wait or are being served.
#[derive(Debug)]
pub(super) struct FaultQueue {
    /// Pages that no worker has, the longest waiting first.
    waiting: VecDeque<u64>,
    /// Pages that some worker has, with the run that it fetches for each.
    in_flight: Vec<(u64, PageRun)>,
    /// Pages that wait for a run in flight.
    behind: BTreeSet<u64>,
    retry: Retry,
    /// Number of workers without a page.
    idle: usize,
}

impl FaultQueue {
    pub(super) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            in_flight: Vec::new(),
            behind: BTreeSet::new(),
            retry: Retry::new(),
            idle: 0,
        }
    }

    /// Adds a page that the target waits for, unless it is here already.
    pub(super) fn add(&mut self, page: u64) {
        let is_known = self.waiting.contains(&page)
            || self.behind.contains(&page)
            || self.in_flight.iter().any(|(flying, _)| *flying == page);
        if !is_known {
            self.waiting.push_back(page);
        }
    }

    /// Adds the pages whose retry is due.
    pub(super) fn add_due(&mut self, now: Instant) {
        self.retry.take_due(now).into_iter().for_each(|page| self.add(page));
    }

    /// The next page that no worker has.
    pub(super) fn take(&mut self) -> Option<u64> {
        self.waiting.pop_front()
    }

    /// Number of pages for which there is no worker.
    pub(super) fn workers_needed(&self) -> usize {
        self.waiting.len().saturating_sub(self.idle)
    }

    /// A worker begins or ends to wait for a page.
    pub(super) fn set_idle(&mut self, idle: bool) {
        self.idle = if idle { self.idle + 1 } else { self.idle - 1 };
    }

    /// Begins to fetch `run` for a page that was taken. False if another worker fetches the page already: it
    /// comes again once that has ended.
    pub(super) fn begin(&mut self, page: u64, run: PageRun) -> bool {
        if self.in_flight.iter().any(|(_, flying)| flying.pages().contains(&page)) {
            self.behind.insert(page);
            return false;
        }
        self.in_flight.push((page, run));
        true
    }

    /// A page was filled. Returns whether no page waits for a retry.
    pub(super) fn filled(&mut self, page: u64) -> bool {
        self.ended(page);
        self.retry.succeeded();
        self.retry.is_empty()
    }

    /// A page could not be filled: it is tried again later.
    pub(super) fn failed(&mut self, page: u64, now: Instant) {
        self.ended(page);
        self.retry.failed(page, now);
    }

    /// Time until a retry is due; `None` if nothing is pending.
    pub(super) fn retry_wait(&self, now: Instant) -> Option<std::time::Duration> {
        self.retry.wait(now)
    }

    /// Whether no page is waited for, except for a retry.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.in_flight.is_empty() && self.behind.is_empty()
    }

    /// Frees a run; the pages that waited for it are asked for again.
    fn ended(&mut self, page: u64) {
        let Some(at) = self.in_flight.iter().position(|(flying, _)| *flying == page) else { return };
        let (_, run) = self.in_flight.swap_remove(at);
        let (freed, behind) =
            std::mem::take(&mut self.behind).into_iter().partition(|page| run.pages().contains(page));
        self.behind = behind;
        let freed: BTreeSet<u64> = freed;
        self.waiting.extend(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_served_once_and_one_of_a_run_in_flight_waits_for_it() {
        let mut queue = FaultQueue::new();
        [9, 9, 300, 10].into_iter().for_each(|page| queue.add(page));
        assert_eq!(queue.workers_needed(), 3);
        queue.set_idle(true);
        assert_eq!(queue.workers_needed(), 2);
        queue.set_idle(false);
        assert_eq!(
            (queue.take(), queue.take(), queue.take(), queue.take()),
            (Some(9), Some(300), Some(10), None)
        );
        assert!(queue.begin(9, PageRun::new(8, 8)) && queue.begin(300, PageRun::new(300, 1)));
        assert!(!queue.begin(10, PageRun::new(8, 8)), "its run is on its way");
        [9, 10, 300].into_iter().for_each(|page| queue.add(page));
        assert_eq!(queue.workers_needed(), 0, "all of them are known");
        assert!(queue.filled(300) && !queue.is_idle());
        assert_eq!(queue.take(), None, "the other run has not come");
        let now = Instant::now();
        queue.failed(9, now);
        assert_eq!(queue.take(), Some(10), "it may have better luck");
        assert!(queue.begin(10, PageRun::new(10, 1)) && !queue.filled(10) && queue.is_idle());
        let due = queue.retry_wait(now).expect("a retry");
        queue.add_due(now + due);
        assert_eq!(queue.take(), Some(9));
    }
}
