//! Policy of a folder: copies and chunking of its files, and which versions are retained. Pure.
//!
//! A folder is an application (IV.D of the paper). Files named `A.Ni.Tj` are the states of application A on
//! node Ni at timestep Tj. A policy treats all timesteps of one node as versions of one series. The versions
//! of other files are those written under the same name.

use crate::chunk::Chunking;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The point at which a write counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Safety {
    /// After one copy; the others are made in the background.
    Optimistic,
    /// After all copies exist.
    #[default]
    Pessimistic,
}

/// Rules that retain old versions. Without any, all versions are retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct Retention {
    /// Number of newest versions to retain; 1 is the paper's automated replace.
    pub last: Option<u32>,
    /// Maximum age in seconds; the paper's automated purge.
    pub seconds: Option<u64>,
    /// Number of days of which the newest version is retained.
    pub daily: Option<u32>,
    /// Number of weeks of which the newest version is retained.
    pub weekly: Option<u32>,
}

/// The policy for the files of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Number of copies of every chunk.
    pub copies: u8,
    /// The point at which `close` returns.
    pub safety: Safety,
    /// Stripe width: benefactors that a file is written to at once.
    pub width: u16,
    /// The way in which files are split into chunks.
    pub cutting: Chunking,
    /// Rules that retain old versions.
    pub keep: Retention,
}

impl Default for Policy {
    fn default() -> Self {
        let (safety, cutting, keep) = (Safety::default(), Chunking::default(), Retention::default());
        Self { copies: 2, safety, width: 4, cutting, keep }
    }
}

/// Error for a policy with a value outside its limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {limits}, this is {found}")]
pub struct PolicyError {
    /// Description of the value.
    pub field: &'static str,
    /// Limits of the value.
    pub limits: &'static str,
    /// The rejected value.
    pub found: String,
}

impl Policy {
    /// Refuses values outside their limits.
    pub fn check(&self) -> Result<(), PolicyError> {
        let bad = |field, limits, found: u64| Err(PolicyError { field, limits, found: found.to_string() });
        if !(1..=crate::protocol::MAX_COPIES as u8).contains(&self.copies) {
            return bad("the number of copies", "1 to 8", self.copies.into());
        }
        if !(1..=64).contains(&self.width) {
            return bad("the stripe width", "1 to 64", self.width.into());
        }
        if self.keep.last == Some(0) {
            return bad("the number of versions to keep", "at least 1", 0);
        }
        self.cutting.check()
    }
}

/// The parts of a name `A.Ni.Tj`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timestep<'a> {
    /// `A.Ni`, the series whose versions are the timesteps.
    pub series: &'a str,
    /// Number of the timestep, the j of the name.
    pub step: u64,
}

/// Splits a name of the form `A.Ni.Tj`, where i and j are decimal numbers.
pub(crate) fn timestep(name: &str) -> Option<Timestep<'_>> {
    let number = |text: &str, letter: char| {
        let digits = text.strip_prefix(letter)?;
        let plain =
            !digits.is_empty() && digits.len() < 19 && digits.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| digits.parse::<u64>().ok())?
    };
    let (series, step) = name.rsplit_once('.')?;
    let (application, node) = series.rsplit_once('.')?;
    number(node, 'N')?;
    let step = number(step, 'T')?;
    (!application.is_empty()).then_some(Timestep { series, step })
}

/// One version of a series, as input of retention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<T> {
    /// The caller's name for the version.
    pub what: T,
    /// Order in the series: the timestep, or the number of the version.
    pub order: u64,
    /// Time of the commit in seconds since 1970.
    pub created: i64,
    /// Whether the version is pinned and is never removed.
    pub pinned: bool,
}

const DAY: i64 = 86_400;

/// A version that no rule of the policy retains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expired<T> {
    /// The caller's name for the version.
    pub what: T,
    /// Reason, for people.
    pub why: &'static str,
    /// Whether a pin retains the version.
    pub pinned: bool,
}

/// The versions of one series that no rule retains, each with the reason; `now` is in seconds since 1970.
/// Pinned versions are listed too. The newest version is always retained, unless `even_newest` is set, `last`
/// is not, and the version is older than `seconds`.
pub fn expired<T: Clone>(
    versions: &[Candidate<T>],
    keep: &Retention,
    now: i64,
    even_newest: bool,
) -> Vec<Expired<T>> {
    if *keep == Retention::default() {
        return Vec::new();
    }
    let mut sorted: Vec<&Candidate<T>> = versions.iter().collect();
    sorted.sort_by_key(|version| std::cmp::Reverse((version.order, version.created)));
    let mut kept = vec![false; sorted.len()];
    if let Some(last) = keep.last {
        kept.iter_mut().take(last as usize).for_each(|kept| *kept = true);
    }
    if let Some(seconds) = keep.seconds {
        let begin = now.saturating_sub_unsigned(seconds);
        sorted.iter().zip(&mut kept).for_each(|(version, kept)| *kept |= version.created >= begin);
    }
    for (span, count) in [(DAY, keep.daily), (7 * DAY, keep.weekly)] {
        keep_newest_of_spans(&sorted, &mut kept, span, count.unwrap_or(0));
    }
    let why = match keep {
        Retention { last: Some(_), .. } => "replaced by newer versions",
        _ => "older than the policy retains",
    };
    let newest_stays = !even_newest || keep.last.is_some();
    let goes = |(at, _): &(usize, &&Candidate<T>)| !kept[*at] && (*at != 0 || !newest_stays);
    let expired =
        |version: &Candidate<T>| Expired { what: version.what.clone(), why, pinned: version.pinned };
    sorted.iter().enumerate().filter(goes).map(|(_, version)| expired(version)).collect()
}

