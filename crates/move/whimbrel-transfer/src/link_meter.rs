//! Link meter: measures the rate of a link, and derives the bytes in flight, the reply size and the
//! compression level. Pure: time comes in as a number.

use crate::{
    compression_level::{DENSER, DENSEST},
    pull_plan::Limits,
};
use std::time::Duration;

/// Time to send one reply.
const REPLY_TIME: Duration = Duration::from_millis(500);
const WINDOW_TIME: Duration = Duration::from_secs(1);
/// Smallest and largest reply.
const ANSWER_MIN: u64 = 8 << 10;
const ANSWER_MAX: u64 = 4 << 20;
/// Bytes in flight before the first reply: a DSL line sends them in a second.
const WINDOW_INITIAL: u64 = 32 << 10;
const WINDOW_MAX: u64 = 64 << 20;
/// Time of the link that is in flight beside a running machine, whose page waits behind all of it, and the
/// largest reply. Two replies are in flight on a link that is too slow for that.
const BESIDE_TIME: Duration = Duration::from_millis(100);
const BESIDE_ANSWER_MAX: u64 = 256 << 10;

/// Replies are summed over at least this time, because several may arrive in one burst.
const MEASUREMENT_MIN: Duration = Duration::from_millis(100);

/// Measured rate and round trip of a link.
#[derive(Debug, Clone, Default)]
pub struct LinkMeter {
    rate: Option<f64>,
    round_trip: Option<Duration>,
    /// Start of the current measurement, and the bytes that arrived since.
    span: Option<(Duration, u64)>,
}

impl LinkMeter {
    /// Starts a measurement when a request goes out on an idle link.
    pub fn start(&mut self, now: Duration) {
        self.span = Some((now, 0));
    }

    /// Records a reply of `bytes` that came `after` its request; `more` tells whether others are in flight.
    pub fn answered(&mut self, bytes: u64, after: Duration, now: Duration, more: bool) {
        let small = bytes < 4096;
        if small && self.round_trip.is_none_or(|known| after < known) {
            self.round_trip = Some(after);
        }
        let Some((since, before)) = self.span.take() else { return };
        let (sum, took) = (before + bytes, now.saturating_sub(since));
        let due = took >= MEASUREMENT_MIN || !more || self.rate.is_none();
        if more {
            self.span = Some(if due { (now, 0) } else { (since, sum) });
        }
        // A small reply tells the round trip and not the rate.
        if !due || sum < 4096 {
            return;
        }
        // For the first of several replies the round trip is a small part of the wait; for a single one it
        // may be all.
        let idle = if more { Duration::ZERO } else { self.latency().min(took / 2) };
        let seen = sum as f64 / (took - idle).as_secs_f64().max(1e-5);
        self.rate = Some(match self.rate {
            Some(rate) => rate * 0.5 + seen.min(rate * 8.0) * 0.5,
            None => seen,
        });
    }

    /// Sets a round trip that was measured elsewhere (the wire's ping).
    pub(crate) fn set_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = Some(round_trip);
    }

    fn latency(&self) -> Duration {
        self.round_trip.unwrap_or(Duration::ZERO)
    }

    /// Round trip, once measured.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Bytes a second, once measured.
    pub fn rate(&self) -> Option<u64> {
        self.rate.map(|rate| rate as u64)
    }

    /// Bytes that one reply should have.
    pub(crate) fn answer_bytes(&self) -> u64 {
        let bytes = self.rate.map_or(WINDOW_INITIAL / 2, |rate| (rate * REPLY_TIME.as_secs_f64()) as u64);
        bytes.clamp(ANSWER_MIN, ANSWER_MAX)
    }

    /// Limits of requests; `beside` a running machine, which waits for pages over the same link.
    pub(crate) fn limits(&self, beside: bool) -> Limits {
        let (window, answer) = (self.window(), self.answer_bytes());
        let Some(rate) = self.rate.filter(|_| beside) else { return Limits { window, answer } };
        let answer = answer.min(BESIDE_ANSWER_MAX);
        let in_flight = rate * (BESIDE_TIME + 2 * self.latency()).as_secs_f64();
        Limits { window: window.min((in_flight as u64).max(2 * answer)), answer }
    }

    /// Bytes of replies that may be in flight: what the link carries in its round trip or in a second.
    pub fn window(&self) -> u64 {
        let Some(rate) = self.rate else { return WINDOW_INITIAL };
        let time = WINDOW_TIME.max(self.latency() * 2);
        ((rate * time.as_secs_f64()) as u64).clamp(2 * ANSWER_MIN, WINDOW_MAX)
    }
}

/// Kind of content to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Pages and objects without an older version.
    Plain,
    /// Pages against their older versions.
    Delta,
}

