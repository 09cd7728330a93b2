//! Plan of scheduled work: when a run is due, which capsules a rule retains. Pure functions of records and
//! times of UTC, in milliseconds since 1970.

use std::collections::{BTreeSet, HashSet};
use whimbrel_api::Retention;
use whimbrel_core::Utc;

const DAY_MS: u64 = 86_400_000;
/// First Monday after the beginning of 1970, a Thursday.
const MONDAY_MS: u64 = 4 * DAY_MS;

/// Number of the period that a time lies in, in milliseconds since 1970, UTC.
type PeriodOf = fn(u64) -> u64;

/// When work is due: at the multiples of an interval, shifted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rhythm {
    pub(crate) every_ms: u64,
    /// Shift from the multiples; a day's rhythm begins at midnight of UTC.
    pub(crate) offset_ms: u64,
}

impl Rhythm {
    /// The last planned time up to `now`.
    fn slot(&self, now: u64) -> u64 {
        let every = self.every_ms.max(1);
        let offset = self.offset_ms % every;
        match now.checked_sub(offset) {
            Some(since) => offset + since / every * every,
            None => 0,
        }
    }

    /// Whether a run is due that began last at `last` (or, before the first, was planned then). However many
    /// were missed, it is one. A last run in the future, by a clock that was put back since, counts as none
    /// as soon as it is further away than one interval.
    pub(crate) fn is_due(&self, last: u64, now: u64) -> bool {
        let ahead = last > now.saturating_add(self.every_ms);
        ahead || self.slot(now) > last
    }

    /// The time of the next run.
    pub(crate) fn next(&self, last: u64, now: u64) -> u64 {
        match self.is_due(last, now) {
            true => now,
            false => self.slot(last.max(now)).saturating_add(self.every_ms.max(1)),
        }
    }
}

/// The times that a rule retains: the newest ones, and the newest of each of the last hours, days, weeks and
/// months in which there is one. The newest of all is retained unless the rule may empty the lineage.
///
/// Times after `now` are of a clock that was ahead. The rule counts them by themselves: they would else take
/// the places of all that is made since the clock was put back, for as long as it was ahead.
pub(crate) fn retained(times: &[u64], rule: &Retention, now: u64) -> BTreeSet<u64> {
    let (past, ahead): (Vec<u64>, Vec<u64>) = times.iter().partition(|time| **time <= now);
    [past, ahead].iter().flat_map(|times| retained_of(times, rule)).collect()
}

fn retained_of(times: &[u64], rule: &Retention) -> BTreeSet<u64> {
    let newest_first: BTreeSet<u64> = times.iter().copied().collect();
    let newest_first: Vec<u64> = newest_first.into_iter().rev().collect();
    let mut retained: BTreeSet<u64> = newest_first.iter().take(rule.last as usize).copied().collect();
    let periods: [(u32, PeriodOf); 4] =
        [(rule.hourly, hour), (rule.daily, day), (rule.weekly, week), (rule.monthly, month)];
    for (count, period) in periods {
        let mut seen = HashSet::new();
        let firsts = newest_first.iter().filter(|time| seen.insert(period(**time)));
        retained.extend(firsts.take(count as usize));
    }
    if !rule.may_empty {
        retained.extend(newest_first.first());
    }
    retained
}

fn hour(ms: u64) -> u64 {
    ms / 3_600_000
}

fn day(ms: u64) -> u64 {
    ms / DAY_MS
}

/// Weeks begin on Monday.
fn week(ms: u64) -> u64 {
    (ms + 7 * DAY_MS - MONDAY_MS) / (7 * DAY_MS)
}

