//! Congestion window: bounds the bytes that a tunnel has in flight. Pure.
//!
//! Enough to keep the link busy, but no more: bytes in flight delay every later frame, and on a slow link a
//! few hundred KiB are many seconds. So the window grows while acknowledgements arrive as fast as the
//! fastest, and is halved when they take longer, like a delay-based congestion window (RFC 6817).

use std::time::Duration;

/// Least window: a batch or two.
const LEAST: usize = 64 << 10;
/// Greatest window: a Gbit/s over 20 ms.
const MOST: usize = 2560 << 10;
/// Growth of the window with each acknowledgement.
const GROWTH: usize = 32 << 10;
/// Queueing delay that a tunnel may add.
const DELAY: Duration = Duration::from_millis(60);

/// Bytes in flight, and their limit.
#[derive(Debug)]
pub(crate) struct Window {
    limit: usize,
    in_flight: usize,
    fastest: Duration,
}

impl Window {
    pub(crate) fn new() -> Self {
        Self { limit: LEAST * 2, in_flight: 0, fastest: Duration::MAX }
    }

    /// Whether another batch may be sent.
    pub(crate) fn is_open(&self) -> bool {
        self.in_flight < self.limit
    }

    pub(crate) fn sent(&mut self, bytes: usize) {
        self.in_flight += bytes;
    }

    /// Handles the acknowledgement of a batch, `after` its sending.
    pub(crate) fn answered(&mut self, bytes: usize, after: Duration) {
        let was_full = !self.is_open();
        self.in_flight = self.in_flight.saturating_sub(bytes);
        self.fastest = self.fastest.min(after);
        if after > self.fastest.saturating_add(DELAY) {
            self.limit = (self.limit / 2).max(LEAST);
        } else if was_full {
            self.limit = (self.limit + GROWTH).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Link with a rate in bytes a second and a delay, used as fast as the window allows.
    fn drive(rate: u64, distance: Duration) -> (Window, Duration) {
        let (mut window, mut now, mut free_at) = (Window::new(), Duration::ZERO, Duration::ZERO);
        let (mut answers, mut last) = (std::collections::VecDeque::new(), Duration::ZERO);
        for _ in 0..20_000 {
            while window.is_open() {
                let took = Duration::from_secs_f64(16_384.0 / rate as f64);
                free_at = free_at.max(now) + took;
                answers.push_back((now, free_at + distance));
                window.sent(16_384);
            }
            let (sent, answered) = answers.pop_front().unwrap();
            now = answered;
            last = now - sent;
            window.answered(16_384, last);
        }
        (window, last)
    }

    #[test]
    fn a_fast_long_link_is_filled_and_a_slow_one_is_not_made_slower() {
        let (window, _) = drive(125_000_000, Duration::from_millis(20));
        assert!(window.limit >= MOST * 3 / 4, "{window:?}");
        let (window, took) = drive(48_000, Duration::from_millis(20));
        assert!(window.limit <= 2 * LEAST && took < Duration::from_secs(3), "{window:?} {took:?}");
    }

    #[test]
    fn what_is_under_way_is_bounded() {
        let mut window = Window::new();
        while window.is_open() {
            window.sent(1500);
        }
        assert!(window.in_flight < LEAST * 2 + 1500);
        window.answered(usize::MAX, Duration::ZERO);
        assert!(window.is_open());
    }
}
