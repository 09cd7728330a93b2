//! Fetch window: how many background requests are in flight.
//!
//! Pure: no connection, no clock. A page that a CPU waits for comes behind their replies. So there are as
//! many as keep the link busy, and while CPUs wait no more: a reply that takes twice as long as the fastest
//! one has waited in a queue for half of its time (as TCP Vegas sees it: Brakmo and Peterson, 1995).

use std::time::Duration;

/// Requests in flight while no CPU waits, unless a long link takes more.
const USUAL: usize = 8;
/// Fewest, so that the next reply is on its way while one is stored; and most.
const MIN: usize = 2;
const MAX: usize = 64;
/// Replies after a wait in which more waits are expected.
const LATELY: u32 = 32;

/// Number of requests that may be in flight.
#[derive(Debug)]
pub(super) struct FetchWindow {
    limit: usize,
    fastest: Duration,
    /// Replies since a CPU waited.
    quiet: u32,
    /// Replies to requests that were sent before the limit was last changed: they tell of the former one.
    stale: usize,
}

impl FetchWindow {
    pub(super) fn new() -> Self {
        Self { limit: USUAL, fastest: Duration::MAX, quiet: LATELY, stale: 0 }
    }

    /// Requests that may be in flight now.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Reports that a CPU has waited for a page.
    pub(super) fn waited(&mut self) {
        self.quiet = 0;
    }

    /// Reports a reply, and the time since its request.
    pub(super) fn answered(&mut self, took: Duration) {
        self.fastest = self.fastest.min(took);
        self.quiet = self.quiet.saturating_add(1);
        if self.stale > 0 {
            self.stale -= 1;
            return;
        }
        let (is_quiet, before) = (self.quiet > LATELY, self.limit);
        if took.saturating_mul(2) < self.fastest.saturating_mul(3) {
            self.limit = (self.limit + 1).min(MAX);
        } else if took > self.fastest.saturating_mul(2) && (!is_quiet || self.limit > USUAL) {
            self.limit = (self.limit - 1).max(MIN);
        } else if is_quiet && self.limit < USUAL {
            self.limit += 1;
        }
        if self.limit != before {
            self.stale = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A link with this round trip on which each reply takes so long: the most and the fewest in flight
    /// during the second half of a thousand replies.
    fn on_link(round_trip: u64, reply: u64, waits: bool) -> (usize, usize) {
        let (mut window, mut in_flight) = (FetchWindow::new(), VecDeque::new());
        let (mut now, mut free, mut seen) = (0, 0, Vec::new());
        for _ in 0..1000 {
            while in_flight.len() < window.limit() {
                free = free.max(now + round_trip) + reply;
                in_flight.push_back((now, free));
            }
            let (asked, arrives) = in_flight.pop_front().unwrap();
            now = arrives;
            if waits {
                window.waited();
            }
            window.answered(Duration::from_micros(arrives - asked));
            seen.push(window.limit());
        }
        let late = &seen[500..];
        (*late.iter().min().unwrap(), *late.iter().max().unwrap())
    }

    #[test]
    fn while_cpus_wait_little_is_queued_and_the_link_stays_busy() {
        // 1 Gbit/s, 1 ms: the link holds one request, and one is being sent.
        let (fewest, most) = on_link(1000, 1050, true);
        assert!(fewest >= 2 && most <= 4, "{fewest} to {most}");
        let (fewest, most) = on_link(1000, 1050, false);
        assert!(fewest >= 7 && most <= 9, "{fewest} to {most}");
    }

    #[test]
    fn a_long_link_is_filled() {
        // 1 Gbit/s, 30 ms: it holds 29 requests.
        for waits in [true, false] {
            let (fewest, _) = on_link(30_000, 1050, waits);
            assert!(fewest >= 29, "{fewest}");
        }
    }
}
