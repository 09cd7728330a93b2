//! The rate of a link, and what follows from it: how much may be under way, how large an answer should be,
//! which zstd level pays. Pure: time comes in as a number.

use crate::compression_level::{DENSER, DENSEST};
use std::time::Duration;

/// How long an answer should travel, so that a demand never waits longer behind what is under way.
const ANSWER: Duration = Duration::from_millis(500);
const UNDER_WAY: Duration = Duration::from_secs(1);
/// Smallest and largest answer.
const ANSWER_MIN: u64 = 8 << 10;
const ANSWER_MAX: u64 = 4 << 20;
/// What is under way before the first answer has come: a DSL line carries it in a second.
const FIRST: u64 = 32 << 10;
const WINDOW_MAX: u64 = 64 << 20;

/// Answers are summed up over at least this, since several may arrive in one burst.
const SPAN: Duration = Duration::from_millis(100);

/// What a link was seen to carry.
#[derive(Debug, Clone, Default)]
pub struct LinkMeter {
    rate: Option<f64>,
    round_trip: Option<Duration>,
    /// Since when the link is busy, or when it was last measured, and what came since.
    span: Option<(Duration, u64)>,
}

impl LinkMeter {
    /// A request goes out and none was under way: the time before counts for nothing.
    pub fn start(&mut self, now: Duration) {
        self.span = Some((now, 0));
    }

    /// An answer of `bytes` came `after` its request; `more` says whether others are under way.
    pub fn answered(&mut self, bytes: u64, after: Duration, now: Duration, more: bool) {
        let small = bytes < 4096;
        if small && self.round_trip.is_none_or(|known| after < known) {
            self.round_trip = Some(after);
        }
        let Some((since, before)) = self.span.take() else { return };
        let (sum, took) = (before + bytes, now.saturating_sub(since));
        let due = took >= SPAN || !more || self.rate.is_none();
        if more {
            self.span = Some(if due { (now, 0) } else { (since, sum) });
        }
        // A small answer says something of the round trip and nothing of the rate.
        if !due || sum < 4096 {
            return;
        }
        // What the first of several waited for the round trip is little; of a lone one it may be all.
        let idle = if more { Duration::ZERO } else { self.latency().min(took / 2) };
        let seen = sum as f64 / (took - idle).as_secs_f64().max(1e-5);
        self.rate = Some(match self.rate {
            Some(rate) => rate * 0.5 + seen.min(rate * 8.0) * 0.5,
            None => seen,
        });
    }

    /// Sets the round trip from elsewhere (the wire's ping).
    pub fn set_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = Some(round_trip);
    }

    fn latency(&self) -> Duration {
        self.round_trip.unwrap_or(Duration::ZERO)
    }

    /// The round trip, once seen.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Bytes a second, once seen.
    pub fn rate(&self) -> Option<u64> {
        self.rate.map(|rate| rate as u64)
    }

    /// Bytes that an answer should have.
    pub fn answer_bytes(&self) -> u64 {
        let bytes = self.rate.map_or(FIRST / 2, |rate| (rate * ANSWER.as_secs_f64()) as u64);
        bytes.clamp(ANSWER_MIN, ANSWER_MAX)
    }

    /// Bytes of answers that may be under way: what the link carries in its round trip or in a second.
    pub fn window(&self) -> u64 {
        let Some(rate) = self.rate else { return FIRST };
        let time = UNDER_WAY.max(self.latency() * 2);
        ((rate * time.as_secs_f64()) as u64).clamp(2 * ANSWER_MIN, WINDOW_MAX)
    }
}

/// What is to be compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Pages and objects by themselves.
    Plain,
    /// Pages against their older versions.
    Delta,
}

/// The level (see [`Level`](crate::Level)) for a link of `rate` bytes a second between hosts that spare
/// `cores` for it. The levels are those at which a core of 2020 still keeps the link busy, with half of it to
/// spare. That is more than thrift: a level that made the holder slower than the link would be taken for a
/// slow link, and be chosen for ever.
pub fn level(rate: Option<u64>, cores: usize, content: Content) -> i8 {
    const MEGABIT: u64 = 1_000_000 / 8;
    let plain: [(u64, i8); 6] = [(4, DENSEST), (12, DENSER), (30, 12), (60, 6), (300, 3), (1000, 1)];
    let delta: [(u64, i8); 6] = [(4, 12), (12, 12), (30, 12), (60, 9), (300, 6), (1000, 3)];
    let table = match content {
        Content::Plain => plain,
        Content::Delta => delta,
    };
    // Before the link is known: on a slow one that is an answer or two, on a fast one perhaps all there is.
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

    /// A link of `rate` that answers requests of what the meter says, one window under way.
    fn run(rate: f64, round_trip: Duration) -> LinkMeter {
        let (mut meter, mut now) = (LinkMeter::default(), Duration::ZERO);
        meter.set_round_trip(round_trip);
        meter.start(now);
        for _ in 0..30 {
            let bytes = meter.answer_bytes();
            let wire = Duration::from_secs_f64(bytes as f64 / rate);
            // A window smaller than the pipe leaves it idle for the rest of the round trip.
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
    fn the_level_follows_the_link() {
        let at = |megabits: f64, content| level(Some((megabits * 125_000.0) as u64), 1, content);
        assert_eq!(at(0.384, Content::Plain), DENSEST);
        assert_eq!(at(0.384, Content::Delta), 12);
        assert_eq!(at(11.0, Content::Plain), DENSER, "also when it is measured a little too fast");
        assert_eq!(at(100.0, Content::Plain), 3);
        assert_eq!(at(600.0, Content::Plain), 1);
        assert_eq!(at(10_000.0, Content::Plain), -3);
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
