//! Garbage collection of chunks: decides which of a benefactor's copies can be deleted. Pure.
//!
//! A write session may rely on a chunk before it commits, because it put the chunk or was told that it
//! exists. So no chunk is deleted that was put, freed or queried after the oldest open session began. All
//! times are durations, so the clocks of manager and benefactor need not agree.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkStatus {
    /// Never registered, or deleted long ago.
    Unknown,
    /// Registered, and this copy is counted.
    Counted {
        /// Whether a version uses it.
        used: bool,
        /// When it was last freed, registered or queried.
        freed: i64,
    },
    /// Registered, but this copy is not counted.
    Extra {
        /// Whether a version uses it.
        used: bool,
        /// Whether it has fewer copies than required.
        lacking: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GcDecision {
    Retain,
    Adopt,
    Delete,
}

/// Age in milliseconds below which an uncounted copy is retained: one just made for repair or balancing is
/// counted only when its order ends.
const GRACE: i64 = 90_000;

/// Whether copies of chunks that are not known as used may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quarantine {
    /// The manager was restored lately: it may have forgotten what they belong to.
    On,
    Off,
}

/// Decides on one copy in a quarantine, or without one; see [`decide_by_age`].
pub(crate) fn decide(
    knowledge: ChunkStatus,
    age: i64,
    (now, oldest): (i64, Option<i64>),
    quarantine: Quarantine,
) -> GcDecision {
    let forgotten = matches!(knowledge, ChunkStatus::Unknown | ChunkStatus::Extra { used: false, .. });
    match decide_by_age(knowledge, age, now, oldest) {
        GcDecision::Delete if forgotten && quarantine == Quarantine::On => GcDecision::Retain,
        decision => decision,
    }
}

/// Decides on one copy. `age` is the milliseconds since it was put, `oldest` the start of the oldest session.
///
/// A counted copy may have been put again, by a session that was told that the chunk is unknown because
/// another benefactor was deleting its copy. That session registers the chunk anew, together with this copy.
fn decide_by_age(knowledge: ChunkStatus, age: i64, now: i64, oldest: Option<i64>) -> GcDecision {
    let quiet_since = |instant: i64| oldest.is_none_or(|oldest| instant < oldest);
    let put = now.saturating_sub(age);
    match knowledge {
        ChunkStatus::Counted { used: true, .. } => GcDecision::Retain,
        ChunkStatus::Extra { used: true, lacking: true } => GcDecision::Adopt,
        ChunkStatus::Counted { used: false, freed } if quiet_since(freed.max(put)) => GcDecision::Delete,
        ChunkStatus::Extra { used: true, .. } if age < GRACE => GcDecision::Retain,
        ChunkStatus::Unknown | ChunkStatus::Extra { .. } if quiet_since(put) => GcDecision::Delete,
        _ => GcDecision::Retain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_goes_that_is_used_or_that_a_living_session_may_rely_on(
            used: bool, lacking: bool, freed in 0..1000_i64, age in 0..1000_i64, kind in 0..3, oldest in 0..1000_i64,
        ) {
            let knowledge = match kind {
                0 => ChunkStatus::Unknown,
                1 => ChunkStatus::Counted { used, freed },
                _ => ChunkStatus::Extra { used, lacking },
            };
            let verdict = decide(knowledge, age, (1000, Some(oldest)), Quarantine::Off);
            let freed = match knowledge { ChunkStatus::Counted { freed, .. } => freed, _ => 0 };
            if verdict == GcDecision::Delete {
                prop_assert!(freed < oldest, "it was freed, or asked for, since");
                prop_assert!(1000 - age < oldest, "it was put since");
                let counted_and_used = matches!(knowledge, ChunkStatus::Counted { used: true, .. });
                prop_assert!(!counted_and_used);
            }
        }
    }

    #[test]
    fn a_restored_manager_deletes_nothing_that_it_may_have_forgotten() {
        for forgotten in [ChunkStatus::Unknown, ChunkStatus::Extra { used: false, lacking: true }] {
            let verdict = |quarantine| decide(forgotten, i64::MAX, (50, None), quarantine);
            assert_eq!(verdict(Quarantine::On), GcDecision::Retain);
            assert_eq!(verdict(Quarantine::Off), GcDecision::Delete);
        }
        let freed = ChunkStatus::Counted { used: false, freed: 50 };
        assert_eq!(decide(freed, 0, (50, None), Quarantine::On), GcDecision::Delete, "it knows this one");
    }

    #[test]
    fn without_sessions_all_garbage_goes_at_once() {
        let decide = |knowledge, age, now, oldest| decide(knowledge, age, (now, oldest), Quarantine::Off);
        assert_eq!(decide(ChunkStatus::Unknown, 0, 50, None), GcDecision::Delete);
        assert_eq!(decide(ChunkStatus::Counted { used: false, freed: 50 }, 0, 50, None), GcDecision::Delete);
        let spare = ChunkStatus::Extra { used: true, lacking: false };
        assert_eq!(decide(spare, GRACE, 50, None), GcDecision::Delete);
        assert_eq!(decide(spare, GRACE - 1, 50, None), GcDecision::Retain, "it may be about to be counted");
        assert_eq!(decide(ChunkStatus::Extra { used: true, lacking: true }, 9, 50, None), GcDecision::Adopt);
    }
}
