//! Delay line: the model of one direction of a link, a queue before a wire with a rate, then a delay. Pure:
//! no clock.
//!
//! A packet is lost by chance, or because the queue is full. Otherwise it is due when the wire has sent
//! everything before it and itself, and the delay has passed. Order is preserved.

use std::time::Duration;

/// Parameters of a link, for each direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkConfig {
    /// Delay of one direction.
    pub delay: Duration,
    /// Rate in bits a second.
    pub bits_per_second: u64,
    /// Probability that a packet is lost, 0 to 1.
    pub loss: f64,
    /// Most bytes queued before the wire.
    pub queue: usize,
}

impl LinkConfig {
    /// Link without loss, with this rate and one-way delay and a queue of 50 ms (at least 64 KiB).
    pub fn new(mbit: u64, delay: Duration) -> Self {
        let queue = (mbit as usize * 1_000_000 / 8 / 20).max(65536);
        Self { delay, bits_per_second: mbit * 1_000_000, loss: 0.0, queue }
    }
}

/// One direction of a link.
#[derive(Debug)]
pub struct DelayLine {
    config: LinkConfig,
    /// Time at which the wire has sent everything admitted so far.
    wire_free: Duration,
}

impl DelayLine {
    /// Creates an idle line.
    pub fn new(config: LinkConfig) -> Self {
        Self { config, wire_free: Duration::ZERO }
    }

    /// Changes the parameters from now on. Packets admitted before remain due at their time.
    pub fn change(&mut self, config: LinkConfig) {
        self.config = config;
    }

    /// Admits a packet of `len` bytes at `now` (since a fixed moment, never going back); `chance` is a random
    /// number in 0..1. Returns when it is due at the other end, or none if it is lost.
    pub fn admit(&mut self, now: Duration, len: usize, chance: f64) -> Option<Duration> {
        let waiting = self.wire_free.saturating_sub(now);
        if chance < self.config.loss || self.bytes_in(waiting) + len as u128 > self.config.queue as u128 {
            return None;
        }
        self.wire_free = now.max(self.wire_free) + self.time_of(len);
        Some(self.wire_free + self.config.delay)
    }

    fn time_of(&self, len: usize) -> Duration {
        Duration::from_nanos(len as u64 * 8_000_000_000 / self.config.bits_per_second.max(1))
    }

    fn bytes_in(&self, time: Duration) -> u128 {
        time.as_nanos() * u128::from(self.config.bits_per_second) / 8_000_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_never_carries_more_than_its_rate_nor_delivers_early() {
        let config = LinkConfig { queue: 15_000, ..LinkConfig::new(12, Duration::from_millis(5)) };
        let mut line = DelayLine::new(config);
        // Twice the rate: 1500 bytes take 1 ms at 12 Mbit/s, and one packet arrives every 0.5 ms.
        let due: Vec<_> =
            (0..1000).map(|n| (n, line.admit(Duration::from_micros(n * 500), 1500, 0.5))).collect();
        let carried: Vec<_> = due.iter().filter_map(|(n, due)| due.map(|due| (*n, due))).collect();
        assert!(
            (500..=511).contains(&carried.len()),
            "half of them and what the queue held: {}",
            carried.len()
        );
        for pair in carried.windows(2) {
            assert!(pair[1].1 - pair[0].1 >= Duration::from_millis(1));
        }
        for (n, due) in carried {
            assert!(due >= Duration::from_micros(n * 500) + Duration::from_millis(6));
            assert!(
                due <= Duration::from_micros(n * 500) + Duration::from_millis(16),
                "the queue is bounded"
            );
        }
    }

    #[test]
    fn loss_follows_the_given_chance() {
        let mut line = DelayLine::new(LinkConfig { loss: 0.25, ..LinkConfig::new(1000, Duration::ZERO) });
        let kept = (0..100)
            .filter(|n| line.admit(Duration::from_secs(*n), 100, *n as f64 / 100.0).is_some())
            .count();
        assert_eq!(kept, 75);
    }
}
