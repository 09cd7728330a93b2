//! The lease, checked against everything that may happen around it.
//!
//! Primary, standby and witness with clocks of their own, of which the primary's may lose an eighth; any
//! message may be lost, repeated, late and overtaken; primary and witness restart at any time; the primary
//! yields, loses its QEMU, or asks to go on alone, at any time; the standby fails to load the machine. The
//! witness is a host with a clock, or a register without one. In every state that can be reached: the machine
//! is seen to run on one side at most, some side has a copy of it, and it comes to run somewhere once the
//! faults end. That the checker can fail is checked by breaking the rules.

mod world;

use stateright::{Checker, Model, Property};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{PrimaryLease, PrimaryState, StandbyLease, StandbyLeaseAction, WitnessLease, WitnessState},
    protocol::StandbyOutcome,
    register_witness::RegisterWitness,
};
use world::{Arbiter, Broken, Message, World};

/// Units of a term; the primary may use seven of them.
const TERM: Duration = Duration::from_secs(8);
/// Units that are looked at: a lease and its end. The long check, which takes two minutes, also looks at what
/// may come late.
const HORIZON: u64 = 8;
const LONG_HORIZON: u64 = 12;
/// Units of a step.
const STEP: u64 = 2;
/// Messages under way at once.
const UNDER_WAY: usize = 2;
/// Rounds in which a machine comes to run once the faults end: several terms, with a pause before a reload.
const ROUNDS: u64 = 80;
/// Renewals that a register takes, for its revisions must have an end; and in the long check.
const RENEWALS: u64 = 1;
const LONG_RENEWALS: u64 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Action {
    Tick {
        primary_skips: bool,
    },
    Send(Message),
    /// The message stays in flight, so that it may arrive again, until it is lost.
    Deliver(Message),
    Lose(Message),
    StandbyLooks,
    /// The standby reads the register's state, to know when it must act.
    StandbyWatches,
    StandbyHearsNothing,
    StandbyLoads {
        succeeds: bool,
    },
    PrimaryRestarts,
    WitnessRestarts,
    GiveUp,
    QemuDies,
}

struct Lease {
    broken: Broken,
    horizon: u64,
    register: bool,
    renewals: u64,
    /// Whether to look at what becomes of copies, with clocks that agree: a load may fail, QEMU may die, and
    /// the primary may end the protection at any time. Otherwise a load takes no time and always succeeds.
    copies: bool,
    /// The only property that is looked for: the search ends when it is broken.
    only: Option<&'static str>,
}

