//! Transfer rate of a link: bytes over the time in which content was in transit. Pure: the clock is a
//! parameter.

use std::time::{Duration, Instant};

/// Bytes after which a measurement is long enough.
const MIN_BYTES: u64 = 256 << 10;
/// A single smaller answer is not measured.
const MIN_SINGLE_BYTES: u64 = 32 << 10;

#[derive(Debug, Default)]
pub(in crate::client) struct TransferRate {
    under_way: usize,
    since: Option<Instant>,
    bytes: u64,
    per_second: Option<f64>,
}

impl TransferRate {
    /// Records that content was requested.
    pub(in crate::client) fn request_sent(&mut self, now: Instant) {
        self.under_way += 1;
        self.since.get_or_insert(now);
    }

    /// Records that requested content arrived, or will not.
    pub(in crate::client) fn reply_received(&mut self, now: Instant, bytes: u64, round_trip: Duration) {
        self.under_way = self.under_way.saturating_sub(1);
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        let mut time = now.saturating_duration_since(since);
        let last = self.under_way == 0;
        if self.bytes >= MIN_BYTES {
            self.since = Some(now).filter(|_| !last);
        } else if last && self.bytes >= MIN_SINGLE_BYTES && self.per_second.is_none() {
            // Little data, and mostly waiting time: a guess until there is a better measurement.
            time = time.saturating_sub(round_trip);
            self.since = None;
        } else {
            if last {
                (self.since, self.bytes) = (None, 0);
            }
            return;
        }
        let seen = self.bytes as f64 / time.as_secs_f64().max(1e-4);
        self.per_second = Some(self.per_second.map_or(seen, |before| (before + seen) / 2.0));
        self.bytes = 0;
    }

    /// Bytes per second, once some have arrived.
    pub(in crate::client) fn per_second(&self) -> Option<f64> {
        self.per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIP: Duration = Duration::from_millis(32);

    #[test]
    fn a_busy_link_is_judged_by_what_it_carries_and_not_by_its_round_trip() {
        let (start, mut rate) = (Instant::now(), TransferRate::default());
        (0..4).for_each(|_| rate.request_sent(start));
        for number in 1..=40u32 {
            let now = start + TRIP + number * Duration::from_millis(100);
            rate.request_sent(now);
            rate.reply_received(now, 1 << 20, TRIP);
        }
        let seen = rate.per_second().unwrap();
        assert!((seen / (10.0 * f64::from(1 << 20)) - 1.0).abs() < 0.01, "{seen}");
    }

    #[test]
    fn single_blocks_tell_the_rate_without_the_wait_and_smaller_ones_nothing() {
        let (start, mut rate) = (Instant::now(), TransferRate::default());
        rate.request_sent(start);
        rate.reply_received(start + TRIP, 1000, TRIP);
        assert_eq!(rate.per_second(), None);
        rate.request_sent(start);
        rate.reply_received(start + TRIP + Duration::from_millis(16), 64 << 10, TRIP);
        let seen = rate.per_second().unwrap();
        assert!((seen / 4_096_000.0 - 1.0).abs() < 0.01, "{seen}");
    }
}
