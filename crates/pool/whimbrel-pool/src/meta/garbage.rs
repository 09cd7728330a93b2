//! Which chunk of a benefactor may go. Pure.
//!
//! A session that writes may rely on a chunk before it commits: because it put it there, or because it was
//! told that the chunk is known. So nothing goes that was put, freed or asked for since the oldest living
//! session began. All of it is reckoned in durations, so the clocks of manager and benefactor need not agree.

/// What the manager knows of a chunk that a benefactor lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkStatus {
    /// Nothing: it was never enrolled, or is long gone.
    Unknown,
    /// Enrolled, and this copy is counted.
    Counted {
        /// Versions use it.
        used: bool,
        /// When it was last freed, enrolled or asked for.
        freed: i64,
    },
    /// Enrolled, but this copy is not counted.
    Extra {
        /// Versions use it.
        used: bool,
        /// It has fewer copies than it should.
        lacking: bool,
    },
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GcDecision {
    /// It stays.
    Keep,
    /// It stays, and is counted from now on.
    Adopt,
    /// It may go.
    Go,
}

/// A copy that was just made for repair or balance lies there before it is counted: longer than any such
/// order takes.
const GRACE: i64 = 90_000;

/// Decides on one chunk: `age` is the milliseconds since it was put there, `oldest` when the oldest session
/// began.
///
/// Also a copy that is counted may have been put again: by a session that was told that the chunk is not
/// known, because another benefactor was just giving up its copy. That session enrols the chunk anew, this
/// copy with it.
pub(crate) fn judge(knowledge: ChunkStatus, age: i64, now: i64, oldest: Option<i64>) -> GcDecision {
    let quiet_since = |instant: i64| oldest.is_none_or(|oldest| instant < oldest);
    let put = now.saturating_sub(age);
    match knowledge {
        ChunkStatus::Counted { used: true, .. } => GcDecision::Keep,
        ChunkStatus::Extra { used: true, lacking: true } => GcDecision::Adopt,
        ChunkStatus::Counted { used: false, freed } if quiet_since(freed.max(put)) => GcDecision::Go,
        ChunkStatus::Extra { used: true, .. } if age < GRACE => GcDecision::Keep,
        ChunkStatus::Unknown | ChunkStatus::Extra { .. } if quiet_since(put) => GcDecision::Go,
        _ => GcDecision::Keep,
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
            let verdict = judge(knowledge, age, 1000, Some(oldest));
            let freed = match knowledge { ChunkStatus::Counted { freed, .. } => freed, _ => 0 };
            if verdict == GcDecision::Go {
                prop_assert!(freed < oldest, "it was freed, or asked for, since");
                prop_assert!(1000 - age < oldest, "it was put since");
                let counted_and_used = matches!(knowledge, ChunkStatus::Counted { used: true, .. });
                prop_assert!(!counted_and_used);
            }
        }
    }

    #[test]
    fn without_sessions_all_garbage_goes_at_once() {
        assert_eq!(judge(ChunkStatus::Unknown, 0, 50, None), GcDecision::Go);
        assert_eq!(judge(ChunkStatus::Counted { used: false, freed: 50 }, 0, 50, None), GcDecision::Go);
        let spare = ChunkStatus::Extra { used: true, lacking: false };
        assert_eq!(judge(spare, GRACE, 50, None), GcDecision::Go);
        assert_eq!(judge(spare, GRACE - 1, 50, None), GcDecision::Keep, "it may be about to be counted");
        assert_eq!(judge(ChunkStatus::Extra { used: true, lacking: true }, 9, 50, None), GcDecision::Adopt);
    }
}
