//! Policy of seeding: when the machine is paused for the last part of its first copy.
//!
//! Rounds go on until an epoch's worth of pages is left, or until more rounds do not help. If too much is
//! left then, the machine is slowed down; if that does not help either, seeding fails. So a machine that
//! writes more than its link carries does not stand still for the time that the rest takes to send.

use std::time::Duration;
use whimbrel_capture::{CheckpointPolicy, RoundDecision, RoundStats, Scan, StopPolicy, StopReason};
use whimbrel_core::PAGE_SIZE;

/// Rounds until a thousand pages are left, and no more than eight between two steps of the throttle.
const ROUNDS: CheckpointPolicy = CheckpointPolicy { pages_left_max: 1024, rounds_max: 8 };
/// Most pages of a pause: they are copied aside within some 100 ms.
const PAUSE_PAGES_MAX: u64 = (128 << 20) / PAGE_SIZE as u64;
/// Bytes a second that are copied aside, at least.
const COPY_RATE: f64 = 1e9;

/// Policy of seeding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeedingPolicy;

impl StopPolicy for SeedingPolicy {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        match ROUNDS.decide(history, left) {
            // More rounds help only a machine that writes less.
            RoundDecision::Stop { rate, .. } if left > PAUSE_PAGES_MAX => {
                RoundDecision::Stop { rate, stop_reason: StopReason::Plateau }
            }
            // Little enough is left, so nothing is slowed down.
            RoundDecision::Stop { rate, stop_reason: StopReason::Plateau } => {
                RoundDecision::Stop { rate, stop_reason: StopReason::RoundsOver }
            }
            decision => decision,
        }
    }

    fn downtime(&self, _: &[RoundStats], left: u64) -> Option<Duration> {
        Some(Duration::from_secs_f64(left as f64 * PAGE_SIZE as f64 / COPY_RATE))
    }

    fn scan(&self) -> Scan {
        Scan::Ascending
    }

    fn pause_pages_max(&self) -> u64 {
        PAUSE_PAGES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(left: &[u64]) -> Vec<RoundStats> {
        left.iter().map(|left| RoundStats { pages: 262_144, left: *left, ..RoundStats::default() }).collect()
    }

    fn stops(history: &[u64], left: u64) -> Option<StopReason> {
        match SeedingPolicy.decide(&rounds(history), left) {
            RoundDecision::Stop { stop_reason, .. } => Some(stop_reason),
            RoundDecision::Round { .. } => None,
        }
    }

    #[test]
    fn a_machine_is_slowed_down_only_if_too_much_is_left_for_a_pause() {
        assert_eq!(stops(&[200_000], 200_000), None);
        assert_eq!(stops(&[200_000, 40_000], 1000), Some(StopReason::LittleLeft));
        // Rounds that do not help, and too many of them: with much left, and with little.
        let (flat, many) = ([250_000; 3], [100_000, 80_000, 60_000, 50_000, 40_000, 30_000, 20_000, 15_000]);
        for history in [&flat[..], &many] {
            assert_eq!(stops(history, PAUSE_PAGES_MAX + 1), Some(StopReason::Plateau));
            assert_eq!(stops(history, PAUSE_PAGES_MAX), Some(StopReason::RoundsOver));
        }
        assert!(SeedingPolicy.downtime(&[], PAUSE_PAGES_MAX) < Some(Duration::from_millis(200)));
    }
}
