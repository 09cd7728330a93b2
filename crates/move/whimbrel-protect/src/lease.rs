//! Who may run the machine when the hosts lose each other: three pure state machines.
//!
//! Two things let the primary's machine be seen to run: the *lease* that the witness holds for it, and the
//! standby's *promise* not to take over yet. Each lasts for one term from when the primary asked for it, less
//! an eighth. The standby runs the machine only after its own promise has run out and the witness, once the
//! lease has run out too, has said yes. Or after the primary has yielded for good.
//!
//! - Witness gone: primary and standby go on as long as they see each other.
//! - Standby gone: the primary asks the witness to *close* the protection. Then the standby never gets a yes,
//!   and the primary needs no lease any more.
//! - Primary gone: the standby gets its yes one term later.
//! - Alone against the other two: the primary stops before its lease can pass on, the standby gets no yes.
//! - No witness at all: the standby never asks by itself. A person says that the primary is dead, and answers
//!   for it.
//!
//! Clocks are only compared with themselves ([`BootTime`]). The eighth covers how much slower than the others
//! the primary's clock may be (over a term; quartz is four orders of magnitude better, and a clock that is
//! being slewed two), and how long the primary takes to stop. `tests/lease_model.rs` checks the rules against
//! every order of messages, losses, repetitions, restarts and clocks that drift by as much.

use crate::{
    clock::BootTime,
    protocol::{HeartbeatReply, StandbyOutcome},
};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use whimbrel_core::HostName;

/// What the primary may use of a term.
pub fn usable(term: Duration) -> Duration {
    term - term / 8
}

/// What a witness is asked.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessQuery {
    /// A protection begins: the primary has the lease.
    Register {
        /// Who may take over.
        standby: HostName,
        /// How long the lease lasts.
        term_ms: u32,
    },
    /// The primary wants its lease anew.
    Renew,
    /// The standby wants to run the machine.
    TakeOver {
        /// The primary has said that it never will again.
        yielded: bool,
    },
    /// The primary wants to go on without a standby.
    Close,
    /// Both know how it ended.
    Forget,
}

/// What a witness answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessReply {
    /// Yes.
    Yes,
    /// Not yet: the primary's lease runs.
    Held,
    /// The standby has the machine.
    Taken,
    /// The primary goes on alone.
    Closed,
    /// There is no such protection here, or the asker has no part in it.
    Unknown,
    /// No more can be registered.
    Full,
}

/// How a protection stands at the witness. Durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WitnessState {
    /// Primary and standby both may run it one day.
    Open,
    /// The standby has it for good.
    Taken,
    /// The primary has it for good.
    Closed,
}

/// One protection at the witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WitnessLease {
    stand: WitnessState,
    term: Duration,
    expires: BootTime,
}

impl WitnessLease {
    /// A protection as it is registered, or as a restarted witness finds it. What it granted before it
    /// restarted it does not know; all of that has run out a term from now.
    pub fn new(stand: WitnessState, term: Duration, now: BootTime) -> Self {
        Self { stand, term, expires: now.after(term) }
    }

    /// How it stands. To be durable before a verdict is given that changed it.
    pub fn state(&self) -> WitnessState {
        self.stand
    }

    /// The one transition function. `Register` and `Forget` are about the table and are not asked here.
    pub fn step(&mut self, question: &WitnessQuery, now: BootTime) -> WitnessReply {
        match (self.stand, question) {
            (WitnessState::Open, WitnessQuery::Renew) => {
                self.expires = now.after(self.term);
                WitnessReply::Yes
            }
            (WitnessState::Open, WitnessQuery::TakeOver { yielded }) if *yielded || now >= self.expires => {
                self.stand = WitnessState::Taken;
                WitnessReply::Yes
            }
            (WitnessState::Open, WitnessQuery::TakeOver { .. }) => WitnessReply::Held,
            (WitnessState::Open, WitnessQuery::Close) => {
                self.stand = WitnessState::Closed;
                WitnessReply::Yes
            }
            (WitnessState::Taken, WitnessQuery::TakeOver { .. })
            | (WitnessState::Closed, WitnessQuery::Close) => WitnessReply::Yes,
            (WitnessState::Taken, _) => WitnessReply::Taken,
            (WitnessState::Closed, _) => WitnessReply::Closed,
            (WitnessState::Open, WitnessQuery::Register { .. } | WitnessQuery::Forget) => {
                WitnessReply::Unknown
            }
        }
    }
}

