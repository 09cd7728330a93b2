//! How long an epoch lasts of which nobody waits for anything. Pure.
//!
//! Epochs are there for what the machine sends: that waits for one. A machine that sends nothing may be left
//! alone for several times as long, and each pause less is time that it computes. The moment something waits,
//! and the usual length has passed, the epoch is cut; so nobody ever waits longer for a cut than without
//! this. What is longer is the work that a takeover loses, which nobody has seen.
//!
//! What would make somebody wait longer is an epoch that takes long to send because it was long. So the
//! length grows by the usual one with each epoch that was sent within half of that, and is halved by one that
//! was not.
//!
//! Invariant: never less than the usual length, never more than it may be, nor than [`LONGEST`].

use std::time::{Duration, Instant};

/// No epoch is left open for longer than the longest that may be asked for.
pub const LONGEST: Duration = Duration::from_secs(1);

/// The length of quiet epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochLength {
    length: Duration,
    most: Duration,
    now: Duration,
}

impl EpochLength {
    /// Quiet epochs last up to `times` times `length`.
    pub fn new(length: Duration, times: u32) -> Self {
        let most = length.saturating_mul(times).min(LONGEST).max(length);
        Self { length, most, now: length }
    }

    /// Whether it ever does anything.
    pub fn is_any(&self) -> bool {
        self.most > self.length
    }

    /// When an epoch is due that began at `begun` and is not to be cut before `earliest`.
    pub fn due(&self, begun: Instant, earliest: Instant, output_waits: bool) -> Instant {
        if output_waits { earliest } else { earliest.max(begun + self.now) }
    }

    /// An epoch was at the standby so long after its cut.
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
                // Late as well: a link that does not follow puts the next cut off.
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
