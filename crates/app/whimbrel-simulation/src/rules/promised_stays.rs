//! Rule: of the copies that a user was told of, those are there that the rule of their schedule promises:
//! the newest ones, and the newest of each of the last hours, days and weeks that have one. What the rule
//! promises is worked out here once more, from its words alone.

use crate::{report::violation, scenes::capsules::Pages};
use std::collections::{BTreeMap, BTreeSet};
use whimbrel_api::Retention;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// Days from a Monday to the first of 1970, a Thursday.
const FROM_MONDAY: u64 = 3;

/// What a schedule has promised.
#[derive(Debug, Default)]
pub(crate) struct Promise {
    rule: Retention,
    /// Older tags are not the schedule's, which leaves them alone.
    created_ms: u64,
    /// What runs have put, or tried to put, behind a tag, by the times of the runs.
    attempts: BTreeMap<u64, Pages>,
    /// Times of the runs that the user was told to have succeeded.
    acknowledged: BTreeSet<u64>,
    /// The last of them, however old a clock makes it look, and the attempts since.
    last: Vec<u64>,
}

impl Promise {
    pub(crate) fn begin(&mut self, rule: Retention, created_ms: u64) {
        (self.rule, self.created_ms) = (rule, created_ms);
    }

    /// The run that began at `time_ms` is about to copy `pages`.
    pub(crate) fn attempt(&mut self, time_ms: u64, pages: Pages) {
        self.attempts.insert(time_ms, pages);
        self.last.push(time_ms);
    }

    /// The run that began at `time_ms` has succeeded.
    pub(crate) fn acknowledge(&mut self, time_ms: u64) {
        self.acknowledged.insert(time_ms);
        self.last = vec![time_ms];
    }
}

/// Whether the rule promises the copy of this time, among those of all times.
fn is_promised(time: u64, times: &BTreeSet<u64>, rule: &Retention) -> bool {
    let newer = || times.range(time + 1..);
    let is_among = |count: u32, period: &dyn Fn(u64) -> u64| {
        let later: BTreeSet<u64> = newer().map(|other| period(*other)).collect();
        !later.contains(&period(time)) && later.len() < count as usize
    };
    newer().count() < (rule.last as usize).max(1)
        || is_among(rule.hourly, &|time| time / HOUR_MS)
        || is_among(rule.daily, &|time| time / DAY_MS)
        || is_among(rule.weekly, &|time| (time / DAY_MS + FROM_MONDAY) / 7)
}

/// The tags that are there, by their times, have all that is promised.
pub(crate) fn check_tags(promise: &Promise, there: &BTreeMap<u64, Pages>, when: &str) {
    check_last(promise, |time| there.contains_key(time), when);
    let own = |time: &&u64| **time >= promise.created_ms;
    let times = promise.acknowledged.iter().chain(there.keys()).filter(own).copied().collect();
    for time in &promise.acknowledged {
        let must = *time < promise.created_ms || is_promised(*time, &times, &promise.rule);
        if must && there.get(time) != promise.attempts.get(time) {
            let found = there.keys().collect::<Vec<_>>();
            violation("promised_stays", &format!("{when}: no checkpoint of {time}, but of {found:?}"));
        }
    }
}

/// The copies at the other host have all that is promised.
pub(crate) fn check_copies(promise: &Promise, there: &[Pages], when: &str) {
    check_last(promise, |time| promise.attempts.get(time).is_some_and(|pages| there.contains(pages)), when);
    let of = |time: &u64| promise.attempts.get(time);
    let is_there = |time: &&u64| of(time).is_some_and(|pages| there.contains(pages));
    let landed = promise.attempts.keys().filter(is_there);
    let times = promise.acknowledged.iter().chain(landed).copied().collect();
    for time in &promise.acknowledged {
        if is_promised(*time, &times, &promise.rule) && !is_there(&time) {
            let found: Vec<&u64> = times.iter().filter(is_there).collect();
            violation("promised_stays", &format!("{when}: no copy of {time}, but of {found:?}"));
        }
    }
}

/// What the last run has made is there, unless a later one was under way.
fn check_last(promise: &Promise, is_there: impl Fn(&u64) -> bool, when: &str) {
    if !promise.acknowledged.is_empty() && !promise.last.iter().any(is_there) {
        violation("promised_stays", &format!("{when}: nothing of the last run is there, {:?}", promise.last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_rule_promise_the_newest_of_each_period() {
        let hours = |list: &[u64]| -> BTreeSet<u64> { list.iter().map(|hour| hour * HOUR_MS).collect() };
        let times = hours(&[1, 5, 23, 24, 47, 120, 121]);
        let promised = |rule: Retention| -> Vec<u64> {
            times
                .iter()
                .filter(|time| is_promised(**time, &times, &rule))
                .map(|time| time / HOUR_MS)
                .collect()
        };
        assert_eq!(promised(Retention { last: 2, ..Retention::default() }), [120, 121]);
        assert_eq!(promised(Retention { daily: 3, ..Retention::default() }), [23, 47, 121]);
        // The first Monday of 1970 begins after 96 hours.
        assert_eq!(promised(Retention { weekly: 2, ..Retention::default() }), [47, 121]);
        assert_eq!(promised(Retention::default()), [121]);
    }
}
