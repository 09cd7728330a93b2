//! Precopy policy of live migration: how fast each round goes, and when the machine is paused.
//!
//! Without a minimum rate every round goes as fast as permitted. With one, rates follow the dynamic
//! rate-limiting of Clark et al. (NSDI 2005, section 5.3): the first round goes at the minimum, each next at
//! the dirty rate of the last one plus a step, never below the minimum; when that would exceed the maximum,
//! the machine is paused. In both cases it is paused when almost nothing is left, when the rest can be sent
//! within the permitted downtime, or when rounds no longer help, and then after a round that left about as
//! little as any lately. The last round goes at the maximum.
//!
//! Rates count bytes on the wire, where pages are compressed or sent as differences. So dirty pages are
//! converted with the bytes per page of the last round; otherwise a machine whose writes are cheap to send
//! would be paused too early.
//!
//! Pure: no clock, and no state except the past rounds.

use crate::{RoundDecision, RoundStats, Scan, StopPolicy, StopReason, stop_policy::is_plateau};
use std::time::Duration;
use whimbrel_core::PAGE_SIZE;

/// Threshold of section 5.3: "When less than 256 KB remains to be transferred".
const LITTLE_LEFT_PAGES: u64 = (256 << 10) / PAGE_SIZE as u64;
/// Limit on the number of rounds; QEMU uses similar numbers.
const ROUNDS_MAX: u32 = 30;
/// Rounds of a plateau that may pass while waiting for one that leaves little.
const PLATEAU_ROUNDS_MAX: usize = 4;
/// A round that left at most this factor above the least of the plateau counts as its minimum.
const NEAR_MINIMUM: f64 = 1.05;
/// A round slower than this part of its limit was slowed by something else: the link, or the processor.
const HELD_BY_LIMIT: f64 = 0.9;
/// Least cost of a page on the wire; less is a round of zeros, which predicts nothing about the next.
const BYTES_A_PAGE_MIN: f64 = 256.0;

/// Default limit for sending the rest while the machine is paused: less than the other parts of the pause.
/// One more round that gets there takes some milliseconds while the machine runs.
pub const DOWNTIME_MAX: Duration = Duration::from_millis(2);

/// Interval of dirty log scans during a round. At 1 Gbit/s 2 MB are sent between two of them.
const SCAN_INTERVAL: Duration = Duration::from_millis(20);

/// Rates of the rounds, in bytes a second on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rates {
    /// Every round goes as fast as permitted.
    Full {
        /// Limit, if there is one.
        max: Option<u64>,
    },
    /// Rounds follow the dirty rate, between limits.
    Adaptive {
        /// Rate of the first round, and the least of any other.
        min: u64,
        /// Limit: a round that would need more is not started; the last one uses it.
        max: Option<u64>,
        /// Amount by which a round exceeds the dirty rate.
        step: u64,
    },
}

/// Limits of a migration, as a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecopyPolicy {
    /// Rates of the rounds.
    pub rates: Rates,
    /// Pause when the rest can be sent in this time.
    pub downtime_max: Duration,
    /// Pause after this many rounds, whatever is left.
    pub rounds_max: u32,
}

impl PrecopyPolicy {
    /// Policy with the default limit on rounds.
    pub fn new(rates: Rates, downtime_max: Duration) -> Self {
        Self { rates, downtime_max, rounds_max: ROUNDS_MAX }
    }

    /// Policy without rounds: the machine is paused throughout.
    pub fn stopped(max: Option<u64>) -> Self {
        Self { rates: Rates::Full { max }, downtime_max: Duration::ZERO, rounds_max: 0 }
    }

    fn max(&self) -> Option<u64> {
        match self.rates {
            Rates::Full { max } | Rates::Adaptive { max, .. } => max,
        }
    }

