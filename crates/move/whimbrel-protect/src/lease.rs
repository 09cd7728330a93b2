//! Leases: three pure state machines that decide which host may run a machine when hosts lose contact.
//!
//! Two things let the primary's machine be visible to the outside: the *lease* of the witness, and the
//! standby's *promise* not to take over yet. Each lasts for one term from when the primary asked for it, less
//! an eighth. The standby runs the machine only after its own promise has expired and the witness, once the
//! lease has expired too, has said yes; or after the primary has yielded for good.
//!
//! - Witness lost: primary and standby continue as long as they reach each other.
//! - Standby lost: the primary asks the witness to *close* the protection. Then the standby never gets a yes,
//!   and the primary needs no lease any more.
//! - Primary lost: the standby gets its yes one term later.
//! - One host cut off from the other two: the primary stops before its lease can pass on, the standby gets no
//!   yes.
//! - No witness configured: the standby never asks by itself. A person confirms that the primary is dead, and
//!   is responsible for that.
//!
//! A clock is only compared with itself ([`BootTime`]). The eighth covers how much slower than the others the
//! primary's clock may be (over a term; quartz is four orders of magnitude better, and a clock that is being
//! slewed two), and how long the primary takes to stop. `tests/it/lease_model.rs` checks the rules against
//! every order of messages, losses, repetitions, restarts and clocks that drift by as much.
//! every order of messages, losses, repetitions, restarts and clocks that drift by as much.

use crate::{
    clock::BootTime,
    protocol::{HeartbeatReply, StandbyOutcome},
};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use whimbrel_core::HostName;

/// The part of a term during which the primary may run.
pub fn usable(term: Duration) -> Duration {
    term - term / 8
}

/// Queries to a witness.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessQuery {
    /// A protection starts: the primary has the lease.
    Register {
        /// Host that may take over.
        standby: HostName,
        /// Term of the lease.
        term_ms: u32,
    },
    /// The primary renews its lease.
    Renew,
    /// The standby wants to run the machine.
    TakeOver {
        /// The primary has promised never to run it again.
        yielded: bool,
    },
    /// The primary wants to continue without a standby.
    Close,
    /// Both hosts know the outcome, so the witness may delete it.
    Forget,
}

/// Replies of a witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessReply {
    /// The query is granted.
    Yes,
    /// Not yet: the primary's lease runs.
    Held,
    /// The standby has the machine.
    Taken,
    /// The primary continues alone.
    Closed,
    /// The protection is unknown here, or the host that asks has no part in it.
    Unknown,
    /// The witness has no space for another protection.
    Full,
}

/// State of a protection at the witness. Durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WitnessState {
    /// Undecided: either host may still get the machine.
    Open,
    /// The standby has the machine for good.
    Taken,
    /// The primary has the machine for good.
    Closed,
}

/// One protection at the witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WitnessLease {
    state: WitnessState,
    term: Duration,
    expires: BootTime,
}

impl WitnessLease {
    /// A new protection, or one that a restarted witness has loaded. It does not know which leases it granted
    /// before the restart, but all of them have expired a term from now.
    pub fn new(state: WitnessState, term: Duration, now: BootTime) -> Self {
        Self { state, term, expires: now.after(term) }
    }

    /// The state. A change must be durable before its reply is sent.
    pub fn state(&self) -> WitnessState {
        self.state
    }

