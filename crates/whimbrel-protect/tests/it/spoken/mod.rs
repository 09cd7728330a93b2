//! What members of a protection say to each other, as numbers: a state of a model must be hashed and ordered, which those types are not.

use whimbrel_protect::{
    lease::{Question, Verdict},
    protocol::{Fate, Heard},
};

/// Who would take the machine over asks for it.
pub(crate) const TAKE: Question = Question::Take { yielded: false };

const VERDICTS: [Verdict; 5] =
    [Verdict::Yes, Verdict::Held, Verdict::Taken, Verdict::Closed, Verdict::Unknown];
const FATES: [Fate; 4] = [Fate::Standing, Fate::Asking, Fate::TakenOver, Fate::Ended];

/// A witness's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Answer(u8);

impl Answer {
    pub(crate) fn of(verdict: Verdict) -> Self {
        Self(place(&VERDICTS, verdict))
    }

    pub(crate) fn verdict(self) -> Verdict {
        VERDICTS[self.0 as usize]
    }
}

/// What a standby says to a heartbeat, or how it ended; none of its fates is a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Reply(Option<u8>);

impl Reply {
    pub(crate) fn fate(fate: Fate) -> Self {
        Self(Some(place(&FATES, fate)))
    }

    pub(crate) fn of(heard: Heard) -> Self {
        match heard {
            Heard::Promise => Self(None),
            Heard::NoPromise(fate) => Self::fate(fate),
        }
    }

    pub(crate) fn heard(self) -> Heard {
        self.0.map_or(Heard::Promise, |fate| Heard::NoPromise(FATES[fate as usize]))
    }

    /// How it ended; a promise says nothing of that.
    pub(crate) fn ended(self) -> Option<Fate> {
        self.0.map(|fate| FATES[fate as usize])
    }
}

fn place<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).expect("one of them") as u8
}
