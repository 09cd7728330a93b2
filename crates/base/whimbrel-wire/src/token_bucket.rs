//! Token bucket that limits the send rate. Pure: the caller passes the time and gets the delay.
//!
//! The bucket counts debt: bytes become debt when they are sent, and the next write may start when no debt is
//! left. Timers overshoot, since they tick in milliseconds; later delays make up for it, up to [`BURST`], so
//! the mean rate is exact.

use std::time::Duration;

/// Idle time that later delays can make up for; short, so that a pause is not followed by a burst.
const BURST: Duration = Duration::from_millis(20);

/// The state of a rate limit, which may change at any time.
#[derive(Debug, Default)]
pub(crate) struct TokenBucket {
    /// Bytes a second; `None` is unlimited.
    rate: Option<u64>,
    /// Time on the caller's clock at which no debt is left.
    free_at: Duration,
}

impl TokenBucket {
    /// Changes the rate; zero counts as one byte a second. Debt of the old rate is cancelled.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, now: Duration) {
        self.rate = rate.map(|rate| rate.max(1));
        self.free_at = now;
    }

    /// Largest write: 10 ms of the rate, so that a changed rate takes effect soon.
    pub(crate) fn max_write(&self) -> usize {
        self.rate.map_or(usize::MAX, |rate| usize::try_from(rate / 100).unwrap_or(usize::MAX).max(1024))
    }

    /// Delay before the next write.
    pub(crate) fn delay(&self, now: Duration) -> Duration {
        if self.rate.is_some() { self.free_at.saturating_sub(now) } else { Duration::ZERO }
    }

    /// Adds `bytes` that were sent.
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
                bucket.spend(bucket.max_write(), now);
                sent += bucket.max_write() as u64;
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