    /// The one transition function. `Register` and `Forget` change the table and are not handled here.
    pub fn step(&mut self, question: &WitnessQuery, now: BootTime) -> WitnessReply {
        match (self.state, question) {
            (WitnessState::Open, WitnessQuery::Renew) => {
                self.expires = now.after(self.term);
                WitnessReply::Yes
            }
            (WitnessState::Open, WitnessQuery::TakeOver { yielded }) if *yielded || now >= self.expires => {
                self.state = WitnessState::Taken;
                WitnessReply::Yes
            }
            (WitnessState::Open, WitnessQuery::TakeOver { .. }) => WitnessReply::Held,
            (WitnessState::Open, WitnessQuery::Close) => {
                self.state = WitnessState::Closed;
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

/// Lease state of the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrimaryLease {
    state: PrimaryState,
    has_witness: bool,
    term: Duration,
    from_witness: BootTime,
    from_standby: BootTime,
}

/// State of a protection at the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryState {
    /// The machine is protected.
    Protected,
    /// The daemon restarted during a protection: others must say which host has the machine.
    Undecided,
    /// No standby can take over by this protection any more.
    Alone,
    /// The standby has the machine.
    TakenOver,
}

impl PrimaryLease {
    /// The state at the start of a protection. With a witness, the machine must stay fenced until the first
    /// lease is granted.
    pub fn initial(has_witness: bool, term: Duration) -> Self {
        let never = BootTime(Duration::ZERO);
        Self { state: PrimaryState::Protected, has_witness, term, from_witness: never, from_standby: never }
    }

    /// The state after a restart of the daemon, which knows nothing.
    pub fn recovered(has_witness: bool, term: Duration) -> Self {
        Self { state: PrimaryState::Undecided, ..Self::initial(has_witness, term) }
    }

    /// State of the protection.
    pub fn state(&self) -> PrimaryState {
        self.state
    }

    /// Whether the machine may be visible to the outside now.
    pub fn may_run(&self, now: BootTime) -> bool {
        match self.state {
            PrimaryState::Alone => true,
            PrimaryState::TakenOver | PrimaryState::Undecided => false,
            PrimaryState::Protected => !self.has_witness || now < self.until(),
        }
    }

    /// Time until which the machine may run, as far as is known.
    pub fn until(&self) -> BootTime {
        self.from_witness.max(self.from_standby)
    }

    /// Time until which the lease lets it run.
    pub fn lease_until(&self) -> BootTime {
        self.from_witness
    }

    /// Time until which the standby's promise lets it run.
    pub fn promise_until(&self) -> BootTime {
        self.from_standby
    }

    /// Handles the witness's reply to a query that was sent at `asked`.
    pub fn handle_witness_reply(&mut self, question: &WitnessQuery, verdict: WitnessReply, asked: BootTime) {
        if let PrimaryState::Alone | PrimaryState::TakenOver = self.state {
            return;
        }
        match (question, verdict) {
            (WitnessQuery::Renew, WitnessReply::Yes) => {
                self.from_witness = self.from_witness.max(asked.after(usable(self.term)));
            }
            (WitnessQuery::Close, WitnessReply::Yes) | (_, WitnessReply::Closed) => {
                self.state = PrimaryState::Alone
            }
            (_, WitnessReply::Taken) => self.state = PrimaryState::TakenOver,
            _ => {}
        }
    }

    /// Handles the standby's reply to a heartbeat that was sent at `asked`.
    pub fn handle_heartbeat_reply(&mut self, heard: HeartbeatReply, asked: BootTime) {
        match heard {
            HeartbeatReply::Promise => {
                self.from_standby = self.from_standby.max(asked.after(usable(self.term)))
            }
            HeartbeatReply::NoPromise(fate) => self.handle_outcome(fate),
        }
    }

    /// Handles the standby's report of its outcome.
    pub fn handle_outcome(&mut self, fate: StandbyOutcome) {
        if let PrimaryState::Alone | PrimaryState::TakenOver = self.state {
            return;
        }
        match fate {
            StandbyOutcome::TakenOver => self.state = PrimaryState::TakenOver,
            StandbyOutcome::Ended => self.state = PrimaryState::Alone,
            StandbyOutcome::Standing | StandbyOutcome::Asking => {}
        }
    }

    /// Yields the machine for good. The caller must make that durable before it tells anyone.
    pub fn yield_machine(&mut self) -> bool {
        if self.state != PrimaryState::Alone {
            self.state = PrimaryState::TakenOver;
        }
        self.state == PrimaryState::TakenOver
    }
}

/// Lease state of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StandbyLease {
    outcome: StandbyOutcome,
    has_witness: bool,
    term: Duration,
    promised: BootTime,
}

/// Actions of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyLeaseAction {
    /// Nothing to do.
    Nothing,
    /// Ask the witness for the machine.
    AskWitness,
    /// Record durably that this host has the machine, then run it.
    TakeOver,
    /// Delete the machine here.
    Discard,
}