impl Model for Lease {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let now = BootTime(Duration::ZERO);
        vec![World {
            ticks: 0,
            skipped: 0,
            primary: PrimaryLease::initial(true, TERM),
            standby: StandbyLease::initial(true, TERM, now),
            witness: match self.register {
                false => Arbiter::Host(WitnessLease::new(WitnessState::Open, TERM, now)),
                true => {
                    let term = if self.broken.does_not_wait { Duration::ZERO } else { TERM };
                    Arbiter::Register {
                        stand: WitnessState::Open,
                        revision: 0,
                        ballot: RegisterWitness::new(term),
                    }
                }
            },
            messages: BTreeSet::new(),
            restarts: 0,
            yielded: false,
            loads: false,
            failures: 0,
            discarded: false,
            asked_to_keep: false,
            qemu_dead: false,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.ticks < self.horizon {
            actions.push(Action::Tick { primary_skips: false });
            let most = if self.broken.slow { 4 } else { 8 };
            if !self.copies && (world.skipped + 1) * most <= world.ticks + STEP {
                actions.push(Action::Tick { primary_skips: true });
            }
        }
        if world.messages.len() < UNDER_WAY {
            let asked = world.primary_now();
            if world.primary.state() == PrimaryState::Protected && !world.qemu_dead {
                actions.push(Action::Send(Message::Renew { asked }));
                actions.push(Action::Send(Message::Heartbeat { asked }));
            }
            let says = world.settle(self.broken).into_iter();
            let ends = self.copies || world.primary.state() != PrimaryState::Protected;
            actions.extend(says.filter(|says| ends || *says != Message::End).map(Action::Send));
            // An old message may still be under way when the machine is yielded, or has run there.
            let over =
                matches!(world.primary.state(), PrimaryState::Yielded { .. } | PrimaryState::TakenOver);
            if self.copies && over && !world.qemu_dead {
                actions.push(Action::Send(Message::End));
            }
            actions.push(Action::StandbyLooks);
            if self.register {
                actions.push(Action::StandbyWatches);
            }
        }
        for message in &world.messages {
            actions.push(Action::Deliver(message.clone()));
            actions.push(Action::Lose(message.clone()));
        }
        if world.standby.outcome() == StandbyOutcome::Asking {
            actions.push(Action::StandbyHearsNothing);
        }
        if world.loads {
            actions.push(Action::StandbyLoads { succeeds: true });
            if world.failures < 1 {
                actions.push(Action::StandbyLoads { succeeds: false });
            }
        }
        // Whoever has asked to keep the machine has its only copy.
        let only_copy = world.asked_to_keep || world.qemu_dead;
        if self.copies && world.primary.state() == PrimaryState::Protected && !only_copy {
            actions.push(Action::QemuDies);
        }
        if world.restarts < 1 {
            actions.push(Action::PrimaryRestarts);
            actions.push(Action::WitnessRestarts);
        }
        if world.primary.state() == PrimaryState::Protected {
            actions.push(Action::GiveUp);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        let now = world.standby_now();
        match action {
            Action::Tick { primary_skips } => {
                next.ticks += STEP;
                next.skipped += u64::from(primary_skips);
            }
            Action::Send(message) => {
                next.asked_to_keep |= matches!(message, Message::Close | Message::End);
                next.messages.insert(message);
            }
            Action::Deliver(message) => {
                next.deliver(&message, self.broken);
                let endless = matches!(next.witness, Arbiter::Register { stand: WitnessState::Open, revision, .. } if revision > self.renewals);
                if next.messages.len() > UNDER_WAY || endless {
                    return None;
                }
            }
            Action::StandbyWatches => drop(next.messages.insert(Message::Try { over: None })),
            Action::Lose(message) => drop(next.messages.remove(&message)),
            Action::StandbyLooks => {
                let at = if self.broken.breaks_promises { now.after(TERM) } else { now };
                let action = next.standby.tick(true, at);
                if action == StandbyLeaseAction::Nothing {
                    return None;
                }
                next.execute(action, now);
            }
            Action::StandbyLoads { succeeds } => {
                next.failures += u8::from(!succeeds);
                next.load(succeeds, self.broken);
            }
            Action::StandbyHearsNothing => drop(next.standby.handle_witness_reply(None, now)),
            Action::PrimaryRestarts => {
                next.restarts += 1;
                match world.primary.state() {
                    // What the standby has said it says again.
                    PrimaryState::TakenOver => return None,
                    // A machine that was yielded, durably, or has no QEMU any more, is yielded again.
                    PrimaryState::Yielded { .. } if world.yielded => return None,
                    _ if world.qemu_dead => next.primary.yield_machine(),
                    _ if self.broken.goes_on => next.primary.handle_outcome(StandbyOutcome::Ended),
                    _ => next.primary = PrimaryLease::recovered(true, TERM),
                }
            }
            Action::WitnessRestarts => {
                next.restarts += 1;
                // A register has nothing to forget.
                let Arbiter::Host(witness) = world.witness else { return None };
                let then = if self.broken.forgets_leases { BootTime(Duration::ZERO) } else { now };
                let term = if self.broken.forgets_leases { Duration::ZERO } else { TERM };
                next.witness = Arbiter::Host(WitnessLease::new(witness.state(), term, then));
            }
            Action::GiveUp => {
                next.yielded = true;
                next.primary.yield_machine();
            }
            Action::QemuDies => {
                next.qemu_dead = true;
                next.yielded = true;
                next.primary.yield_machine();
            }
        }
        if !self.copies && next.loads {
            next.load(true, self.broken);
        }
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let all = vec![
            Property::always(ONE_SIDE, |_, world: &World| {
                !(world.is_seen_here() && world.standby.outcome() == StandbyOutcome::TakenOver)
            }),
            Property::always(A_COPY, |_, world: &World| world.has_copy() || !world.discarded),
            Property::always(GOES_ON, |model: &Self, world: &World| world.heals(model.broken)),
            Property::sometimes(LOADS_AGAIN, |_, world: &World| {
                world.failures > 0 && world.standby.outcome() == StandbyOutcome::TakenOver
            }),
            Property::sometimes(GOES_BACK, |_, world: &World| {
                world.failures > 0 && world.primary.state() == PrimaryState::Alone
            }),
            Property::sometimes("the standby takes over", |_, world: &World| {
                world.standby.outcome() == StandbyOutcome::TakenOver && !world.yielded
            }),
            Property::sometimes("the primary goes on alone", |_, world: &World| {
                world.primary.state() == PrimaryState::Alone
            }),
            Property::sometimes("the primary learns that it was taken over", |_, world: &World| {
                world.primary.state() == PrimaryState::TakenOver && !world.yielded
            }),
            Property::sometimes("the primary runs by its standby's promise alone", |_, world: &World| {
                world.is_seen_here()
                    && world.primary.state() == PrimaryState::Protected
                    && world.primary.lease_until() <= world.primary_now()
            }),
        ];
        let of_copies = [A_COPY, GOES_ON, LOADS_AGAIN, GOES_BACK];
        let wanted = |property: &Property<Self>| match self.only {
            Some(only) => property.name == only,
            None => match self.copies {
                true => property.name == ONE_SIDE || of_copies.contains(&property.name),
                false => !of_copies.contains(&property.name),
            },
        };
        all.into_iter().filter(wanted).collect()
    }
}

const ONE_SIDE: &str = "one side at most is seen to run";
const A_COPY: &str = "some side has a copy";
const GOES_ON: &str = "the machine comes to run somewhere once the faults end";
const LOADS_AGAIN: &str = "a machine that the standby could not load runs there";
const GOES_BACK: &str = "a machine that the standby could not load goes back";

fn check(horizon: u64, register: bool, renewals: u64, copies: bool) {
    let begun = std::time::Instant::now();
    let checked = Lease { broken: Broken::default(), horizon, register, renewals, copies, only: None }
        .checker()
        .threads(2)
        .spawn_bfs()
        .join();
    println!("{} states, {:.1} s", checked.unique_state_count(), begun.elapsed().as_secs_f64());
    checked.assert_properties();
    assert!(checked.unique_state_count() > 10_000);
}

#[test]
fn whatever_happens_the_machine_is_seen_on_one_side_at_most() {
    check(HORIZON, false, 0, false);
}

#[test]
fn whatever_happens_some_side_has_a_copy_and_comes_to_run_it() {
    check(HORIZON, false, 0, true);
}

#[test]
fn a_register_without_a_clock_is_as_good_a_witness() {
    check(HORIZON, true, RENEWALS, false);
}

#[test]
#[ignore = "takes two minutes: run it after a change of the rules"]
fn whatever_comes_late_the_machine_is_seen_on_one_side_at_most() {
    check(LONG_HORIZON, false, 0, false);
    check(LONG_HORIZON, false, 0, true);
    check(LONG_HORIZON, true, LONG_RENEWALS, false);
}

#[test]
fn every_fault_in_the_rules_is_found() {
    let faults = [
        (Broken { counts_from_the_answer: true, ..Broken::default() }, ONE_SIDE),
        (Broken { forgets_leases: true, ..Broken::default() }, ONE_SIDE),
        (Broken { breaks_promises: true, ..Broken::default() }, ONE_SIDE),
        (Broken { goes_on: true, ..Broken::default() }, ONE_SIDE),
        (Broken { slow: true, ..Broken::default() }, ONE_SIDE),
        (Broken { does_not_wait: true, ..Broken::default() }, ONE_SIDE),
        (Broken { takes_any: true, ..Broken::default() }, ONE_SIDE),
        (Broken { retires_unheard: true, ..Broken::default() }, A_COPY),
        (Broken { gives_up: true, ..Broken::default() }, A_COPY),
        (Broken { never_yields: true, ..Broken::default() }, GOES_ON),
    ];
    for (fault, property) in faults {
        let register = fault.does_not_wait || fault.takes_any;
        let (copies, only) = (property != ONE_SIDE, Some(property));
        let horizon = if copies { HORIZON } else { LONG_HORIZON };
        let checked = Lease { broken: fault, horizon, register, renewals: RENEWALS, copies, only }
            .checker()
            .threads(2)
            .spawn_bfs()
            .join();
        println!("{fault:?}: {} states", checked.unique_state_count());
        assert!(checked.discovery(property).is_some(), "{fault:?} is not found");
    }
}
