//! The three hosts and what is under way between them: what each does when something arrives or fails, and
//! whether the machine comes to run again.

use super::{ROUNDS, STEP, TERM};
use crate::spoken::{Answer, Reply, TAKE};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{
        PrimaryLease, PrimaryLeaseAction, PrimaryState, StandbyLease, StandbyLeaseAction, WitnessLease,
        WitnessQuery, WitnessReply, WitnessState,
    },
    protocol::StandbyOutcome,
    register_witness::{RegisterReply, RegisterRequest, RegisterWitness},
};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) ticks: u64,
    pub(crate) skipped: u64,
    pub(crate) primary: PrimaryLease,
    pub(crate) standby: StandbyLease,
    pub(crate) witness: Arbiter,
    pub(crate) messages: BTreeSet<Message>,
    pub(crate) restarts: u8,
    pub(crate) yielded: bool,
    /// The standby is loading the machine.
    pub(crate) loads: bool,
    /// Loads that have failed.
    pub(crate) failures: u8,
    /// The standby has deleted its copy, or retains it for another protection.
    pub(crate) discarded: bool,
    /// The primary has asked to keep the machine.
    pub(crate) asked_to_keep: bool,
    pub(crate) qemu_dead: bool,
}

/// The witness of the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Arbiter {
    Host(WitnessLease),
    /// How a protection stands and since which revision, and what the standby knows of that.
    Register {
        stand: WitnessState,
        revision: u64,
        ballot: RegisterWitness,
    },
}

impl Arbiter {
    /// A transaction of a register.
    pub(crate) fn attempt(&mut self, attempt: RegisterRequest) -> RegisterReply {
        let Self::Register { stand, revision, .. } = self else { unreachable!("a host is asked questions") };
        match attempt {
            RegisterRequest::Put { state: next, revision: over }
                if *stand == WitnessState::Open && over.is_none_or(|over| over == *revision) =>
            {
                (*stand, *revision) = (next, *revision + 1);
                RegisterReply::Done
            }
            _ => RegisterReply::State(Some((*stand, *revision))),
        }
    }

