//! Stop policy: a pure decision from the past rounds, when to pause the machine and how fast to copy until
//! then.
//!
//! Contents: the trait ([`StopPolicy`], [`RoundDecision`]) and the simple policy of checkpoints
//! ([`CheckpointPolicy`]). The policy of live migration is in [`crate::precopy_policy`].

use crate::RoundStats;
use std::time::Duration;

/// Decision about the pages that are dirty now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundDecision {
    /// Copy them while the machine runs.
    Round {
        /// Limit in bytes a second, if any.
        rate: Option<u64>,
    },
    /// Pause and copy them as the last ones.
    Stop {
        /// Limit of the last round, if any.
        rate: Option<u64>,
        /// Reason to end the rounds.
        stop_reason: StopReason,
    },
}

/// Reason to end the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// Almost nothing is left.
    LittleLeft,
    /// What is left can be sent within the permitted downtime.
    WithinDowntime,
    /// Keeping up with the machine would need a higher rate than permitted.
    RateAboveMax,
    /// More rounds no longer help.
    Plateau,
    /// The maximum number of rounds is reached.
    RoundsOver,
}

impl StopReason {
    /// Whether a lower dirty rate would have made another round worthwhile.
    pub(crate) fn is_hopeless(self) -> bool {
        matches!(self, Self::RateAboveMax | Self::Plateau)
    }
}

/// Order in which a round visits pages, and which of them it copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// All pages, in ascending order.
    Ascending,
    /// Clusters in pseudo-random order; pages that are written again before they are read wait for a later
    /// round.
    DeferHot {
        /// Interval between two scans of the dirty log, longer if scans are slow; zero scans before every
        /// cluster.
        scan_interval: Duration,
    },
}

/// Policy that decides about rounds. Pure: the same history gives the same answers.
pub trait StopPolicy {
    /// Decides about `left` dirty pages after the rounds in `history`.
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision;

    /// Predicted downtime if the machine were paused now, if it can be predicted.
    fn downtime(&self, history: &[RoundStats], left: u64) -> Option<Duration>;

    /// Order in which a round visits pages, and which of them it copies.
    fn scan(&self) -> Scan;

    /// Most pages that may be left for the pause. With more the capture fails, and the machine runs on.
    fn pause_pages_max(&self) -> u64 {
        u64::MAX
    }
}

/// Policy with few rounds at full speed, for sinks that accept pages faster than a machine writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// Pause when at most this many pages are left.
    pub pages_left_max: u64,
    /// Pause after this many rounds, whatever is left.
    pub rounds_max: u32,
}

impl CheckpointPolicy {
    /// Checkpoint into a local store: few rounds, since reading RAM is much faster than dirtying it.
    pub const CHECKPOINT: CheckpointPolicy = CheckpointPolicy { pages_left_max: 1024, rounds_max: 4 };

    /// Suspend into a local store. The machine is to stand still anyway, so what is written within seconds is
    /// written after it has stopped: no page twice, and the guest takes no processor from the store. Of more,
    /// most is written before, so that a suspend that fails has not cost the guest minutes.
    pub const SUSPEND: CheckpointPolicy = CheckpointPolicy { pages_left_max: 1 << 18, rounds_max: 4 };

    /// No rounds at all: the machine is paused throughout (suspend of a paused machine).
    pub const STOPPED: CheckpointPolicy = CheckpointPolicy { pages_left_max: u64::MAX, rounds_max: 0 };
}

impl StopPolicy for CheckpointPolicy {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        let stop = |why| RoundDecision::Stop { rate: None, stop_reason: why };
        if left <= self.pages_left_max {
            stop(StopReason::LittleLeft)
        } else if history.len() >= self.rounds_max as usize {
            stop(StopReason::RoundsOver)
        } else if is_plateau(history) {
            stop(StopReason::Plateau)
        } else {
            RoundDecision::Round { rate: None }
        }
    }

    fn downtime(&self, _: &[RoundStats], _: u64) -> Option<Duration> {
        None
    }

    fn scan(&self) -> Scan {
        Scan::Ascending
    }
}

/// Whether the last two rounds left at least nine tenths of the least that was left before them: a third
/// would change nothing.
pub(crate) fn is_plateau(history: &[RoundStats]) -> bool {
    let [before @ .., last_but_one, last] = history else { return false };
    let first = history[0].pages + history[0].skipped;
    let least_before = before.iter().map(|round| round.left).fold(first, u64::min);
    last.left.min(last_but_one.left) as f64 >= least_before as f64 * 0.9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(pages: u64, left: u64) -> RoundStats {
        RoundStats { pages, left, ..RoundStats::default() }
    }

    #[test]
    fn stops_when_little_is_left() {
        let pace = CheckpointPolicy { pages_left_max: 10, rounds_max: 30 };
        assert_eq!(pace.decide(&[], 11), RoundDecision::Round { rate: None });
        assert_eq!(
            pace.decide(&[], 10),
            RoundDecision::Stop { rate: None, stop_reason: StopReason::LittleLeft }
        );
    }

    #[test]
    fn rounds_that_no_longer_help_are_a_plateau() {
        let flat = [round(20_000, 16_000), round(16_000, 15_900), round(15_900, 16_000)];
        assert!(!is_plateau(&flat[..1]) && !is_plateau(&flat[..2]), "the first one helped");
        assert!(is_plateau(&flat));
        assert!(!is_plateau(&[round(20_000, 10_000), round(10_000, 5_000), round(5_000, 2_500)]));
    }

    #[test]
    fn a_gib_is_suspended_after_the_machine_has_stopped_and_of_more_most_before() {
        let gib = (1 << 30) / whimbrel_core::PAGE_SIZE as u64;
        let decide = |history: &[RoundStats], left| CheckpointPolicy::SUSPEND.decide(history, left);
        assert!(matches!(decide(&[], gib), RoundDecision::Stop { .. }));
        assert_eq!(decide(&[], gib + 1), RoundDecision::Round { rate: None });
        assert!(matches!(decide(&[round(4 * gib, gib)], gib), RoundDecision::Stop { .. }));
    }

    #[test]
    fn a_stopped_machine_needs_no_rounds() {
        assert!(matches!(CheckpointPolicy::STOPPED.decide(&[], 1 << 30), RoundDecision::Stop { .. }));
    }
}