impl StandbyLease {
    /// The state at the start of a protection.
    pub fn initial(has_witness: bool, term: Duration, now: BootTime) -> Self {
        Self { outcome: StandbyOutcome::Standing, has_witness, term, promised: now.after(term) }
    }

    /// Outcome of the protection here.
    pub fn outcome(&self) -> StandbyOutcome {
        self.outcome
    }

    /// Answers a heartbeat of the primary.
    pub fn heartbeat(&mut self, now: BootTime) -> HeartbeatReply {
        match self.outcome {
            StandbyOutcome::Standing => {
                self.promised = now.after(self.term);
                HeartbeatReply::Promise
            }
            fate => HeartbeatReply::NoPromise(fate),
        }
    }

    /// Checks the clock; `current` says whether there is a complete epoch to take over from.
    pub fn tick(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        if self.outcome == StandbyOutcome::Standing && self.has_witness && current && now >= self.promised {
            self.outcome = StandbyOutcome::Asking;
            return StandbyLeaseAction::AskWitness;
        }
        StandbyLeaseAction::Nothing
    }

    /// Earliest time at which [`StandbyLease::tick`] acts.
    pub fn wakes(&self) -> BootTime {
        self.promised
    }

    /// Handles the witness's reply; none if the witness was not reached.
    pub fn handle_witness_reply(
        &mut self,
        verdict: Option<WitnessReply>,
        now: BootTime,
    ) -> StandbyLeaseAction {
        if self.outcome != StandbyOutcome::Asking {
            return StandbyLeaseAction::Nothing;
        }
        match verdict {
            Some(WitnessReply::Yes) => {
                self.outcome = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            Some(WitnessReply::Closed) => {
                self.outcome = StandbyOutcome::Ended;
                StandbyLeaseAction::Discard
            }
            Some(WitnessReply::Held | WitnessReply::Taken | WitnessReply::Unknown | WitnessReply::Full)
            | None => {
                self.outcome = StandbyOutcome::Standing;
                self.promised = now.after(self.term / 16);
                StandbyLeaseAction::Nothing
            }
        }
    }

    /// Handles a yield: the primary never runs the machine again.
    pub fn handle_yield(&mut self, current: bool) -> StandbyLeaseAction {
        match self.outcome {
            StandbyOutcome::Standing | StandbyOutcome::Asking if current => {
                self.outcome = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Returns a yielded machine that cannot run here to the primary. Allowed only while nothing was recorded
    /// and nobody was told.
    pub fn returns_machine(&mut self) {
        self.outcome = StandbyOutcome::Ended;
    }

    /// Handles a failover by hand. Without a witness, the person is responsible for the primary being dead.
    pub fn failover(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        match (self.outcome, current, self.has_witness) {
            (StandbyOutcome::Standing, true, true) if now >= self.promised => {
                self.outcome = StandbyOutcome::Asking;
                StandbyLeaseAction::AskWitness
            }
            (StandbyOutcome::Standing, true, false) => {
                self.outcome = StandbyOutcome::TakenOver;
                StandbyLeaseAction::TakeOver
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Ends the protection: the primary keeps the machine, or this side cannot continue.
    pub fn end(&mut self) -> StandbyLeaseAction {
        match self.outcome {
            StandbyOutcome::Standing => {
                self.outcome = StandbyOutcome::Ended;
                StandbyLeaseAction::Discard
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }
}