fn month(ms: u64) -> u64 {
    let Utc { year, month, .. } = Utc::from_ms(ms);
    year * 12 + u64::from(month)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    const HOUR: u64 = 3_600_000;
    /// 2026-11-25T00:00:00Z, a Wednesday.
    const START: u64 = 1_795_564_800_000;

    fn rule(last: u32, hourly: u32, daily: u32, weekly: u32, monthly: u32) -> Retention {
        Retention { last, hourly, daily, weekly, monthly, may_empty: false }
    }

    #[test]
    fn many_missed_runs_are_one_and_a_day_begins_at_midnight() {
        let daily = Rhythm { every_ms: DAY_MS, offset_ms: 3 * HOUR };
        let created = START;
        assert!(!daily.is_due(created, START + 3 * HOUR - 1));
        assert!(daily.is_due(created, START + 3 * HOUR));
        assert_eq!(daily.next(created, START), START + 3 * HOUR);
        let late = START + 40 * DAY_MS + 5 * HOUR;
        assert!(daily.is_due(created, late) && !daily.is_due(late, late));
        assert_eq!(daily.next(late, late), START + 41 * DAY_MS + 3 * HOUR);
    }

    #[test]
    fn a_clock_that_was_far_ahead_does_not_stop_the_work_for_years() {
        let daily = Rhythm { every_ms: DAY_MS, offset_ms: 0 };
        let ran = START + 3650 * DAY_MS;
        assert!(daily.is_due(ran, START));
        assert!(!daily.is_due(START, START), "and once is enough");
        assert!(!daily.is_due(START + HOUR, START), "a small step back repeats nothing");
    }

    #[test]
    fn the_newest_of_each_period_is_retained() {
        let hours = |list: &[u64]| -> Vec<u64> { list.iter().map(|hour| START + hour * HOUR).collect() };
        let times = hours(&[0, 1, 2, 23, 24, 47, 120, 121]);
        let now = START + 121 * HOUR;
        let kept = |rule| {
            retained(&times, &rule, now).into_iter().map(|time| (time - START) / HOUR).collect::<Vec<_>>()
        };
        assert_eq!(kept(rule(2, 0, 0, 0, 0)), [120, 121]);
        assert_eq!(kept(rule(0, 0, 3, 0, 0)), [23, 47, 121], "days without a capsule do not count");
        assert_eq!(kept(rule(0, 0, 0, 2, 0)), [47, 121], "the Monday between them begins a week");
        assert_eq!(kept(rule(0, 0, 0, 0, 0)), [121], "the last one is not removed by mistake");
        let empty = Retention { may_empty: true, ..rule(0, 0, 0, 0, 0) };
        assert!(kept(empty).is_empty(), "unless it was said");
    }

    #[test]
    fn what_a_clock_made_that_was_ahead_takes_no_place_of_what_follows() {
        let rule = rule(3, 0, 2, 0, 0);
        let ahead: Vec<u64> = (0..5).map(|hour| START + 3650 * DAY_MS + hour * HOUR).collect();
        let mut kept: BTreeSet<u64> = ahead.iter().copied().chain([START - DAY_MS, START - HOUR]).collect();
        for hour in 0..6 {
            let now = START + hour * HOUR;
            kept.insert(now);
            let times: Vec<u64> = kept.iter().copied().collect();
            kept = retained(&times, &rule, now);
        }
        let hours: Vec<i64> =
            kept.iter().map(|time| (time.cast_signed() - START.cast_signed()) / HOUR.cast_signed()).collect();
        assert_eq!(hours[..4], [-1, 3, 4, 5], "three hours, and the last one of the day before");
        assert_eq!(kept.iter().filter(|time| ahead.contains(time)).count(), 3, "{hours:?}");
        // Once the clock is there again, they are like all others.
        let later: Vec<u64> = kept.iter().copied().collect();
        assert_eq!(retained(&later, &rule, START + 3651 * DAY_MS).len(), 4);
    }

    /// Half a year of a schedule, with clock steps and a daemon that is away now and then.
    fn simulate(seed: u64) {
        let mut random = StdRng::seed_from_u64(seed);
        let every_ms = [15 * 60_000, HOUR, 6 * HOUR, DAY_MS][random.random_range(0..4)];
        let rhythm = Rhythm { every_ms, offset_ms: random.random_range(0..DAY_MS) };
        let mut upto = |most: u32| random.random_range(0..=most);
        let rule = rule(upto(5), upto(30), upto(10), upto(5), upto(4));
        let (mut now, mut last, mut kept) = (START, START, BTreeSet::<u64>::new());
        for _ in 0..400 {
            now = match random.random_range(0..100) {
                0 => now + random.random_range(0..20 * DAY_MS),
                1 => now - random.random_range(0..2 * HOUR),
                _ => now + random.random_range(1..=every_ms),
            };
            if now > START + 200 * DAY_MS {
                break;
            }
            let (due, planned) = (rhythm.is_due(last, now), rhythm.next(last, now));
            assert_eq!(due, planned <= now, "seed {seed}");
            assert!(planned <= now.max(last) + every_ms, "seed {seed}: it waits longer than an interval");
            if !due {
                continue;
            }
            last = now;
            assert!(!rhythm.is_due(last, now), "seed {seed}: one run pays for all that were missed");
            kept.insert(now);
            let times: Vec<u64> = kept.iter().copied().collect();
            let after = retained(&times, &rule, now);
            check(&times, &after, (&rule, now), seed);
            kept = after;
        }
    }

    fn check(times: &[u64], after: &BTreeSet<u64>, (rule, now): (&Retention, u64), seed: u64) {
        assert!(after.iter().all(|time| times.contains(time)), "seed {seed}");
        assert!(after.contains(times.last().unwrap()), "seed {seed}: the newest is gone");
        let most = rule.last + rule.hourly + rule.daily + rule.weekly + rule.monthly;
        let sets = 1 + usize::from(times.iter().any(|time| *time > now));
        assert!(after.len() <= sets * (most as usize).max(1), "seed {seed}: {} are too many", after.len());
        let again: Vec<u64> = after.iter().copied().collect();
        assert_eq!(retained(&again, rule, now), *after, "seed {seed}: a second look removes more");
        // Each of the last days with a capsule still has its newest one.
        let days: BTreeSet<u64> = times.iter().map(|time| day(*time)).collect();
        for recent in days.iter().rev().take(rule.daily as usize) {
            let newest = times.iter().rfind(|time| day(**time) == *recent).unwrap();
            assert!(after.contains(newest), "seed {seed}: a day without its capsule");
        }
    }

    #[test]
    fn over_months_with_clock_steps_the_plan_keeps_what_it_promises() {
        (0..300).for_each(simulate);
    }
}
