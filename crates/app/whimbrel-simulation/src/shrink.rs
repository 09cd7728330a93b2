//! Shrinking: makes the story of a failed seed as short as it goes, while the rule that it breaks is the
//! same.
//!
//! First fewer changes of thread by chance, then faults left out one by one. Streams of random numbers
//! apart make that possible: what is left out does not move what remains.

use crate::{
    report::Outcome,
    seeds::{Run, run_one},
};
use anyhow::Result;

/// Runs that shrinking may take.
const RUNS_MAX: usize = 60;

/// A run that breaks the same rule as `run` did with less, and its outcome.
pub(crate) fn shrink(run: Run, outcome: Outcome) -> Result<(Run, Outcome)> {
    let rule = outcome.violation.as_ref().map(|violation| violation.rule.clone());
    let (mut best, mut runs) = ((run, outcome), 0);
    let mut attempt = |run: Run, best: &mut (Run, Outcome)| -> Result<bool> {
        runs += 1;
        if runs > RUNS_MAX {
            return Ok(false);
        }
        let outcome = run_one(run.clone())?;
        let is_same = outcome.violation.as_ref().map(|violation| &violation.rule) == rule.as_ref();
        if is_same {
            *best = (run, outcome);
        }
        Ok(is_same)
    };
    let with_switches = |run: &Run, most: u64| {
        let mut run = run.clone();
        run.config.switches_max = Some(most);
        run
    };
    let (mut low, mut high) = (0, best.1.switches);
    let no_switches = with_switches(&best.0, 0);
    if !attempt(no_switches, &mut best)? {
        // The number of switches below which it no longer fails need not be one number: any that fails is
        // good.
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            let run = with_switches(&best.0, middle);
            if attempt(run, &mut best)? { high = middle } else { low = middle }
        }
    }
    for fault in 1..=best.1.faults {
        let mut run = best.0.clone();
        run.config.without.insert(fault);
        attempt(run, &mut best)?;
    }
    Ok(best)
}