/// The primary's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrimaryLease {
    stand: PrimaryState,
    has_witness: bool,
    term: Duration,
    from_witness: BootTime,
    from_standby: BootTime,
}

/// How the primary stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryState {
    /// The machine is protected.
    Guarded,
    /// A protection was under way when the daemon ended: whose the machine is, others must say.
    Unsure,
    /// No standby can ever take over by this protection.
    Alone,
    /// The machine is the standby's.
    Gone,
}

impl PrimaryLease {
    /// A protection begins. With a witness, nothing may be seen of the machine before it has granted the
    /// first lease.
    pub fn initial(has_witness: bool, term: Duration) -> Self {
        let never = BootTime(Duration::ZERO);
        Self { stand: PrimaryState::Guarded, has_witness, term, from_witness: never, from_standby: never }
    }

    /// What a restarted daemon knows: nothing.
    pub fn recovered(has_witness: bool, term: Duration) -> Self {
        Self { stand: PrimaryState::Unsure, ..Self::initial(has_witness, term) }
    }

    /// How it stands.
    pub fn state(&self) -> PrimaryState {
        self.stand
    }

    /// Whether anything of the machine may be seen now.
    pub fn may_run(&self, now: BootTime) -> bool {
        match self.stand {
            PrimaryState::Alone => true,
            PrimaryState::Gone | PrimaryState::Unsure => false,
            PrimaryState::Guarded => !self.has_witness || now < self.until(),
        }
    }

    /// Until when it may, as things are.
    pub fn until(&self) -> BootTime {
        self.from_witness.max(self.from_standby)
    }

    /// Until when the witness's lease lets it run.
    pub fn lease_until(&self) -> BootTime {
        self.from_witness
    }

    /// Until when its standby's promise lets it run.
    pub fn promise_until(&self) -> BootTime {
        self.from_standby
    }

    /// The witness has answered a question that was sent at `asked`.
    pub fn witness_said(&mut self, question: &WitnessQuery, verdict: WitnessReply, asked: BootTime) {
        if let PrimaryState::Alone | PrimaryState::Gone = self.stand {
            return;
        }
        match (question, verdict) {
            (WitnessQuery::Renew, WitnessReply::Yes) => {
                self.from_witness = self.from_witness.max(asked.after(usable(self.term)));
            }
            (WitnessQuery::Close, WitnessReply::Yes) | (_, WitnessReply::Closed) => {
                self.stand = PrimaryState::Alone
            }
            (_, WitnessReply::Taken) => self.stand = PrimaryState::Gone,
            _ => {}
        }
    }

    /// The standby has answered a heartbeat that was sent at `asked`.
    pub fn standby_heard(&mut self, heard: HeartbeatReply, asked: BootTime) {
        match heard {
            HeartbeatReply::Promise => {
                self.from_standby = self.from_standby.max(asked.after(usable(self.term)))
            }
            HeartbeatReply::NoPromise(fate) => self.standby_is(fate),
        }
    }

    /// The standby has said what has become of the protection.
    pub fn standby_is(&mut self, fate: StandbyOutcome) {
        if let PrimaryState::Alone | PrimaryState::Gone = self.stand {
            return;
        }
        match fate {
            StandbyOutcome::TakenOver => self.stand = PrimaryState::Gone,
            StandbyOutcome::Ended => self.stand = PrimaryState::Alone,
            StandbyOutcome::Standing | StandbyOutcome::Asking => {}
        }
    }