    /// Rate of the next round; none if it would exceed the maximum.
    fn next_rate(&self, history: &[RoundStats]) -> Option<Option<u64>> {
        let (min, max, step) = match self.rates {
            Rates::Full { max } => return Some(max),
            Rates::Adaptive { min, max, step } => (min, max, step),
        };
        let rate = match history.last() {
            Some(last) => (dirty_rate(history, last) as u64).saturating_add(step).max(min),
            None => min,
        };
        (history.is_empty() || max.is_none_or(|max| rate <= max)).then_some(Some(rate))
    }
}

impl StopPolicy for PrecopyPolicy {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        let soon = self.downtime(history, left).is_some_and(|downtime| downtime <= self.downtime_max);
        let why = if left < LITTLE_LEFT_PAGES {
            StopReason::LittleLeft
        } else if history.len() >= self.rounds_max as usize {
            StopReason::RoundsOver
        } else if soon {
            StopReason::WithinDowntime
        } else if is_plateau_minimum(history) {
            StopReason::Plateau
        } else {
            match self.next_rate(history) {
                Some(rate) => return RoundDecision::Round { rate },
                None => StopReason::RateAboveMax,
            }
        };
        RoundDecision::Stop { rate: self.max(), stop_reason: why }
    }

    /// Time on the wire. Loading and starting the machine on the target add to it.
    fn downtime(&self, history: &[RoundStats], left: u64) -> Option<Duration> {
        let last = history.last()?;
        let left = left as f64;
        let seen = history.iter().map(RoundStats::rate).fold(0.0, f64::max);
        let rate = self.max().map_or(seen, |max| max as f64);
        let by_bytes = left * bytes_a_page(history) / rate.max(1.0);
        let unhindered = last.limit.is_none_or(|limit| last.rate() < limit as f64 * HELD_BY_LIMIT);
        // An unhindered round shows how fast pages pass through every stage, the processor included.
        let by_pages = left * last.duration.as_secs_f64() / last.pages as f64;
        let unlimited = self.max().is_none();
        let seconds = match unhindered && last.pages > 0 {
            true if unlimited => by_pages,
            true => by_pages.max(by_bytes),
            false => by_bytes,
        };
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Without a limit pages go in ascending order: skipping about cost a quarter more bytes on a fast link,
    /// and a page sent once too often is quickly sent there. With a limit, rewritten pages wait.
    fn scan(&self) -> Scan {
        match self.rates {
            Rates::Full { .. } => Scan::Ascending,
            Rates::Adaptive { .. } => Scan::DeferHot { scan_interval: SCAN_INTERVAL },
        }
    }
}

/// Dirty rate during `last`, in bytes on the wire a second.
fn dirty_rate(history: &[RoundStats], last: &RoundStats) -> f64 {
    last.left as f64 * bytes_a_page(history) / last.duration.as_secs_f64().max(1e-6)
}

/// Bytes per page in the last round that had pages.
fn bytes_a_page(history: &[RoundStats]) -> f64 {
    let known = history.iter().rev().find_map(RoundStats::bytes_a_page);
    known.map_or(PAGE_SIZE as f64, |bytes| bytes.max(BYTES_A_PAGE_MIN))
}

/// Whether rounds no longer help, and either the last one left about as little as any since then or the
/// plateau lasted too long.
fn is_plateau_minimum(history: &[RoundStats]) -> bool {
    let since = (0..=history.len()).rev().take_while(|len| is_plateau(&history[..*len])).count();
    let Some(last) = history.last().filter(|_| since > 0) else { return false };
    // A plateau is seen after two rounds that did not help; the one before them counts too, as the least.
    let of_the_plateau = &history[history.len() - (since + 2).min(history.len())..];
    let least = of_the_plateau.iter().map(|round| round.left).min().unwrap_or(0);
    since > PLATEAU_ROUNDS_MAX || last.left as f64 <= least as f64 * NEAR_MINIMUM
}

#[cfg(test)]
#[path = "precopy_policy_tests.rs"]
mod tests;
