//! A witness that only keeps what is written: the rules of [`Witness`](crate::lease::Witness) for a register
//! without a clock.
//!
//! A store of keys that changes one key in one transaction can be a witness: a key a protection says how it
//! stands, and has a revision that every write raises, also one of the same value. A renewal writes `Open`
//! over `Open`. Whether the lease has run out nobody there knows; the standby finds out by its own clock: a
//! revision that it has seen for a whole term, and that is still there in the very transaction that takes the
//! machine, is of a renewal that was *asked for* more than a term ago. So no clock of the store matters, nor
//! how coarse its own leases are.
//!
//! Invariants, as for a host: `Open` becomes `Taken` or `Closed` once, and stays that. `tests/lease_model.rs`
//! checks them in place of a host's.

use crate::{
    clock::BootTime,
    lease::{WitnessQuery, WitnessReply, WitnessState},
};
use std::time::Duration;

/// What the store is to do in one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterRequest {
    /// If it knows nothing of the protection, it stands open.
    Register,
    /// If it stands open, and if a revision is named is still of that one, it stands like this.
    Put {
        /// How.
        stand: WitnessState,
        /// Only over this.
        over: Option<u64>,
    },
    /// Only tell.
    Look,
    /// If it is decided, nothing is to be known of it any more.
    Remove,
}

/// What the store answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterReply {
    /// It did.
    Done,
    /// It did not, or was only to tell. So it stands, and of this revision it is; none if nothing is known of
    /// it.
    Stands(Option<(WitnessState, u64)>),
}

/// One protection, as seen by one of those who ask the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterWitness {
    term: Duration,
    /// The revision that stood open when an answer came, and when the first answer with it came.
    seen: Option<(u64, BootTime)>,
}

impl RegisterWitness {
    /// Nothing is known yet of how the register stands.
    pub fn new(term: Duration) -> Self {
        Self { term, seen: None }
    }

    /// What is to be tried to answer a question.
    pub fn attempt(&self, question: &WitnessQuery, now: BootTime) -> RegisterRequest {
        let put = |stand| RegisterRequest::Put { stand, over: None };
        match question {
            WitnessQuery::Register { .. } => RegisterRequest::Register,
            WitnessQuery::Renew => put(WitnessState::Open),
            WitnessQuery::Close => put(WitnessState::Closed),
            WitnessQuery::TakeOver { yielded: true } => put(WitnessState::Taken),
            WitnessQuery::TakeOver { yielded: false } => match self.seen {
                Some((revision, since)) if now >= since.after(self.term) => {
                    RegisterRequest::Put { stand: WitnessState::Taken, over: Some(revision) }
                }
                _ => RegisterRequest::Look,
            },
            WitnessQuery::Forget => RegisterRequest::Remove,
        }
    }

    /// What the store told at `now`: from here on a revision that it has not told before counts.
    pub fn handle_reply(&mut self, outcome: RegisterReply, now: BootTime) {
        if let RegisterReply::Stands(Some((WitnessState::Open, revision))) = outcome
            && self.seen.is_none_or(|(before, _)| before != revision)
        {
            self.seen = Some((revision, now));
        }
    }

    /// The verdict that an outcome comes to.
    pub fn verdict(question: &WitnessQuery, outcome: RegisterReply) -> WitnessReply {
        match (outcome, question) {
            (RegisterReply::Done, _) => WitnessReply::Yes,
            (RegisterReply::Stands(None), WitnessQuery::Forget) => WitnessReply::Yes,
            (RegisterReply::Stands(None), _) => WitnessReply::Unknown,
            // Whoever registers has made up a new id: it is of nobody else, or of a question of before whose
            // answer was lost.
            (RegisterReply::Stands(Some((WitnessState::Open, _))), WitnessQuery::Register { .. }) => {
                WitnessReply::Yes
            }
            (RegisterReply::Stands(Some(_)), WitnessQuery::Register { .. } | WitnessQuery::Forget) => {
                WitnessReply::Unknown
            }
            (RegisterReply::Stands(Some((WitnessState::Open, _))), _) => WitnessReply::Held,
            (RegisterReply::Stands(Some((WitnessState::Taken, _))), WitnessQuery::TakeOver { .. }) => {
                WitnessReply::Yes
            }
            (RegisterReply::Stands(Some((WitnessState::Closed, _))), WitnessQuery::Close) => {
                WitnessReply::Yes
            }
            (RegisterReply::Stands(Some((WitnessState::Taken, _))), _) => WitnessReply::Taken,
            (RegisterReply::Stands(Some((WitnessState::Closed, _))), _) => WitnessReply::Closed,
        }
    }
}