    /// This side gives the machine up for good. To be durable before anybody is told.
    pub fn yield_machine(&mut self) -> bool {
        if self.stand != PrimaryState::Alone {
            self.stand = PrimaryState::Gone;
        }
        self.stand == PrimaryState::Gone
    }
}

/// The standby's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StandbyLease {
    fate: StandbyOutcome,
    has_witness: bool,
    term: Duration,
    promised: BootTime,
}

/// What the standby must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyLeaseAction {
    /// Nothing.
    Nothing,
    /// Ask the witness whether it may run the machine.
    AskWitness,
    /// Write down, durably, that the machine is this host's, then run it.
    TakeOver,
    /// Forget the machine.
    Discard,
}

impl StandbyLease {
    /// A protection begins.
    pub fn initial(has_witness: bool, term: Duration, now: BootTime) -> Self {
        Self { fate: StandbyOutcome::Standing, has_witness, term, promised: now.after(term) }
    }

    /// What has become of it.
    pub fn fate(&self) -> StandbyOutcome {
        self.fate
    }

    /// The primary lives.
    pub fn heartbeat(&mut self, now: BootTime) -> HeartbeatReply {
        match self.fate {
            StandbyOutcome::Standing => {
                self.promised = now.after(self.term);
                HeartbeatReply::Promise
            }
            fate => HeartbeatReply::NoPromise(fate),
        }
    }

    /// Time goes on; `current` says whether it has a whole epoch to take over from.
    pub fn tick(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        if self.fate == StandbyOutcome::Standing && self.has_witness && current && now >= self.promised {
            self.fate = StandbyOutcome::Asking;
            return StandbyLeaseAction::AskWitness;
        }
        StandbyLeaseAction::Nothing
    }

    /// When [`StandbyLease::tick`] has something to do at the earliest.
    pub fn wakes(&self) -> BootTime {
        self.promised
    }

    /// The witness has answered; none if it was not reached.
    pub fn witness_said(&mut self, verdict: Option<WitnessReply>, now: BootTime) -> StandbyLeaseAction {
        if self.fate != StandbyOutcome::Asking {
            return StandbyLeaseAction::Nothing;
        }
        match verdict {
            Some(WitnessReply::Yes) => {
                self.fate = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            Some(WitnessReply::Closed) => {
                self.fate = StandbyOutcome::Ended;
                StandbyLeaseAction::Discard
            }
            Some(WitnessReply::Held | WitnessReply::Taken | WitnessReply::Unknown | WitnessReply::Full)
            | None => {
                self.fate = StandbyOutcome::Standing;
                self.promised = now.after(self.term / 16);
                StandbyLeaseAction::Nothing
            }
        }
    }

    /// The primary never runs the machine again.
    pub fn yielded(&mut self, current: bool) -> StandbyLeaseAction {
        match self.fate {
            StandbyOutcome::Standing | StandbyOutcome::Asking if current => {
                self.fate = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// What was yielded to it cannot be run here: it stays the primary's. Only while nothing was written down
    /// and nobody was told.
    pub fn returns_machine(&mut self) {
        self.fate = StandbyOutcome::Ended;
    }

    /// A person wants it to take over. Without a witness the person answers for the primary's death.
    pub fn by_hand(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        match (self.fate, current, self.has_witness) {
            (StandbyOutcome::Standing, true, true) if now >= self.promised => {
                self.fate = StandbyOutcome::Asking;
                StandbyLeaseAction::AskWitness
            }
            (StandbyOutcome::Standing, true, false) => {
                self.fate = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// The primary keeps the machine, or this side cannot go on.
    pub fn end(&mut self) -> StandbyLeaseAction {
        match self.fate {
            StandbyOutcome::Standing => {
                self.fate = StandbyOutcome::Ended;
                StandbyLeaseAction::Discard
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }
}
