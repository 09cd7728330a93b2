//! The policy of live migration: how fast each round goes and when the machine is paused.
//!
//! Without a minimum every round goes as fast as it may. With one it is the dynamic rate-limiting of Clark et
//! al. (NSDI 2005, section 5.3): the first round at the minimum, each next at the rate at which the machine
//! dirtied pages during the last one plus a step, never below the minimum; when that would pass the maximum
//! the machine is paused. Either way it is paused when next to nothing is left, when the rest travels within
//! the downtime that is allowed, or when rounds no longer help, and then at a round that left about as little
//! as any lately. The last round goes at the maximum.
//!
//! Rates are bytes on the wire, where pages arrive compressed or as differences. So pages dirtied are
//! converted by what pages of the last round came to: else a machine whose writes are cheap to send would be
//! paused for nothing.
//!
//! Pure: no clock, no state beside the rounds that were.

use crate::{RoundDecision, RoundStats, Scan, StopPolicy, StopReason, stop_policy::is_plateau};
use std::time::Duration;
use whimbrel_core::PAGE_SIZE;

/// "When less than 256 KB remains to be transferred" (section 5.3).
const LITTLE_LEFT_PAGES: u64 = (256 << 10) / PAGE_SIZE as u64;
/// Rounds whatever happens; QEMU's users know similar numbers.
const ROUNDS_MAX: u32 = 30;
/// So many rounds of a plateau may pass in the hope for one that leaves little.
const PLATEAU_ROUNDS_MAX: usize = 4;
/// A round that left at most so much more than the least of the plateau counts as its minimum.
const NEAR_MINIMUM: f64 = 1.05;
/// A round slower than this part of its limit was held up by something else: the link, or the processor.
const HELD_BY_LIMIT: f64 = 0.9;
/// A page costs at least this on the wire; less is a round of zeros that says nothing about the next.
const BYTES_A_PAGE_MIN: f64 = 256.0;

/// What the rest may take to travel before the machine is paused, unless somebody says otherwise: less than
/// what a pause takes besides. A round more that gets there takes some milliseconds while the machine runs.
pub const DOWNTIME_MAX: Duration = Duration::from_millis(2);

/// Looks at what was written, during a round. At 1 Gbit/s 2 MB go out between two of them.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How fast rounds go, in bytes a second on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rates {
    /// Every round as fast as it may.
    Full {
        /// The limit, if there is one.
        max: Option<u64>,
    },
    /// As fast as the machine writes, between limits.
    Adaptive {
        /// The first round, and the least of any other.
        min: u64,
        /// Rounds that would need more are not begun; the last one goes at it.
        max: Option<u64>,
        /// How much faster than the machine writes.
        step: u64,
    },
}

/// The limits a migration works under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecopyPolicy {
    /// How fast.
    pub rates: Rates,
    /// Pause when the rest would travel in this time.
    pub downtime_max: Duration,
    /// Pause after this many rounds whatever is left.
    pub rounds_max: u32,
}

impl PrecopyPolicy {
    /// The usual limits.
    pub fn new(rates: Rates, downtime_max: Duration) -> Self {
        Self { rates, downtime_max, rounds_max: ROUNDS_MAX }
    }

    /// The machine stands still all the time.
    pub fn stopped(max: Option<u64>) -> Self {
        Self { rates: Rates::Full { max }, downtime_max: Duration::ZERO, rounds_max: 0 }
    }

    fn max(&self) -> Option<u64> {
        match self.rates {
            Rates::Full { max } | Rates::Adaptive { max, .. } => max,
        }
    }

    /// The rate of the next round; none if it would pass the maximum.
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
        } else if is_low_of_a_plateau(history) {
            StopReason::Plateau
        } else {
            match self.next_rate(history) {
                Some(rate) => return RoundDecision::Round { rate },
                None => StopReason::RateAboveMax,
            }
        };
        RoundDecision::Stop { rate: self.max(), why }
    }

    /// The time on the wire. What the machine takes to load and start on the other side comes on top.
    fn downtime(&self, history: &[RoundStats], left: u64) -> Option<Duration> {
        let last = history.last()?;
        let left = left as f64;
        let seen = history.iter().map(RoundStats::rate).fold(0.0, f64::max);
        let rate = self.max().map_or(seen, |max| max as f64);
        let by_bytes = left * bytes_a_page(history) / rate.max(1.0);
        let unhindered = last.limit.is_none_or(|limit| last.rate() < limit as f64 * HELD_BY_LIMIT);
        // A round that nothing held back says how fast pages go through all of it, the processor included.
        let by_pages = left * last.took.as_secs_f64() / last.pages as f64;
        let unlimited = self.max().is_none();
        let seconds = match unhindered && last.pages > 0 {
            true if unlimited => by_pages,
            true => by_pages.max(by_bytes),
            false => by_bytes,
        };
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Without a limit pages go in their order: a scan that skips about cost a quarter more bytes on a fast
    /// link, and a hot page that travels once too often is soon gone there. With one, hot pages wait.
    fn scan(&self) -> Scan {
        match self.rates {
            Rates::Full { .. } => Scan::Ascending,
            Rates::Adaptive { .. } => Scan::HotWait { look_every: LOOK_EVERY },
        }
    }
}

/// Bytes a second at which the machine made work for the wire while `last` ran.
fn dirty_rate(history: &[RoundStats], last: &RoundStats) -> f64 {
    last.left as f64 * bytes_a_page(history) / last.took.as_secs_f64().max(1e-6)
}

/// What a page came to in the last round that had any.
fn bytes_a_page(history: &[RoundStats]) -> f64 {
    let known = history.iter().rev().find_map(RoundStats::bytes_a_page);
    known.map_or(PAGE_SIZE as f64, |bytes| bytes.max(BYTES_A_PAGE_MIN))
}

/// Rounds no longer help, and the last one left about as little as any since then, or patience is over.
fn is_low_of_a_plateau(history: &[RoundStats]) -> bool {
    let since = (0..=history.len()).rev().take_while(|len| is_plateau(&history[..*len])).count();
    let Some(last) = history.last().filter(|_| since > 0) else { return false };
    // It is seen when two rounds have not helped, and the one before them counts: it set the mark.
    let of_the_plateau = &history[history.len() - (since + 2).min(history.len())..];
    let least = of_the_plateau.iter().map(|round| round.left).min().unwrap_or(0);
    since > PLATEAU_ROUNDS_MAX || last.left as f64 <= least as f64 * NEAR_MINIMUM
}

#[cfg(test)]
#[path = "precopy_policy_tests.rs"]
mod tests;
