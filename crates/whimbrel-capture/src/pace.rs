//! When to stop copying and pause the machine: a pure decision over what the rounds so far have shown.
//!
//! Pre-copy pays only while a round leaves fewer pages than it began with. The signals are those of Clark et
//! al. (NSDI 2005, section 5.3): little is left, or rounds stop helping, or there were too many of them.

use std::time::Duration;

/// What one round did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoundStats {
    /// Pages delivered.
    pub pages: u64,
    /// Encoded bytes they cost.
    pub bytes: u64,
    /// How long the round took.
    pub took: Duration,
}

/// The limits a capture works under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Pause as soon as at most this many pages are left.
    pub pages_left_max: u64,
    /// Pause when the pages left would travel in this time at the rate of the last round; zero asks never.
    pub downtime_max: Duration,
    /// Pause after this many rounds whatever is left.
    pub rounds_max: u32,
}

/// What to do with the pages that are dirty now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Copy them while the machine runs.
    Round,
    /// Pause and copy them as the last ones.
    Stop,
}

impl Pace {
    /// Checkpoints into a local store: few rounds, since reading RAM is much faster than dirtying it.
    pub const CHECKPOINT: Pace = Pace { pages_left_max: 1024, downtime_max: Duration::ZERO, rounds_max: 4 };

    /// No rounds at all: the machine stands still meanwhile (suspend of a paused machine, `--mode stop`).
    pub const STOPPED: Pace = Pace { pages_left_max: u64::MAX, downtime_max: Duration::ZERO, rounds_max: 0 };

    /// Live migration that aims at a pause of at most `downtime_max`.
    pub const fn migration(downtime_max: Duration) -> Pace {
        Pace { pages_left_max: 64, downtime_max, rounds_max: 30 }
    }

    /// Decides what to do about `left` dirty pages after the rounds in `history`.
    pub fn decide(&self, history: &[RoundStats], left: u64) -> Verdict {
        let few = left <= self.pages_left_max;
        let enough_rounds = history.len() >= self.rounds_max as usize;
        let soon = history.last().is_some_and(|last| self.is_short(last, left));
        if few || enough_rounds || soon || stalled(history, left) { Verdict::Stop } else { Verdict::Round }
    }

    fn is_short(&self, last: &RoundStats, left: u64) -> bool {
        let predicted = last.took.as_secs_f64() * left as f64 / last.pages.max(1) as f64;
        !self.downtime_max.is_zero() && last.pages > 0 && predicted <= self.downtime_max.as_secs_f64()
    }
}

/// Two rounds in a row that each left at least nine tenths of what they had copied: a third changes nothing.
fn stalled(history: &[RoundStats], left: u64) -> bool {
    let [.., before, last] = history else { return false };
    let helped_little = |copied: u64, left: u64| left * 10 >= copied * 9;
    helped_little(before.pages, last.pages) && helped_little(last.pages, left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(pages: u64, ms: u64) -> RoundStats {
        RoundStats { pages, bytes: pages * 1000, took: Duration::from_millis(ms) }
    }

    #[test]
    fn stops_when_little_is_left() {
        let pace = Pace { pages_left_max: 10, downtime_max: Duration::ZERO, rounds_max: 30 };
        assert_eq!(pace.decide(&[], 11), Verdict::Round);
        assert_eq!(pace.decide(&[], 10), Verdict::Stop);
    }

    #[test]
    fn stops_when_the_rest_fits_the_downtime() {
        let pace = Pace::migration(Duration::from_millis(20));
        assert_eq!(pace.decide(&[round(100_000, 3000)], 1000), Verdict::Round, "30 ms at the last rate");
        assert_eq!(pace.decide(&[round(100_000, 3000)], 600), Verdict::Stop, "18 ms at the last rate");
    }

    #[test]
    fn stops_when_rounds_no_longer_help() {
        let pace = Pace::migration(Duration::from_millis(1));
        let flat = [round(20_000, 600), round(16_000, 500), round(15_900, 500)];
        assert_eq!(pace.decide(&flat[..2], 16_000), Verdict::Round, "only one round was flat");
        assert_eq!(pace.decide(&flat, 16_000), Verdict::Stop);
    }

    #[test]
    fn a_stopped_machine_needs_no_rounds() {
        assert_eq!(Pace::STOPPED.decide(&[], 1 << 30), Verdict::Stop);
    }
}
