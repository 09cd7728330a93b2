//! State of the leases of a session: whether they hold now, and what they cover. Pure: the time is a
//! parameter.

use crate::proto::{Standing, Watched};
use std::time::{Duration, Instant};

/// Time by which leases end earlier here than at the server, whose clock may run a little faster.
const MARGIN: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
pub(in crate::client) struct LeaseState {
    /// Number of the server session that they belong to.
    session: u64,
    standing: Standing,
    until: Option<Instant>,
}

/// Whether what is known here may be used without a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::client) enum Reliance {
    /// The leases do not cover all changes: what is known gets old.
    Age,
    /// Until this moment, except for what was recalled.
    Until(Instant),
    /// Nothing, until the leases were renewed.
    Nothing,
}

impl LeaseState {
    /// State to name in the next renewal.
    pub(in crate::client) fn standing(&self, session: u64) -> Standing {
        if session == self.session { self.standing } else { Standing::default() }
    }

    /// Whether the leases of a server session are the first ones.
    pub(in crate::client) fn is_first(&self) -> bool {
        self.session == 0
    }

    /// Whether the leases of this server session are known.
    pub(in crate::client) fn knows(&self, session: u64) -> bool {
        self.session == session
    }

    /// Whether the state of a renewal is of other leases than the ones before.
    pub(in crate::client) fn is_new(&self, session: u64, watched: &Watched) -> bool {
        session != self.session || watched.standing.generation != self.standing.generation
    }

    /// Takes the answer to a renewal that was sent at this moment.
    pub(in crate::client) fn renewed(&mut self, session: u64, sent: Instant, watched: &Watched) {
        let term = Duration::from_millis(u64::from(watched.term)).saturating_sub(MARGIN);
        *self = Self { session, standing: watched.standing, until: sent.checked_add(term) };
    }

    /// Whether leases cover what is known, during the server session of this number.
    pub(in crate::client) fn reliance(&self, session: u64, now: Instant) -> Reliance {
        match self.until {
            _ if !self.standing.covers_outside => Reliance::Age,
            Some(until) if session == self.session && now < until => Reliance::Until(until),
            _ => Reliance::Nothing,
        }
    }

    /// Generation of the leases, if others have some, too, so that what is unsent here must be claimed.
    pub(in crate::client) fn shared_generation(&self, session: u64) -> Option<u64> {
        let shared = session == self.session && !self.standing.alone;
        Some(self.standing.generation).filter(|generation| shared && *generation != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(generation: u64, covers_outside: bool) -> Watched {
        let standing = Standing { generation, covers_outside, alone: false };
        Watched { standing, term: 10_000, recalled: Vec::new() }
    }

    #[test]
    fn leases_hold_for_the_term_after_the_question_and_only_in_their_session() {
        let (sent, second) = (Instant::now(), Duration::from_secs(1));
        let mut state = LeaseState::default();
        assert_eq!(state.reliance(1, sent), Reliance::Age, "an older server");
        state.renewed(1, sent, &watched(5, true));
        let until = sent + Duration::from_millis(9500);
        assert_eq!(state.reliance(1, sent + 9 * second), Reliance::Until(until));
        assert_eq!(state.reliance(1, sent + 10 * second), Reliance::Nothing);
        assert_eq!(state.reliance(2, sent + second), Reliance::Nothing, "the session is another one");
        assert!(state.is_new(2, &watched(5, true)) && state.is_new(1, &watched(6, true)));
        assert!(!state.is_new(1, &watched(5, true)));
        state.renewed(1, sent, &watched(5, false));
        assert_eq!(state.reliance(1, sent + second), Reliance::Age);
        assert_eq!((state.shared_generation(1), state.shared_generation(2)), (Some(5), None));
    }
}
