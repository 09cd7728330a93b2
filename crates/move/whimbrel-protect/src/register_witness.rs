//! Register witness: the rules of [`WitnessLease`](crate::lease::WitnessLease) for a register without a
//! clock.
//!
//! A key-value store that changes one key in one transaction can be a witness: the key of a protection holds
//! its state, and has a revision that every write raises, also one of the same value. A renewal writes `Open`
//! over `Open`. The store does not know whether the lease has expired; the standby finds out by its own
//! clock: a revision that it has seen for a whole term, and that is still there in the very transaction that
//! takes the machine, is of a renewal that was *requested* more than a term ago. So neither the store's clock
//! nor the precision of its own leases matters.
//!
//! Invariants, as for a host: `Open` becomes `Taken` or `Closed` once, and stays that.
//! `tests/it/lease_model.rs` checks them in place of a host's.

use crate::{
    clock::BootTime,
    lease::{WitnessQuery, WitnessReply, WitnessState},
};
use std::time::Duration;

/// Operation of the store, in one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterRequest {
    /// Sets the state to open if the protection is unknown.
    Register,
    /// Sets the state if it is open and, if a revision is given, still has that one.
    Put {
        /// State to write.
        state: WitnessState,
        /// Revision that must still be there.
        revision: Option<u64>,
    },
    /// Reads the state only.
    Read,
    /// Deletes the protection if it is decided.
    Remove,
}

/// Reply of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterReply {
    /// The operation succeeded.
    Done,
    /// The operation did not apply or only read. Holds the state and its revision; none if the protection is
    /// unknown.
    State(Option<(WitnessState, u64)>),
}

/// Witness state of one protection, as seen by one of its hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterWitness {
    term: Duration,
    /// The last revision that was open, and when the first reply with it arrived.
    last_open: Option<(u64, BootTime)>,
}

impl RegisterWitness {
    /// An observer that has seen no state of the register yet.
    pub fn new(term: Duration) -> Self {
        Self { term, last_open: None }
    }

    /// Returns the operation that answers a query.
    pub fn attempt(&self, question: &WitnessQuery, now: BootTime) -> RegisterRequest {
        let put = |stand| RegisterRequest::Put { state: stand, revision: None };
        match question {
            WitnessQuery::Register { .. } => RegisterRequest::Register,
            WitnessQuery::Renew => put(WitnessState::Open),
            WitnessQuery::Close => put(WitnessState::Closed),
            WitnessQuery::TakeOver { yielded: true } => put(WitnessState::Taken),
            WitnessQuery::TakeOver { yielded: false } => match self.last_open {
                Some((revision, since)) if now >= since.after(self.term) => {
                    RegisterRequest::Put { state: WitnessState::Taken, revision: Some(revision) }
                }
                _ => RegisterRequest::Read,
            },
            WitnessQuery::Forget => RegisterRequest::Remove,
        }
    }

    /// Records a reply of `now`: the term of a new revision starts here.
    pub fn handle_reply(&mut self, outcome: RegisterReply, now: BootTime) {
        if let RegisterReply::State(Some((WitnessState::Open, revision))) = outcome
            && self.last_open.is_none_or(|(before, _)| before != revision)
        {
            self.last_open = Some((revision, now));
        }
    }

    /// Translates a reply of the store to a reply of the witness.
    pub fn verdict(question: &WitnessQuery, outcome: RegisterReply) -> WitnessReply {
        match (outcome, question) {
            (RegisterReply::Done, _) => WitnessReply::Yes,
            (RegisterReply::State(None), WitnessQuery::Forget) => WitnessReply::Yes,
            (RegisterReply::State(None), _) => WitnessReply::Unknown,
            // A new protection has a random id, so an open one is ours: the reply to an earlier attempt was
            // lost.
            (RegisterReply::State(Some((WitnessState::Open, _))), WitnessQuery::Register { .. }) => {
                WitnessReply::Yes
            }
            (RegisterReply::State(Some(_)), WitnessQuery::Register { .. } | WitnessQuery::Forget) => {
                WitnessReply::Unknown
            }
            (RegisterReply::State(Some((WitnessState::Open, _))), _) => WitnessReply::Held,
            (RegisterReply::State(Some((WitnessState::Taken, _))), WitnessQuery::TakeOver { .. }) => {
                WitnessReply::Yes
            }
            (RegisterReply::State(Some((WitnessState::Closed, _))), WitnessQuery::Close) => WitnessReply::Yes,
            (RegisterReply::State(Some((WitnessState::Taken, _))), _) => WitnessReply::Taken,
            (RegisterReply::State(Some((WitnessState::Closed, _))), _) => WitnessReply::Closed,
        }
    }
}
