//! The primary's part: whether its machine may be visible, and what becomes of its copy.

use super::{WitnessQuery, WitnessReply, usable};
use crate::{
    clock::BootTime,
    protocol::{HeartbeatReply, StandbyOutcome},
};
use std::time::Duration;
use whimbrel_core::loss::{Loss, is_back};

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
    /// The machine is the standby's if that can run it. This host keeps its copy, invisible, until the
    /// standby has the machine or has ended.
    Yielded {
        /// What the standby answered last, if it did not take over.
        refusal: Option<StandbyOutcome>,
    },
    /// The standby has the machine, and has said so.
    TakenOver,
}

/// What the primary must do to find out who has the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryLeaseAction {
    /// The machine is this host's: release its output and run it.
    RunHere,
    /// Ask the witness to close the protection and, if that decides nothing, the standby to end it. The
    /// machine may be visible meanwhile.
    Ask,
    /// As [`PrimaryLeaseAction::Ask`], with the machine paused meanwhile.
    AskFenced,
    /// Record durably that the machine is yielded, then ask the standby to run it.
    Yield,
    /// Ask the standby to end the protection: it cannot run the machine now.
    TakeBack,
    /// Delete the machine here.
    Retire,
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
        let state = match is_back(Loss::RestartNotFenced) {
            true => PrimaryState::Alone,
            false => PrimaryState::Undecided,
        };
        Self { state, ..Self::initial(has_witness, term) }
    }

    /// State of the protection.
    pub fn state(&self) -> PrimaryState {
        self.state
    }

    /// Whether the machine may be visible to the outside now.
    pub fn may_run(&self, now: BootTime) -> bool {
        match self.state {
            PrimaryState::Alone => true,
            PrimaryState::TakenOver | PrimaryState::Yielded { .. } | PrimaryState::Undecided => false,
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

    /// What to do once the machine is no longer sent to the standby. `asked` says whether both others were
    /// asked since then, `has_copy` whether the machine could still run here.
    pub fn next_action(&self, asked: bool, has_copy: bool, now: BootTime) -> PrimaryLeaseAction {
        match self.state {
            PrimaryState::Alone => PrimaryLeaseAction::RunHere,
            PrimaryState::TakenOver => PrimaryLeaseAction::Retire,
            PrimaryState::Yielded { refusal: Some(StandbyOutcome::Standing) } => PrimaryLeaseAction::TakeBack,
            PrimaryState::Yielded { refusal: Some(_) } if has_copy => PrimaryLeaseAction::TakeBack,
            PrimaryState::Yielded { .. } => PrimaryLeaseAction::Yield,
            // Without a witness only a person decides, who would have declared this host dead.
            PrimaryState::Protected if asked && !self.has_witness => PrimaryLeaseAction::RunHere,
            PrimaryState::Protected | PrimaryState::Undecided => match self.may_run(now) {
                true => PrimaryLeaseAction::Ask,
                false => PrimaryLeaseAction::AskFenced,
            },
        }
    }

    /// Handles the witness's reply to a query that was sent at `asked`.
    pub fn handle_witness_reply(&mut self, query: &WitnessQuery, verdict: WitnessReply, asked: BootTime) {
        let (PrimaryState::Protected | PrimaryState::Undecided) = self.state else { return };
        match (query, verdict) {
            (WitnessQuery::Renew, WitnessReply::Yes) => {
                self.from_witness = self.from_witness.max(asked.after(usable(self.term)));
            }
            (WitnessQuery::Close, WitnessReply::Yes) | (_, WitnessReply::Closed) => {
                self.state = PrimaryState::Alone
            }
            (_, WitnessReply::Taken) if is_back(Loss::RetiredUnheard) => self.state = PrimaryState::TakenOver,
            // The standby may not know, and may fail to load the machine.
            (_, WitnessReply::Taken) => self.state = PrimaryState::Yielded { refusal: None },
            _ => {}
        }
    }

    /// Handles the standby's reply to a heartbeat that was sent at `asked`.
    pub fn handle_heartbeat_reply(&mut self, heard: HeartbeatReply, asked: BootTime) {
        match heard {
            HeartbeatReply::Promise => {
                self.from_standby = self.from_standby.max(asked.after(usable(self.term)))
            }
            HeartbeatReply::NoPromise(outcome) => self.handle_outcome(outcome),
        }
    }

    /// Handles the standby's report of its outcome.
    pub fn handle_outcome(&mut self, outcome: StandbyOutcome) {
        match (self.state, outcome) {
            (PrimaryState::Alone | PrimaryState::TakenOver, _) => {}
            (_, StandbyOutcome::TakenOver) => self.state = PrimaryState::TakenOver,
            (_, StandbyOutcome::Ended) => self.state = PrimaryState::Alone,
            (
                PrimaryState::Protected | PrimaryState::Undecided | PrimaryState::Yielded { .. },
                StandbyOutcome::Standing | StandbyOutcome::Asking,
            ) => {}
        }
    }

    /// Handles the standby's answer to [`PrimaryLeaseAction::Yield`]; none if it did not answer.
    pub fn handle_yield_reply(&mut self, outcome: Option<StandbyOutcome>) {
        outcome.iter().for_each(|outcome| self.handle_outcome(*outcome));
        if let PrimaryState::Yielded { refusal } = &mut self.state {
            *refusal = outcome;
        }
    }

    /// Handles the standby's answer to [`PrimaryLeaseAction::TakeBack`]. If it did not end, it is asked to
    /// run the machine again.
    pub fn handle_take_back_reply(&mut self, outcome: Option<StandbyOutcome>) {
        outcome.iter().for_each(|outcome| self.handle_outcome(*outcome));
        if let PrimaryState::Yielded { refusal } = &mut self.state {
            *refusal = None;
        }
    }

    /// Yields the machine, unless it is this host's alone.
    pub fn yield_machine(&mut self) {
        if let PrimaryState::Protected | PrimaryState::Undecided = self.state {
            self.state = PrimaryState::Yielded { refusal: None };
        }
    }
}
