//! Retry of pages that could not be filled, and its pauses. Pure: the clock is an argument.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

const FIRST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_secs(1);

/// Pending pages with one pause, which doubles with every failed retry and is reset by a success.
#[derive(Debug)]
pub(super) struct Retry {
    pages: BTreeSet<u64>,
    pause: Duration,
    due: Option<Instant>,
}

impl Retry {
    pub(super) fn new() -> Self {
        Self { pages: BTreeSet::new(), pause: FIRST, due: None }
    }

    /// Records that `page` could not be filled. A running pause continues.
    pub(super) fn failed(&mut self, page: u64, now: Instant) {
        self.pages.insert(page);
        if self.due.is_none() {
            self.due = Some(now + self.pause);
            self.pause = (self.pause * 2).min(LONGEST);
        }
    }

    /// Records that a page was filled, which resets the pause.
    pub(super) fn succeeded(&mut self) {
        self.pause = FIRST;
    }

    /// Time until a retry is due; `None` if nothing is pending.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        self.due.map(|due| due.saturating_duration_since(now))
    }

    /// Takes all pending pages, if their pause is over.
    pub(super) fn take_due(&mut self, now: Instant) -> BTreeSet<u64> {
        if self.due.is_none_or(|due| now < due) {
            return BTreeSet::new();
        }
        self.due = None;
        std::mem::take(&mut self.pages)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_no_page_is_forgotten() {
        let (mut retry, mut now) = (Retry::new(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..12 {
            retry.failed(7, now);
            retry.failed(3, now);
            let pause = retry.wait(now).unwrap();
            assert!(retry.take_due(now + pause - Duration::from_nanos(1)).is_empty());
            now += pause;
            assert_eq!(retry.take_due(now), BTreeSet::from([3, 7]));
            pauses.push(pause);
        }
        assert!(retry.is_empty() && retry.wait(now).is_none());
        assert!(pauses.is_sorted() && pauses[0] == FIRST && pauses[11] == LONGEST, "{pauses:?}");
        retry.succeeded();
        retry.failed(1, now);
        assert_eq!(retry.wait(now), Some(FIRST));
    }
}
