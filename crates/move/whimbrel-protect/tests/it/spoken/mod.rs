//! Messages of a protection as numbers: a model's state must be hashed and ordered, which those types are
//! not.

use whimbrel_protect::{
    clock::BootTime,
    lease::{StandbyLease, StandbyLeaseAction, WitnessQuery, WitnessReply},
    protocol::{HeartbeatReply, StandbyOutcome},
};

/// Does at once what a standby must do to run the machine; loading never fails.
pub(crate) fn take_over(standby: &mut StandbyLease, mut action: StandbyLeaseAction, now: BootTime) {
    loop {
        action = match action {
            StandbyLeaseAction::Load => standby.handle_loaded(true, now),
            StandbyLeaseAction::Record => standby.handle_recorded(),
            StandbyLeaseAction::Nothing
            | StandbyLeaseAction::AskWitness
            | StandbyLeaseAction::Run
            | StandbyLeaseAction::Retain
            | StandbyLeaseAction::Discard => return,
        };
    }
}

/// The standby's query to take over.
pub(crate) const TAKE: WitnessQuery = WitnessQuery::TakeOver { yielded: false };

const VERDICTS: [WitnessReply; 5] =
    [WitnessReply::Yes, WitnessReply::Held, WitnessReply::Taken, WitnessReply::Closed, WitnessReply::Unknown];
const FATES: [StandbyOutcome; 4] =
    [StandbyOutcome::Standing, StandbyOutcome::Asking, StandbyOutcome::TakenOver, StandbyOutcome::Ended];

/// A witness's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Answer(u8);

impl Answer {
    pub(crate) fn of(verdict: WitnessReply) -> Self {
        Self(place(&VERDICTS, verdict))
    }

    pub(crate) fn verdict(self) -> WitnessReply {
        VERDICTS[self.0 as usize]
    }
}

/// What a standby says to a heartbeat, or how it ended; none of its fates is a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Reply(Option<u8>);

impl Reply {
    pub(crate) fn fate(fate: StandbyOutcome) -> Self {
        Self(Some(place(&FATES, fate)))
    }

    pub(crate) fn of(heard: HeartbeatReply) -> Self {
        match heard {
            HeartbeatReply::Promise => Self(None),
            HeartbeatReply::NoPromise(fate) => Self::fate(fate),
        }
    }

    pub(crate) fn heard(self) -> HeartbeatReply {
        self.0.map_or(HeartbeatReply::Promise, |fate| HeartbeatReply::NoPromise(FATES[fate as usize]))
    }

    /// How it ended; a promise says nothing of that.
    pub(crate) fn ended(self) -> Option<StandbyOutcome> {
        self.0.map(|fate| FATES[fate as usize])
    }
}

fn place<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).expect("one of them") as u8
}
