//! How much is done to make pages small, chosen while they go out.
//!
//! The encoders are threads that encode, wait for the link, or have nothing to do. While they hardly wait they are what holds
//! the migration up, and do less; while there is time left for the next effort they take it, for its bytes are saved on the
//! link. So a slow link gets small pages and a fast one quick ones, whatever the processors are doing beside.
//!
//! Pure: durations in, an effort out.

use crate::codec::Effort;
use std::time::Duration;

/// An effort, and the time it takes a page beside zstd's level 1.
struct Step {
    effort: Effort,
    cost: f64,
}

const fn step(effort: Effort, cost: f64) -> Step {
    Step { effort, cost }
}

/// Measured on the memory of a Debian guest, 103 MB without zeros: 45.8 MB at level 1, 44.4 at 3, 43.8 at 6, 43.7 at 9;
/// 54.8 at level -5. More than 9 gains nothing for twice the time.
const STEPS: [Step; 6] = [
    step(Effort::None, 0.1),
    step(Effort::Zstd(-5), 0.6),
    step(Effort::Zstd(1), 1.0),
    step(Effort::Zstd(3), 1.6),
    step(Effort::Zstd(6), 5.0),
    step(Effort::Zstd(9), 9.0),
];
/// Level 1, which keeps up with a Gbit/s on one processor.
const FIRST: usize = 2;
/// Encoders that are busy for more than this part hold the link up.
const BUSY: f64 = 0.9;
/// The part for which they may be busy after a step up, if it costs what it is thought to.
const BUSY_NEXT: f64 = 0.7;

/// What the encoders did with their time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// Encoding.
    pub(crate) encoding: Duration,
    /// Waiting for the link to take what they had, or for pages.
    pub(crate) waiting: Duration,
}

/// The effort in force.
#[derive(Debug)]
pub(crate) struct Choice {
    step: usize,
    spent: Spent,
}

/// Time of all encoders together after which the choice is looked at again.
const WINDOW: Duration = Duration::from_millis(30);

impl Choice {
    pub(crate) fn new() -> Self {
        Self { step: FIRST, spent: Spent::default() }
    }

    /// Nobody waits but the link.
    pub(crate) fn effort(&self) -> Effort {
        STEPS[self.step].effort
    }

    /// The machine stands still: what takes a page longer than level 1 does would be waited for.
    pub(crate) fn urgent_effort(&self) -> Effort {
        STEPS[self.step.min(FIRST)].effort
    }

    /// So much more time was spent under the effort in force.
    pub(crate) fn spent(&mut self, more: Spent) {
        self.spent.encoding += more.encoding;
        self.spent.waiting += more.waiting;
        let total = self.spent.encoding + self.spent.waiting;
        if total < WINDOW {
            return;
        }
        let busy = self.spent.encoding.as_secs_f64() / total.as_secs_f64();
        self.spent = Spent::default();
        self.step = next(self.step, busy);
    }
}

fn next(step: usize, busy: f64) -> usize {
    if busy > BUSY {
        return step.saturating_sub(1);
    }
    match STEPS.get(step + 1) {
        Some(more) if busy * more.cost / STEPS[step].cost <= BUSY_NEXT => step + 1,
        _ => step,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What encoders of `threads` at `level1` bytes a second, which pack to `ratio`, come to on a link of `link` bytes a second.
    fn settle(link: f64, level1: f64, threads: f64) -> Effort {
        let mut choice = Choice::new();
        for _ in 0..200 {
            let at = &STEPS[choice.step];
            let ratio = if at.effort == Effort::None { 1.0 } else { 0.45 };
            let encode = threads * level1 / at.cost;
            let through = encode.min(link / ratio);
            let busy = through / encode;
            let encoding = WINDOW.mul_f64(busy);
            choice.spent(Spent { encoding, waiting: WINDOW - encoding });
        }
        choice.effort()
    }

    #[test]
    fn slow_links_get_small_pages_and_fast_ones_quick_pages() {
        let (mb, gbit) = (1e6, 125e6);
        assert_eq!(settle(0.1 * gbit, 400.0 * mb, 2.0), Effort::Zstd(9));
        assert_eq!(settle(gbit, 400.0 * mb, 2.0), Effort::Zstd(3));
        assert!(matches!(settle(3.0 * gbit, 400.0 * mb, 2.0), Effort::Zstd(1 | -5)));
        assert!(matches!(settle(100.0 * gbit, 400.0 * mb, 2.0), Effort::None));
        assert_eq!(settle(10.0 * gbit, 400.0 * mb, 16.0), Effort::Zstd(3));
    }

    #[test]
    fn nobody_waits_for_a_high_level_while_the_machine_stands_still() {
        let mut choice = Choice::new();
        (0..20).for_each(|_| choice.spent(Spent { encoding: Duration::ZERO, waiting: WINDOW }));
        assert_eq!((choice.effort(), choice.urgent_effort()), (Effort::Zstd(9), Effort::Zstd(1)));
    }

    proptest! {
        #[test]
        fn a_step_up_is_not_taken_back_at_once_if_costs_are_as_thought(step in 0..STEPS.len() - 1, busy in 0.0..1.0f64) {
            let up = next(step, busy);
            if up > step {
                prop_assert!(next(up, busy * STEPS[up].cost / STEPS[step].cost) >= up);
            }
        }
    }
}