/// Compression level (see [`CompressionLevel`](crate::CompressionLevel)) for a link of `rate` bytes a second
/// between hosts that spare `cores` for it. The levels are those at which a core of 2020 keeps the link busy
/// and is half idle. That reserve is needed: a level that makes the holder slower than the link would be
/// measured as a slow link, and be chosen for ever.
pub fn level(rate: Option<u64>, cores: usize, content: Content) -> i8 {
    const MEGABIT: u64 = 1_000_000 / 8;
    let plain: [(u64, i8); 6] = [(4, DENSEST), (12, DENSER), (30, 12), (60, 6), (300, 3), (1000, 1)];
    let delta: [(u64, i8); 6] = [(4, 12), (12, 12), (30, 12), (60, 9), (300, 6), (1000, 3)];
    let table = match content {
        Content::Plain => plain,
        Content::Delta => delta,
    };
    // Before the rate is known: on a slow link that is a reply or two, on a fast one perhaps the whole
    // transfer.
    let Some(rate) = rate else { return table[4].1 };
    let shared = rate / cores.max(1) as u64;
    // Against older pages a level below 1 misses most of what did not change.
    let fastest = if content == Content::Plain { -3 } else { 1 };
    table.iter().find(|(megabits, _)| shared < megabits * MEGABIT).map_or(fastest, |(_, level)| *level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Link of `rate` that answers requests of the size that the meter proposes, one window in flight.
    fn run(rate: f64, round_trip: Duration) -> LinkMeter {
        let (mut meter, mut now) = (LinkMeter::default(), Duration::ZERO);
        meter.set_round_trip(round_trip);
        meter.start(now);
        for _ in 0..30 {
            let bytes = meter.answer_bytes();
            let wire = Duration::from_secs_f64(bytes as f64 / rate);
            // A window smaller than the bandwidth-delay product leaves the link idle for the rest of the
            // round trip.
            let window =
                Duration::from_secs_f64(bytes as f64 / meter.window() as f64 * round_trip.as_secs_f64());
            now += wire.max(window);
            meter.answered(bytes, wire + round_trip, now, true);
        }
        meter
    }

    #[test]
    fn the_rates_of_a_dsl_line_and_of_a_lan_are_found() {
        for (rate, round_trip) in [(48e3, 20), (12.5e6, 1), (125e6, 1), (1.25e6, 200)] {
            let meter = run(rate, Duration::from_millis(round_trip));
            let seen = meter.rate().unwrap() as f64;
            assert!((seen / rate - 1.0).abs() < 0.1, "{seen} of {rate}");
        }
    }

    #[test]
    fn on_a_dsl_line_a_demand_waits_a_second_at_most() {
        let meter = run(48e3, Duration::from_millis(20));
        assert!(meter.window() <= 50_000 && meter.answer_bytes() <= 25_000, "{meter:?}");
        assert!(LinkMeter::default().window() <= 48_000, "also before it was measured");
    }

    #[test]
    fn a_machine_waits_a_tenth_of_a_second_behind_what_is_prefetched_unless_the_link_is_slow() {
        for megabits in [100, 400, 1_000] {
            let rate = f64::from(megabits) * 125e3;
            let limits = run(rate, Duration::from_millis(2)).limits(true);
            assert!(limits.window as f64 / rate < 0.12, "{megabits} Mbit/s: {limits:?}");
            assert!(limits.window as f64 / rate > 0.08, "{megabits} Mbit/s are not used: {limits:?}");
        }
        let dsl = run(48e3, Duration::from_millis(20));
        assert_eq!(dsl.limits(true).answer, dsl.limits(false).answer);
        assert!(dsl.limits(true).window >= 2 * dsl.limits(true).answer, "one comes while another is decoded");
    }

    #[test]
    fn the_level_follows_the_link() {
        let at = |megabits: f64, content| level(Some((megabits * 125_000.0) as u64), 1, content);
        assert_eq!(at(0.384, Content::Plain), DENSEST);
        assert_eq!(at(0.384, Content::Delta), 12);
        assert_eq!(at(11.0, Content::Plain), DENSER, "also when it is measured a little too fast");
        assert_eq!(at(100.0, Content::Plain), 3);
        assert_eq!(at(600.0, Content::Plain), 1);
        assert_eq!(at(10_000.0, Content::Plain), -3);
    }

    #[test]
    fn two_processors_code_for_twice_the_rate() {
        for content in [Content::Plain, Content::Delta] {
            for rate in [1, 3, 6, 12, 25, 50, 110, 400].map(|megabits| megabits * 125_000) {
                assert_eq!(level(Some(2 * rate), 2, content), level(Some(rate), 1, content));
            }
        }
    }

    proptest! {
        #[test]
        fn a_faster_link_never_gets_a_higher_level(a in 1..10u64.pow(10), b in 1..10u64.pow(10), cores in 1..9usize) {
            for content in [Content::Plain, Content::Delta] {
                prop_assert!(level(Some(a.min(b)), cores, content) >= level(Some(a.max(b)), cores, content));
            }
        }
    }
}
