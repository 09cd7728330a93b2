//! A token bucket for sending. Pure: time comes in as a number, the answer is how long to wait.
//!
//! It works by debt: a piece may go when there is no debt, and its bytes become debt. Waits that last a
//! little too long (timers tick in milliseconds) are made up for by the next, up to [`BURST`], so the mean is
//! exact.

use std::time::Duration;

/// How much idle time can be made up for. Small, so that a pause is not followed by a burst.
const BURST: Duration = Duration::from_millis(20);

/// The state of a limit that may change at any time.
#[derive(Debug, Default)]
pub(crate) struct TokenBucket {
    /// Bytes a second; none sends at once.
    rate: Option<u64>,
    /// When the debt is paid, on the caller's clock.
    free_at: Duration,
}

impl TokenBucket {
    /// Changes the rate; zero counts as one byte a second. Debt made under the old rate is forgiven.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, now: Duration) {
        self.rate = rate.map(|rate| rate.max(1));
        self.free_at = now;
    }

    /// The largest piece to send at once: 10 ms worth, so that a change of rate is felt soon.
    pub(crate) fn piece(&self) -> usize {
        self.rate.map_or(usize::MAX, |rate| usize::try_from(rate / 100).unwrap_or(usize::MAX).max(1024))
    }

    /// How long to wait before the next piece may go.
    pub(crate) fn delay(&self, now: Duration) -> Duration {
        if self.rate.is_some() { self.free_at.saturating_sub(now) } else { Duration::ZERO }
    }

    /// `bytes` were sent.
    pub(crate) fn spend(&mut self, bytes: usize, now: Duration) {
        if let Some(rate) = self.rate {
            let start = self.free_at.max(now.saturating_sub(BURST));
            self.free_at = start + Duration::from_secs_f64(bytes as f64 / rate as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn late_timers_do_not_change_the_rate(rate in 20_000u64..2_000_000_000, late_ms in 0u64..8) {
            let (mut bucket, mut now, mut sent) = (TokenBucket::default(), Duration::ZERO, 0u64);
            bucket.set_rate(Some(rate), now);
            while now < Duration::from_secs(10) {
                let delay = bucket.delay(now);
                if !delay.is_zero() { now += delay + Duration::from_millis(late_ms); }
                bucket.spend(bucket.piece(), now);
                sent += bucket.piece() as u64;
            }
            let seen = sent as f64 / now.as_secs_f64();
            prop_assert!((seen / rate as f64 - 1.0).abs() < 0.05, "{seen} of {rate}");
        }
    }

    #[test]
    fn a_new_rate_counts_at_once() {
        let mut bucket = TokenBucket::default();
        bucket.set_rate(Some(1), Duration::ZERO);
        bucket.spend(1000, Duration::ZERO);
        assert!(bucket.delay(Duration::ZERO) > Duration::from_secs(900));
        bucket.set_rate(None, Duration::ZERO);
        assert_eq!(bucket.delay(Duration::ZERO), Duration::ZERO);
    }
}