    pub(crate) fn ask(&mut self, question: &WitnessQuery, now: BootTime) -> WitnessReply {
        match self {
            Self::Host(witness) => witness.step(question, now).reply(),
            Self::Register { .. } => RegisterWitness::verdict(
                question,
                self.attempt(RegisterWitness::new(TERM).attempt(question, now)),
            ),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Message {
    Renew {
        asked: BootTime,
    },
    Renewed {
        asked: BootTime,
        verdict: Answer,
    },
    Heartbeat {
        asked: BootTime,
    },
    Heard {
        asked: BootTime,
        fate: Reply,
    },
    Take,
    Taken {
        verdict: Answer,
    },
    /// To a register: to take the machine over this revision, or only to tell.
    Try {
        over: Option<u64>,
    },
    Told {
        verdict: Answer,
        open: Option<u64>,
    },
    Close,
    Closed {
        verdict: Answer,
    },
    Yield,
    Yielded {
        fate: Reply,
    },
    End,
    Ended {
        fate: Reply,
    },
}

/// What may be broken in the rules.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Broken {
    /// The primary counts its lease from when the answer came.
    pub(crate) counts_from_the_answer: bool,
    /// A restarted witness believes that no lease runs.
    pub(crate) forgets_leases: bool,
    /// The standby does not wait for its own promise.
    pub(crate) breaks_promises: bool,
    /// A restarted primary goes on as if it were protected by nobody.
    pub(crate) goes_on: bool,
    /// The primary's clock loses a quarter.
    pub(crate) slow: bool,
    /// The standby takes the machine over a revision of a register that it has just seen.
    pub(crate) does_not_wait: bool,
    /// The standby takes the machine whatever the revision is by then.
    pub(crate) takes_any: bool,
    /// The primary deletes its machine when the witness says that it is taken.
    pub(crate) retires_unheard: bool,
    /// The standby gives up a machine that it cannot load.
    pub(crate) gives_up: bool,
    /// Nobody asks a standby that does not know that the machine is its own.
    pub(crate) never_yields: bool,
}

impl World {
    pub(crate) fn standby_now(&self) -> BootTime {
        BootTime(Duration::from_secs(self.ticks))
    }

    pub(crate) fn primary_now(&self) -> BootTime {
        BootTime(Duration::from_secs(self.ticks - self.skipped))
    }

    pub(crate) fn is_seen_here(&self) -> bool {
        self.primary.may_run(self.primary_now())
    }

    pub(crate) fn has_copy(&self) -> bool {
        !self.qemu_dead && self.primary.state() != PrimaryState::TakenOver
    }

    /// Does what the standby must do.
    pub(crate) fn execute(&mut self, mut action: StandbyLeaseAction, at: BootTime) {
        loop {
            action = match action {
                StandbyLeaseAction::Nothing | StandbyLeaseAction::Run => return,
                StandbyLeaseAction::AskWitness => {
                    let take = match &self.witness {
                        Arbiter::Host(_) => Message::Take,
                        Arbiter::Register { ballot, .. } => match ballot.attempt(&TAKE, at) {
                            RegisterRequest::Put { revision: over, .. } => Message::Try { over },
                            _ => Message::Try { over: None },
                        },
                    };
                    self.messages.insert(take);
                    return;
                }
                StandbyLeaseAction::Load => {
                    self.loads = true;
                    return;
                }
                StandbyLeaseAction::Record => self.standby.handle_recorded(),
                StandbyLeaseAction::Retain | StandbyLeaseAction::Discard => {
                    self.discarded = true;
                    return;
                }
            };
        }
    }

    /// Does what the primary must do once it no longer sends epochs.
    pub(crate) fn settle(&self, broken: Broken) -> Vec<Message> {
        match self.primary.next_action(true, self.has_copy(), self.primary_now()) {
            PrimaryLeaseAction::RunHere | PrimaryLeaseAction::Retire => Vec::new(),
            PrimaryLeaseAction::Ask | PrimaryLeaseAction::AskFenced if self.qemu_dead => Vec::new(),
            PrimaryLeaseAction::Ask | PrimaryLeaseAction::AskFenced => vec![Message::Close, Message::End],
            PrimaryLeaseAction::Yield if broken.never_yields => Vec::new(),
            PrimaryLeaseAction::Yield => vec![Message::Yield],
            PrimaryLeaseAction::TakeBack => vec![Message::End],
        }
    }

    /// Whether the machine comes to run somewhere if nothing fails from now on.
    pub(crate) fn heals(&self, broken: Broken) -> bool {
        let mut world = self.clone();
        world.messages.clear();
        for _ in 0..ROUNDS {
            world.ticks += STEP;
            if world.standby.outcome() == StandbyOutcome::TakenOver
                || (world.is_seen_here() && world.has_copy())
            {
                return true;
            }
            let now = world.standby_now();
            if world.loads {
                world.load(true, broken);
            }
            // A query that was not answered is given up.
            world.standby.handle_witness_reply(None, now);
            let action = world.standby.tick(true, now);
            world.execute(action, now);
            world.messages.extend(world.settle(broken));
            if let Arbiter::Register { .. } = world.witness {
                world.messages.insert(Message::Try { over: None });
            }
            while let Some(message) = world.messages.pop_first() {
                world.deliver(&message, broken);
            }
        }
        false
    }

    pub(crate) fn load(&mut self, succeeds: bool, broken: Broken) {
        self.loads = false;
        let now = self.standby_now();
        let mut action = self.standby.handle_loaded(succeeds, now);
        if broken.gives_up && !succeeds {
            action = self.standby.end(false);
        }
        self.execute(action, now);
    }

    pub(crate) fn deliver(&mut self, message: &Message, broken: Broken) {
        let (now, mine) = (self.standby_now(), self.primary_now());
        let asked_at = |asked: BootTime| if broken.counts_from_the_answer { mine } else { asked };
        match *message {
            Message::Renew { asked } => {
                let verdict = Answer::of(self.witness.ask(&WitnessQuery::Renew, now));
                self.messages.insert(Message::Renewed { asked, verdict });
            }
            Message::Renewed { asked, verdict } => {
                self.hear_witness(&WitnessQuery::Renew, verdict.verdict(), asked_at(asked), broken);
            }
            Message::Heartbeat { asked } => {
                let fate = Reply::of(self.standby.heartbeat(now));
                self.messages.insert(Message::Heard { asked, fate });
            }
            Message::Heard { asked, fate } => {
                self.primary.handle_heartbeat_reply(fate.heard(), asked_at(asked));
            }
            Message::Take => {
                let verdict = Answer::of(self.witness.ask(&TAKE, now));
                self.messages.insert(Message::Taken { verdict });
            }
            Message::Taken { verdict } => {
                let action = self.standby.handle_witness_reply(Some(verdict.verdict()), now);
                self.execute(action, now);
            }
            Message::Try { over } => {
                let take = |over| RegisterRequest::Put {
                    state: WitnessState::Taken,
                    revision: Some(over).filter(|_| !broken.takes_any),
                };
                let outcome = self.witness.attempt(over.map_or(RegisterRequest::Read, take));
                let open = match outcome {
                    RegisterReply::State(Some((WitnessState::Open, revision))) => Some(revision),
                    _ => None,
                };
                let verdict = Answer::of(RegisterWitness::verdict(&TAKE, outcome));
                self.messages.insert(Message::Told { verdict, open });
            }
            Message::Told { verdict, open } => {
                if let Arbiter::Register { ballot, .. } = &mut self.witness {
                    ballot.handle_reply(
                        RegisterReply::State(open.map(|revision| (WitnessState::Open, revision))),
                        now,
                    );
                }
                let action = self.standby.handle_witness_reply(Some(verdict.verdict()), now);
                self.execute(action, now);
            }
            Message::Close => {
                let verdict = Answer::of(self.witness.ask(&WitnessQuery::Close, now));
                self.messages.insert(Message::Closed { verdict });
            }
            Message::Closed { verdict } => {
                self.hear_witness(&WitnessQuery::Close, verdict.verdict(), mine, broken);
            }
            Message::Yield => {
                let action = self.standby.handle_yield(true);
                self.execute(action, now);
                let fate = Reply::fate(self.standby.outcome());
                self.messages.insert(Message::Yielded { fate });
            }
            Message::Yielded { fate } => self.primary.handle_yield_reply(fate.ended()),
            Message::End => {
                let action = self.standby.end(false);
                self.execute(action, now);
                let fate = Reply::fate(self.standby.outcome());
                self.messages.insert(Message::Ended { fate });
            }
            Message::Ended { fate } => self.primary.handle_take_back_reply(fate.ended()),
        }
    }

    pub(crate) fn hear_witness(
        &mut self,
        query: &WitnessQuery,
        verdict: WitnessReply,
        asked: BootTime,
        broken: Broken,
    ) {
        self.primary.handle_witness_reply(query, verdict, asked);
        if broken.retires_unheard && verdict == WitnessReply::Taken {
            self.primary.handle_outcome(StandbyOutcome::TakenOver);
        }
    }
}
