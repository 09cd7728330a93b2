//! The standby's part: when it asks for the machine, and what becomes of its copy.

use super::WitnessReply;
use crate::{
    clock::BootTime,
    protocol::{HeartbeatReply, StandbyOutcome},
};
use std::time::Duration;
use whimbrel_core::loss::{Loss, is_back};

/// Terms after which a machine that could not be loaded is loaded again.
const RELOAD_TERMS: u32 = 8;

/// Lease state of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StandbyLease {
    state: State,
    has_witness: bool,
    term: Duration,
    /// Earliest time at which it acts by itself: the end of its promise, or of a pause between two attempts.
    waits_until: BootTime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Standing,
    Asking,
    /// The machine is this host's to run; it is being loaded and recorded.
    Loading,
    /// The machine is this host's to run, but could not be loaded. The copy is kept.
    Stuck,
    TakenOver,
    Ended,
}

/// Actions of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyLeaseAction {
    /// Nothing to do.
    Nothing,
    /// Ask the witness for the machine; [`StandbyLease::handle_witness_reply`] follows.
    AskWitness,
    /// Load the last complete epoch; [`StandbyLease::handle_loaded`] follows. Nobody else sees the machine
    /// yet.
    Load,
    /// Record durably that this host has the machine; [`StandbyLease::handle_recorded`] follows.
    Record,
    /// Run the machine.
    Run,
    /// The protection has ended here. Retain the pages for another one.
    Retain,
    /// Delete the machine here.
    Discard,
}

impl StandbyLease {
    /// The state at the start of a protection.
    pub fn initial(has_witness: bool, term: Duration, now: BootTime) -> Self {
        let (state, waits_until) = (State::Standing, now.after(term));
        Self { state, has_witness, term, waits_until }
    }

    /// Outcome of the protection here, as others are told. The machine is taken over once that is durable.
    pub fn outcome(&self) -> StandbyOutcome {
        match self.state {
            State::Standing => StandbyOutcome::Standing,
            State::Asking | State::Loading | State::Stuck => StandbyOutcome::Asking,
            State::TakenOver => StandbyOutcome::TakenOver,
            State::Ended => StandbyOutcome::Ended,
        }
    }

    /// Whether the machine is this host's to run, but cannot be loaded.
    pub fn is_stuck(&self) -> bool {
        self.state == State::Stuck
    }

    /// Whether the primary has promised by a heartbeat to be alive.
    pub fn hears_primary(&self, now: BootTime) -> bool {
        self.state == State::Standing && now < self.waits_until
    }

    /// Answers a heartbeat of the primary.
    pub fn heartbeat(&mut self, now: BootTime) -> HeartbeatReply {
        match self.state {
            State::Standing => {
                if !is_back(Loss::PromiseBroken) {
                    self.waits_until = now.after(self.term);
                }
                HeartbeatReply::Promise
            }
            _ => HeartbeatReply::NoPromise(self.outcome()),
        }
    }

    /// Checks the clock; `current` says whether there is a complete epoch to take over from.
    pub fn tick(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        match self.state {
            State::Standing if self.has_witness && current && now >= self.waits_until => self.ask(),
            State::Stuck if now >= self.waits_until => self.load(),
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Earliest time at which [`StandbyLease::tick`] acts.
    pub fn wakes(&self) -> BootTime {
        self.waits_until
    }

    /// Handles the witness's reply; none if the witness was not reached.
    pub fn handle_witness_reply(
        &mut self,
        verdict: Option<WitnessReply>,
        now: BootTime,
    ) -> StandbyLeaseAction {
        if self.state != State::Asking {
            return StandbyLeaseAction::Nothing;
        }
        match verdict {
            Some(WitnessReply::Yes) => self.load(),
            Some(WitnessReply::Closed) => {
                self.state = State::Ended;
                StandbyLeaseAction::Retain
            }
            Some(WitnessReply::Held | WitnessReply::Taken | WitnessReply::Unknown | WitnessReply::Full)
            | None => {
                self.state = State::Standing;
                self.waits_until = now.after(self.term / 16);
                StandbyLeaseAction::Nothing
            }
        }
    }

    /// Handles a yield: the primary does not run the machine unless it is told that the protection has ended.
    pub fn handle_yield(&mut self, current: bool) -> StandbyLeaseAction {
        match self.state {
            State::Standing | State::Asking if current => self.load(),
            State::Stuck => self.load(),
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Handles the end of [`StandbyLeaseAction::Load`].
    pub fn handle_loaded(&mut self, loaded: bool, now: BootTime) -> StandbyLeaseAction {
        match (self.state, loaded) {
            (State::Loading, true) => StandbyLeaseAction::Record,
            (State::Loading, false) if is_back(Loss::StandbyGivesUp) => {
                self.state = State::Ended;
                StandbyLeaseAction::Discard
            }
            (State::Loading, false) => {
                self.state = State::Stuck;
                self.waits_until = now.after(self.term * RELOAD_TERMS);
                StandbyLeaseAction::Nothing
            }
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Handles the end of [`StandbyLeaseAction::Record`], which is repeated until it succeeds.
    pub fn handle_recorded(&mut self) -> StandbyLeaseAction {
        self.state = State::TakenOver;
        StandbyLeaseAction::Run
    }

    /// Handles a failover by hand. Without a witness, the person is responsible for the primary being dead.
    pub fn failover(&mut self, current: bool, now: BootTime) -> StandbyLeaseAction {
        match self.state {
            State::Standing if !current => StandbyLeaseAction::Nothing,
            State::Standing if !self.has_witness => self.load(),
            State::Standing if now >= self.waits_until => self.ask(),
            State::Stuck => self.load(),
            _ => StandbyLeaseAction::Nothing,
        }
    }

    /// Handles the primary's word that it has a copy and keeps the machine. From here on this standby never
    /// runs it, whatever the witness has decided.
    pub fn end(&mut self, keep: bool) -> StandbyLeaseAction {
        match self.state {
            // A repeated word may end the retention.
            State::Standing | State::Stuck | State::Ended => {
                self.state = State::Ended;
                if keep { StandbyLeaseAction::Retain } else { StandbyLeaseAction::Discard }
            }
            State::Asking | State::Loading | State::TakenOver => StandbyLeaseAction::Nothing,
        }
    }

    /// Handles that this side cannot continue: its waiting QEMU is dead, or seeding has stopped.
    pub fn lose(&mut self) -> StandbyLeaseAction {
        if self.state != State::Standing {
            return StandbyLeaseAction::Nothing;
        }
        self.state = State::Ended;
        StandbyLeaseAction::Retain
    }

    fn ask(&mut self) -> StandbyLeaseAction {
        self.state = State::Asking;
        StandbyLeaseAction::AskWitness
    }

    fn load(&mut self) -> StandbyLeaseAction {
        self.state = State::Loading;
        StandbyLeaseAction::Load
    }
}
