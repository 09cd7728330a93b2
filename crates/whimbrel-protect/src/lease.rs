//! Who may run the machine when the hosts lose each other: three pure state machines.
//!
//! Two things let the primary's machine be seen to run: the *lease* that the witness holds for it, and the standby's
//! *promise* not to take over yet. Each lasts for one term from when the primary asked for it, less an eighth. The standby runs
//! the machine only after its own promise has run out and the witness, once the lease has run out too, has said yes.
//! Or after the primary has yielded for good.
//!
//! - Witness gone: primary and standby go on as long as they see each other.
//! - Standby gone: the primary asks the witness to *close* the protection. Then the standby never gets a yes, and the primary
//!   needs no lease any more.
//! - Primary gone: the standby gets its yes one term later.
//! - Alone against the other two: the primary stops before its lease can pass on, the standby gets no yes.
//! - No witness at all: the standby never asks by itself. A person says that the primary is dead, and answers for it.
//!
//! Clocks are only compared with themselves ([`Moment`]). The eighth covers how much slower than the others the primary's
//! clock may be (over a term; quartz is four orders of magnitude better, and a clock that is being slewed two), and how long the
//! primary takes to stop. `tests/lease_model.rs` checks the rules against every order of messages, losses, repetitions,
//! restarts and clocks that drift by as much.

use crate::{
    clock::Moment,
    protocol::{Fate, Heard},
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
pub enum Question {
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
    Take {
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
pub enum Verdict {
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
pub enum Stand {
    /// Primary and standby both may run it one day.
    Open,
    /// The standby has it for good.
    Taken,
    /// The primary has it for good.
    Closed,
}

/// One protection at the witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Witness {
    stand: Stand,
    term: Duration,
    expires: Moment,
}

impl Witness {
    /// A protection as it is registered, or as a restarted witness finds it. What it granted before it restarted it does not
    /// know; all of that has run out a term from now.
    pub fn new(stand: Stand, term: Duration, now: Moment) -> Self {
        Self { stand, term, expires: now.after(term) }
    }

    /// How it stands. To be durable before a verdict is given that changed it.
    pub fn stand(&self) -> Stand {
        self.stand
    }

    /// The one transition function. `Register` and `Forget` are about the table and are not asked here.
    pub fn step(&mut self, question: &Question, now: Moment) -> Verdict {
        match (self.stand, question) {
            (Stand::Open, Question::Renew) => {
                self.expires = now.after(self.term);
                Verdict::Yes
            }
            (Stand::Open, Question::Take { yielded }) if *yielded || now >= self.expires => {
                self.stand = Stand::Taken;
                Verdict::Yes
            }
            (Stand::Open, Question::Take { .. }) => Verdict::Held,
            (Stand::Open, Question::Close) => {
                self.stand = Stand::Closed;
                Verdict::Yes
            }
            (Stand::Taken, Question::Take { .. }) | (Stand::Closed, Question::Close) => Verdict::Yes,
            (Stand::Taken, _) => Verdict::Taken,
            (Stand::Closed, _) => Verdict::Closed,
            (Stand::Open, Question::Register { .. } | Question::Forget) => Verdict::Unknown,
        }
    }
}

/// The primary's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Primary {
    stand: PrimaryStand,
    has_witness: bool,
    term: Duration,
    from_witness: Moment,
    from_standby: Moment,
}

/// How the primary stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryStand {
    /// The machine is protected.
    Guarded,
    /// A protection was under way when the daemon ended: whose the machine is, others must say.
    Unsure,
    /// No standby can ever take over by this protection.
    Alone,
    /// The machine is the standby's.
    Gone,
}

impl Primary {
    /// A protection begins. With a witness, nothing may be seen of the machine before it has granted the first lease.
    pub fn begin(has_witness: bool, term: Duration) -> Self {
        let never = Moment(Duration::ZERO);
        Self { stand: PrimaryStand::Guarded, has_witness, term, from_witness: never, from_standby: never }
    }

    /// What a restarted daemon knows: nothing.
    pub fn recovered(has_witness: bool, term: Duration) -> Self {
        Self { stand: PrimaryStand::Unsure, ..Self::begin(has_witness, term) }
    }

    /// How it stands.
    pub fn stand(&self) -> PrimaryStand {
        self.stand
    }

    /// Whether anything of the machine may be seen now.
    pub fn may_run(&self, now: Moment) -> bool {
        match self.stand {
            PrimaryStand::Alone => true,
            PrimaryStand::Gone | PrimaryStand::Unsure => false,
            PrimaryStand::Guarded => !self.has_witness || now < self.until(),
        }
    }

    /// Until when it may, as things are.
    pub fn until(&self) -> Moment {
        self.from_witness.max(self.from_standby)
    }

    /// Until when the witness's lease lets it run.
    pub fn lease_until(&self) -> Moment {
        self.from_witness
    }

    /// Until when its standby's promise lets it run.
    pub fn promise_until(&self) -> Moment {
        self.from_standby
    }

    /// The witness has answered a question that was sent at `asked`.
    pub fn witness_said(&mut self, question: &Question, verdict: Verdict, asked: Moment) {
        if let PrimaryStand::Alone | PrimaryStand::Gone = self.stand {
            return;
        }
        match (question, verdict) {
            (Question::Renew, Verdict::Yes) => {
                self.from_witness = self.from_witness.max(asked.after(usable(self.term)));
            }
            (Question::Close, Verdict::Yes) | (_, Verdict::Closed) => self.stand = PrimaryStand::Alone,
            (_, Verdict::Taken) => self.stand = PrimaryStand::Gone,
            _ => {}
        }
    }

    /// The standby has answered a heartbeat that was sent at `asked`.
    pub fn standby_heard(&mut self, heard: Heard, asked: Moment) {
        match heard {
            Heard::Promise => self.from_standby = self.from_standby.max(asked.after(usable(self.term))),
            Heard::NoPromise(fate) => self.standby_is(fate),
        }
    }

    /// The standby has said what has become of the protection.
    pub fn standby_is(&mut self, fate: Fate) {
        if let PrimaryStand::Alone | PrimaryStand::Gone = self.stand {
            return;
        }
        match fate {
            Fate::TakenOver => self.stand = PrimaryStand::Gone,
            Fate::Ended => self.stand = PrimaryStand::Alone,
            Fate::Standing | Fate::Asking => {}
        }
    }

    /// This side gives the machine up for good. To be durable before anybody is told.
    pub fn give_up(&mut self) -> bool {
        if self.stand != PrimaryStand::Alone {
            self.stand = PrimaryStand::Gone;
        }
        self.stand == PrimaryStand::Gone
    }
}

/// The standby's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Standby {
    fate: Fate,
    has_witness: bool,
    term: Duration,
    promised: Moment,
}