fn keep_newest_of_spans<T>(sorted: &[&Candidate<T>], kept: &mut [bool], span: i64, count: u32) {
    let mut newest: BTreeMap<i64, usize> = BTreeMap::new();
    for (at, version) in sorted.iter().enumerate() {
        newest.entry(version.created.div_euclid(span)).or_insert(at);
    }
    newest.values().rev().take(count as usize).for_each(|at| kept[*at] = true);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(order: u64, created: i64) -> Candidate<u64> {
        Candidate { what: order, order, created, pinned: false }
    }

    fn gone(versions: &[Candidate<u64>], keep: Retention, now: i64) -> Vec<u64> {
        let expired = expired(versions, &keep, now, true).into_iter();
        let mut gone: Vec<u64> = expired.filter(|one| !one.pinned).map(|one| one.what).collect();
        gone.sort_unstable();
        gone
    }

    #[test]
    fn names_of_the_paper_are_recognised_and_others_are_not() {
        assert_eq!(timestep("blast.N3.T17"), Some(Timestep { series: "blast.N3", step: 17 }));
        assert_eq!(timestep("my.app.N0.T5").unwrap().series, "my.app.N0");
        for other in
            ["blast", "blast.N3", "N3.T4", ".N1.T1", "a.N.T1", "a.N1.T", "a.N1.T1x", "a.n1.t1", "a.N-1.T1"]
        {
            assert_eq!(timestep(other), None, "{other}");
        }
    }

    #[test]
    fn no_intervention_keeps_all() {
        assert!(gone(&[at(1, 0), at(2, 0)], Retention::default(), i64::MAX).is_empty());
    }

    #[test]
    fn replace_keeps_the_last_and_purge_the_young() {
        let versions = [at(1, 100), at(2, 200), at(3, 300)];
        assert_eq!(gone(&versions, Retention { last: Some(1), ..Default::default() }, 1000), [1, 2]);
        let purge = Retention { seconds: Some(750), ..Default::default() };
        assert_eq!(gone(&versions, purge, 1000), [1, 2]);
        assert_eq!(gone(&versions, purge, 5000), [1, 2, 3], "purge takes the newest too");
        let both = Retention { last: Some(1), seconds: Some(850), ..Default::default() };
        assert_eq!(gone(&versions, both, 1000), [1], "either reason keeps");
    }

    #[test]
    fn daily_and_weekly_keep_the_newest_of_each() {
        let versions: Vec<_> = (0..40).map(|n| at(n, n as i64 * DAY / 2)).collect();
        let kept = |keep| 40 - gone(&versions, keep, 20 * DAY).len();
        assert_eq!(kept(Retention { daily: Some(5), ..Default::default() }), 5);
        assert_eq!(kept(Retention { weekly: Some(3), ..Default::default() }), 3);
        let gone = gone(&versions, Retention { daily: Some(2), ..Default::default() }, 20 * DAY);
        assert!(!gone.contains(&39) && !gone.contains(&37) && gone.contains(&38));
    }

    #[test]
    fn absurd_policies_are_refused() {
        for bad in [
            Policy { copies: 0, ..Policy::default() },
            Policy { copies: 9, ..Policy::default() },
            Policy { width: 0, ..Policy::default() },
            Policy { keep: Retention { last: Some(0), ..Default::default() }, ..Policy::default() },
            Policy { cutting: Chunking::Fixed { size: 100 }, ..Policy::default() },
            Policy { cutting: Chunking::Fixed { size: 1 << 30 }, ..Policy::default() },
        ] {
            bad.check().unwrap_err();
        }
        Policy::default().check().unwrap();
    }

    proptest! {
        #[test]
        fn pins_and_the_last_n_always_stay(
            times in prop::collection::vec((0..2_000_000_i64, any::<bool>()), 1..40),
            last in 1..5_u32, seconds in prop::option::of(0..2_000_000_u64), daily in prop::option::of(0..5_u32),
        ) {
            let versions: Vec<_> = times.iter().enumerate().map(|(n, (created, pinned))| Candidate {
                what: n as u64, order: n as u64, created: *created, pinned: *pinned,
            }).collect();
            let keep = Retention { last: Some(last), seconds, daily, weekly: None };
            let gone = gone(&versions, keep, 2_000_000);
            for version in &versions {
                let newest = version.order + u64::from(last) >= versions.len() as u64;
                prop_assert!(!(gone.contains(&version.what) && (version.pinned || newest)));
            }
        }
    }
}
