//! A witness that only keeps what is written: the rules of [`Witness`](crate::lease::Witness) for a register without a clock.
//!
//! A store of keys that changes one key in one transaction can be a witness: a key a protection says how it stands, and has a revision that
//! every write raises, also one of the same value. A renewal writes `Open` over `Open`. Whether the lease has run out nobody there knows; the
//! standby finds out by its own clock: a revision that it has seen for a whole term, and that is still there in the very transaction that
//! takes the machine, is of a renewal that was *asked for* more than a term ago. So no clock of the store matters, nor
//! how coarse its own leases are.
//!
//! Invariants, as for a host: `Open` becomes `Taken` or `Closed` once, and stays that. `tests/lease_model.rs` checks them in place of a host's.

use crate::{
    clock::Moment,
    lease::{Question, Stand, Verdict},
};
use std::time::Duration;

/// What the store is to do in one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attempt {
    /// If it knows nothing of the protection, it stands open.
    Register,
    /// If it stands open, and if a revision is named is still of that one, it stands like this.
    Put {
        /// How.
        stand: Stand,
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
pub enum Outcome {
    /// It did.
    Done,
    /// It did not, or was only to tell. So it stands, and of this revision it is; none if nothing is known of it.
    Stands(Option<(Stand, u64)>),
}

/// One protection, as seen by one of those who ask the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ballot {
    term: Duration,
    /// The revision that stood open when an answer came, and when the first answer with it came.
    seen: Option<(u64, Moment)>,
}

impl Ballot {
    /// Nothing is known yet of how the register stands.
    pub fn new(term: Duration) -> Self {
        Self { term, seen: None }
    }

    /// What is to be tried to answer a question.
    pub fn attempt(&self, question: &Question, now: Moment) -> Attempt {
        let put = |stand| Attempt::Put { stand, over: None };
        match question {
            Question::Register { .. } => Attempt::Register,
            Question::Renew => put(Stand::Open),
            Question::Close => put(Stand::Closed),
            Question::Take { yielded: true } => put(Stand::Taken),
            Question::Take { yielded: false } => match self.seen {
                Some((revision, since)) if now >= since.after(self.term) => {
                    Attempt::Put { stand: Stand::Taken, over: Some(revision) }
                }
                _ => Attempt::Look,
            },
            Question::Forget => Attempt::Remove,
        }
    }

    /// What the store told at `now`: from here on a revision that it has not told before counts.
    pub fn told(&mut self, outcome: Outcome, now: Moment) {
        if let Outcome::Stands(Some((Stand::Open, revision))) = outcome
            && self.seen.is_none_or(|(before, _)| before != revision)
        {
            self.seen = Some((revision, now));
        }
    }

    /// The verdict that an outcome comes to.
    pub fn verdict(question: &Question, outcome: Outcome) -> Verdict {
        match (outcome, question) {
            (Outcome::Done, _) => Verdict::Yes,
            (Outcome::Stands(None), Question::Forget) => Verdict::Yes,
            (Outcome::Stands(None), _) => Verdict::Unknown,
            // Whoever registers has made up a new id: it is of nobody else, or of a question of before whose answer was lost.
            (Outcome::Stands(Some((Stand::Open, _))), Question::Register { .. }) => Verdict::Yes,
            (Outcome::Stands(Some(_)), Question::Register { .. } | Question::Forget) => Verdict::Unknown,
            (Outcome::Stands(Some((Stand::Open, _))), _) => Verdict::Held,
            (Outcome::Stands(Some((Stand::Taken, _))), Question::Take { .. }) => Verdict::Yes,
            (Outcome::Stands(Some((Stand::Closed, _))), Question::Close) => Verdict::Yes,
            (Outcome::Stands(Some((Stand::Taken, _))), _) => Verdict::Taken,
            (Outcome::Stands(Some((Stand::Closed, _))), _) => Verdict::Closed,
        }
    }
}
