//! Copies that a schedule has pushed to another host, and the tags that they have there.
//!
//! The other host removes nothing on request. So a copy that the rule does not retain gives its tag to the
//! next one: the tag moves when that is whole there, and the old copy goes at the next collection. A tag has
//! a number, so there are no more tags than the rule ever retained at once, and one.

use crate::plan;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use whimbrel_api::Retention;
use whimbrel_core::{
    CapsuleId, Digest, HostName, RefName,
    loss::{Loss, is_back},
};

/// Prefix of the tags of copies, at the host that has them.
const PREFIX: &str = "pushed.";

/// A copy at the other host. A capsule that later runs find there counts for each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PushedCopy {
    /// Latest time of a run that made it, or found it there.
    time_ms: u64,
    /// Earlier times, as far as the rule retains them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    earlier: Vec<u64>,
    capsule: CapsuleId,
}

impl PushedCopy {
    fn times(&self) -> impl Iterator<Item = u64> {
        self.earlier.iter().copied().chain([self.time_ms])
    }

    fn is_among(&self, retained: &BTreeSet<u64>) -> bool {
        self.times().any(|time| retained.contains(&time))
    }
}

/// The copies of a schedule, by the numbers of their tags.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Copies(BTreeMap<u32, PushedCopy>);

impl Copies {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The times that the rule retains now, of all copies and of one more if there is one: among the latest
    /// times of the copies, so that one that is found there again and again drives out no other, and among
    /// all.
    fn retained(&self, rule: &Retention, now_ms: u64, more: Option<u64>) -> BTreeSet<u64> {
        let latest: Vec<u64> = self.0.values().map(|copy| copy.time_ms).chain(more).collect();
        let all: Vec<u64> = self.0.values().flat_map(PushedCopy::times).chain(more).collect();
        [latest, all].iter().flat_map(|times| plan::retained(times, rule, now_ms)).collect()
    }

    /// The number for the tag of a capsule that is copied now: that of an earlier copy of it, or else of the
    /// oldest copy that the rule will not retain, or else a new one.
    pub(crate) fn number_for(&self, capsule: CapsuleId, now_ms: u64, rule: &Retention) -> u32 {
        let same = self.0.iter().find(|(_, copy)| copy.capsule == capsule);
        let retained = self.retained(rule, now_ms, Some(now_ms));
        let is_free = |copy: &PushedCopy| !copy.is_among(&retained) || is_back(Loss::RetainedCopyReplaced);
        let free = self.0.iter().filter(|(_, copy)| is_free(copy));
        let found = same.or_else(|| free.min_by_key(|(_, copy)| copy.time_ms)).map(|(number, _)| *number);
        found.unwrap_or_else(|| (0..).find(|number| !self.0.contains_key(number)).unwrap_or_default())
    }

    /// Notes that a run of this time has put the capsule behind the tag of this number, or found it there.
    pub(crate) fn put(&mut self, number: u32, capsule: CapsuleId, time_ms: u64, rule: &Retention) {
        let before = self.0.remove(&number).filter(|before| before.capsule == capsule);
        let mut times: Vec<u64> = before.iter().flat_map(PushedCopy::times).chain([time_ms]).collect();
        // The clock may have been put back meanwhile.
        times.sort_unstable();
        let latest = times.pop().unwrap_or(time_ms);
        self.0.insert(number, PushedCopy { time_ms: latest, earlier: times, capsule });
        let retained = self.retained(rule, time_ms, None);
        self.0.values_mut().for_each(|copy| copy.earlier.retain(|time| retained.contains(time)));
    }

    /// Numbers of the copies that the rule retains now, and of the others, oldest first.
    pub(crate) fn judge(&self, rule: &Retention, now_ms: u64) -> (Vec<u32>, Vec<u32>) {
        let retained = self.retained(rule, now_ms, None);
        let mut all: Vec<(u64, u32)> = self.0.iter().map(|(number, copy)| (copy.time_ms, *number)).collect();
        all.sort_unstable();
        let numbers = all.into_iter().map(|(_, number)| number);
        numbers.partition(|number| self.0[number].is_among(&retained))
    }
}

