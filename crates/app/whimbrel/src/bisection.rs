//! Bisection: the order in which the states between a good and a bad one are tried, and what is known then.
//! Pure. After `git bisect`: what cannot be judged is skipped, and the next state is the one nearest to the
//! middle.

use std::collections::BTreeSet;

/// What a command says of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Good,
    Bad,
    /// Neither: the state cannot be judged.
    Skipped,
}

impl Verdict {
    /// Meaning of an exit code; none for those that judge nothing (`git help bisect`, "Bisect run").
    pub(crate) fn of_exit(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::Good),
            125 => Some(Self::Skipped),
            1..=127 => Some(Self::Bad),
            _ => None,
        }
    }
}

/// States in a row by age, of which the first is good and the last is bad.
#[derive(Debug)]
pub(crate) struct Bisection {
    /// Youngest state that is good, and the oldest one that is bad.
    good: usize,
    bad: usize,
    skipped: BTreeSet<usize>,
}

impl Bisection {
    /// Between the first and the last of `states`, of which there are at least two.
    pub(crate) fn between(states: usize) -> Self {
        Self { good: 0, bad: states.saturating_sub(1), skipped: BTreeSet::new() }
    }

    /// The next state to try; none if nothing more can be found out.
    pub(crate) fn next(&self) -> Option<usize> {
        let middle = self.good + (self.bad - self.good) / 2;
        let open = (self.good + 1..self.bad).filter(|state| !self.skipped.contains(state));
        open.min_by_key(|state| state.abs_diff(middle))
    }

    /// Notes what was said of a state between the two.
    pub(crate) fn note(&mut self, state: usize, verdict: Verdict) {
        match verdict {
            Verdict::Good => self.good = state,
            Verdict::Bad => self.bad = state,
            Verdict::Skipped => drop(self.skipped.insert(state)),
        }
    }

    /// Most states that will be tried from now on, if none is skipped.
    pub(crate) fn steps_left(&self) -> u32 {
        (self.bad - self.good).next_power_of_two().trailing_zeros()
    }

    /// The youngest state that is known to be good.
    pub(crate) fn last_good(&self) -> usize {
        self.good
    }

    /// States one of which is the first bad one, by age. More than one only if states were skipped.
    pub(crate) fn first_bad(&self) -> std::ops::RangeInclusive<usize> {
        self.good + 1..=self.bad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_mean_what_they_mean_to_git() {
        let meant = [0, 1, 124, 125, 126, 127, 128, 137, -1].map(Verdict::of_exit);
        let (good, bad, skipped) = (Some(Verdict::Good), Some(Verdict::Bad), Some(Verdict::Skipped));
        assert_eq!(meant, [good, bad, bad, skipped, bad, bad, None, None, None]);
    }

    #[test]
    fn the_first_bad_state_is_found_in_as_many_steps_as_its_logarithm() {
        for (states, first) in (2..120_usize).flat_map(|states| (1..states).map(move |first| (states, first)))
        {
            let mut search = Bisection::between(states);
            let (most, mut steps) = (search.steps_left(), 0);
            while let Some(state) = search.next() {
                search.note(state, if state < first { Verdict::Good } else { Verdict::Bad });
                steps += 1;
            }
            assert_eq!((search.first_bad(), search.last_good()), (first..=first, first - 1));
            assert!(steps <= most, "{steps} steps of {most} for {first} of {states}");
        }
    }

    #[test]
    fn what_is_skipped_is_never_called_good_or_bad_and_never_tried_again() {
        const STATES: usize = 9;
        for (skips, first) in
            (0..1_u32 << STATES).flat_map(|skips| (1..STATES).map(move |first| (skips, first)))
        {
            let is_skipped = |state: usize| skips >> state & 1 == 1;
            let (mut search, mut tried) = (Bisection::between(STATES), BTreeSet::new());
            while let Some(state) = search.next() {
                assert!(tried.insert(state), "{state} twice");
                let verdict = match is_skipped(state) {
                    true => Verdict::Skipped,
                    false if state < first => Verdict::Good,
                    false => Verdict::Bad,
                };
                search.note(state, verdict);
            }
            let found = search.first_bad();
            assert!(found.contains(&first), "{first} of {found:?}");
            // All of them but the last, which is bad, could not be judged.
            assert!((*found.start()..*found.end()).all(is_skipped), "{found:?} of {skips:b}");
        }
    }
}
