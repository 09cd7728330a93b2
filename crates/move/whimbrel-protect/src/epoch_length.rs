//! Length of epochs during which no output waits. Pure.
//!
//! Epochs exist for the machine's output, which waits for the epoch commit. A machine that sends nothing may
//! run several times as long between pauses, and each pause less is time to compute. As soon as output waits
//! and the usual length has passed, the epoch is captured, so output never waits longer for a capture than
//! without this. Only the work that a takeover loses grows, and nobody has seen that.
//!
//! A long epoch could delay output by taking long to send. Therefore the length grows by the usual one with
//! each epoch that was committed within half of it, and is halved by one that was not.
//!
//! Invariant: the length is at least the usual one and at most the configured factor of it, or [`LONGEST`].

use std::time::{Duration, Instant};

/// Longest epoch, equal to the longest that a user may configure.
pub const LONGEST: Duration = Duration::from_secs(1);

/// Adaptive length of quiet epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochLength {
    length: Duration,
    most: Duration,
    now: Duration,
}

impl EpochLength {
    /// Epochs last up to `times` times `length`.
    pub fn new(length: Duration, times: u32) -> Self {
        let most = length.saturating_mul(times).min(LONGEST).max(length);
        Self { length, most, now: length }
    }

    /// Whether epochs may ever be longer than usual.
    pub fn is_adaptive(&self) -> bool {
        self.most > self.length
    }

    /// Due time of an epoch that started at `begun` and must not be captured before `earliest`.
    pub fn due(&self, begun: Instant, earliest: Instant, output_waits: bool) -> Instant {
        if output_waits { earliest } else { earliest.max(begun + self.now) }
    }

    /// Records how long after its capture an epoch was committed.
    pub fn committed(&mut self, delay: Duration) {
        self.now = match delay <= self.length / 2 {
            true => (self.now + self.length).min(self.most),
            false => (self.now / 2).max(self.length),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_grows_while_epochs_are_quick_and_shrinks_at_once_when_one_is_not() {
        let (begun, mut stretch) = (Instant::now(), EpochLength::new(50 * MS, 4));
        let lasts = |stretch: &EpochLength| stretch.due(begun, begun + 50 * MS, false) - begun;
        let mut seen = vec![lasts(&stretch)];
        for delay in [1, 25, 2, 3, 26, 26, 26, 1] {
            stretch.committed(delay * MS);
            seen.push(lasts(&stretch));
        }
        assert_eq!(seen, [50, 100, 150, 200, 200, 100, 50, 50, 100].map(|ms| ms * MS));
    }

    proptest! {
        #[test]
        fn what_waits_never_waits_longer_for_its_cut_than_at_the_usual_length(
            length in 25..1000u64, times in 1..20u32, late in 0..300u64,
            delays in prop::collection::vec(0..2000u64, 0..40),
        ) {
            let (length, begun) = (Duration::from_millis(length), Instant::now());
            let mut stretch = EpochLength::new(length, times);
            for delay in delays {
                stretch.committed(Duration::from_millis(delay));
                // Late as well: a slow link delays the next capture.
                let earliest = begun + length + Duration::from_millis(late);
                prop_assert_eq!(stretch.due(begun, earliest, true), earliest);
                let quiet = stretch.due(begun, earliest, false);
                prop_assert!(quiet >= earliest && quiet <= earliest.max(begun + (length * times).min(LONGEST).max(length)));
            }
            if times == 1 {
                prop_assert_eq!(stretch, EpochLength::new(length, 1));
            }
        }
    }
}