/// The tag of a number. Host and creation are in it by digest, so that no schedule moves the tags of another
/// one, or of an earlier one of its name.
pub(crate) fn tag(host: &HostName, schedule: &str, created_ms: u64, number: u32) -> RefName {
    let whose = Digest::of(format!("{host}/{created_ms}").as_bytes()).short();
    let text = format!("{PREFIX}{schedule}.{}.{number}", &whose[..8]);
    text.parse().expect("a prefix, a short name and digits are a valid ref")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: u64 = 86_400_000;
    const START: u64 = 1_795_564_800_000;

    fn capsule(number: u64) -> CapsuleId {
        CapsuleId(Digest::of(&number.to_le_bytes()))
    }

    #[test]
    fn daily_copies_take_no_more_tags_than_their_rule_retains_and_never_that_of_a_retained_one() {
        let rule = Retention { last: 2, daily: 3, weekly: 2, monthly: 3, ..Retention::default() };
        let mut copies = Copies::default();
        for day in 0..400 {
            let now = START + day * DAY_MS;
            let number = copies.number_for(capsule(day), now, &rule);
            let (retained, _) = copies.judge(&rule, now);
            let before = copies.clone();
            copies.put(number, capsule(day), now, &rule);
            let after: Vec<u64> = before.0.values().map(|copy| copy.time_ms).chain([now]).collect();
            for kept in retained.iter().filter(|kept| before.0.contains_key(kept)) {
                let still = plan::retained(&after, &rule, now).contains(&before.0[kept].time_ms);
                assert!(
                    !still || copies.0[kept] == before.0[kept],
                    "day {day} moves the tag of a retained copy"
                );
            }
        }
        assert!(copies.0.len() <= 11, "{copies:?}");
        let newest = copies.0.values().map(|copy| copy.time_ms).max();
        assert_eq!(newest, Some(START + 399 * DAY_MS));
    }

    #[test]
    fn a_capsule_that_is_pushed_again_has_one_tag_and_drives_out_no_older_one() {
        let rule = Retention { last: 2, ..Retention::default() };
        let mut copies = Copies::default();
        for (run, of) in [1, 2, 2, 2].into_iter().enumerate() {
            let now = START + run as u64 * DAY_MS;
            let number = copies.number_for(capsule(of), now, &rule);
            copies.put(number, capsule(of), now, &rule);
        }
        let all: Vec<CapsuleId> = copies.0.values().map(|copy| copy.capsule).collect();
        assert_eq!(all, [capsule(1), capsule(2)]);
    }

    #[test]
    fn a_capsule_that_is_found_again_counts_for_each_time_whatever_the_clock_did() {
        // A capsule of one week is found there in the next one, then another comes.
        let rule = Retention { last: 1, weekly: 2, ..Retention::default() };
        let mut copies = Copies::default();
        for (of, day) in [(1, 0), (2, 2), (2, 6), (3, 8)] {
            let now = START + day * DAY_MS;
            copies.put(copies.number_for(capsule(of), now, &rule), capsule(of), now, &rule);
        }
        let left = |copies: &Copies| copies.0.values().map(|copy| copy.capsule).collect::<Vec<_>>();
        assert_eq!(left(&copies), [capsule(2), capsule(3)], "the last of its week");
        // Ten years back, the newest one is found again, then others come.
        for (of, back) in [(3, 3650), (4, 3649), (5, 3648)] {
            let now = START - back * DAY_MS;
            copies.put(copies.number_for(capsule(of), now, &rule), capsule(of), now, &rule);
        }
        assert_eq!(left(&copies), [capsule(2), capsule(3), capsule(5)]);
        assert_eq!(copies.judge(&rule, START - 3648 * DAY_MS), (vec![2, 0, 1], vec![]), "oldest first");
    }

    #[test]
    fn no_schedule_has_the_tags_of_another() {
        let (alpha, beta) = ("alpha".parse().unwrap(), "b".repeat(63).parse().unwrap());
        let (long, other) = ("a".repeat(30), START + 1);
        let of_alpha = tag(&alpha, &long, START, u32::MAX);
        assert!(
            of_alpha != tag(&beta, &long, START, u32::MAX) && of_alpha != tag(&alpha, &long, other, u32::MAX)
        );
    }
}