/// What the standby must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyAction {
    /// Nothing.
    Nothing,
    /// Ask the witness whether it may run the machine.
    AskWitness,
    /// Write down, durably, that the machine is this host's, then run it.
    TakeOver,
    /// Forget the machine.
    Discard,
}

impl Standby {
    /// A protection begins.
    pub fn begin(has_witness: bool, term: Duration, now: Moment) -> Self {
        Self { fate: Fate::Standing, has_witness, term, promised: now.after(term) }
    }

    /// What has become of it.
    pub fn fate(&self) -> Fate {
        self.fate
    }

    /// The primary lives.
    pub fn heartbeat(&mut self, now: Moment) -> Heard {
        match self.fate {
            Fate::Standing => {
                self.promised = now.after(self.term);
                Heard::Promise
            }
            fate => Heard::NoPromise(fate),
        }
    }

    /// Time goes on; `current` says whether it has a whole epoch to take over from.
    pub fn tick(&mut self, current: bool, now: Moment) -> StandbyAction {
        if self.fate == Fate::Standing && self.has_witness && current && now >= self.promised {
            self.fate = Fate::Asking;
            return StandbyAction::AskWitness;
        }
        StandbyAction::Nothing
    }

    /// When [`Standby::tick`] has something to do at the earliest.
    pub fn wakes(&self) -> Moment {
        self.promised
    }

    /// The witness has answered; none if it was not reached.
    pub fn witness_said(&mut self, verdict: Option<Verdict>, now: Moment) -> StandbyAction {
        if self.fate != Fate::Asking {
            return StandbyAction::Nothing;
        }
        match verdict {
            Some(Verdict::Yes) => {
                self.fate = Fate::TakenOver;
                StandbyAction::TakeOver
            }
            Some(Verdict::Closed) => {
                self.fate = Fate::Ended;
                StandbyAction::Discard
            }
            Some(Verdict::Held | Verdict::Taken | Verdict::Unknown | Verdict::Full) | None => {
                self.fate = Fate::Standing;
                self.promised = now.after(self.term / 16);
                StandbyAction::Nothing
            }
        }
    }

    /// The primary never runs the machine again.
    pub fn yielded(&mut self, current: bool) -> StandbyAction {
        match self.fate {
            Fate::Standing | Fate::Asking if current => {
                self.fate = Fate::TakenOver;
                StandbyAction::TakeOver
            }
            _ => StandbyAction::Nothing,
        }
    }

    /// What was yielded to it cannot be run here: it stays the primary's. Only while nothing was written down and nobody was told.
    pub fn gives_back(&mut self) {
        self.fate = Fate::Ended;
    }

    /// A person wants it to take over. Without a witness the person answers for the primary's death.
    pub fn by_hand(&mut self, current: bool, now: Moment) -> StandbyAction {
        match (self.fate, current, self.has_witness) {
            (Fate::Standing, true, true) if now >= self.promised => {
                self.fate = Fate::Asking;
                StandbyAction::AskWitness
            }
            (Fate::Standing, true, false) => {
                self.fate = Fate::TakenOver;
                StandbyAction::TakeOver
            }
            _ => StandbyAction::Nothing,
        }
    }

    /// The primary keeps the machine, or this side cannot go on.
    pub fn end(&mut self) -> StandbyAction {
        match self.fate {
            Fate::Standing => {
                self.fate = Fate::Ended;
                StandbyAction::Discard
            }
            _ => StandbyAction::Nothing,
        }
    }
}
