//! A machine that moves with a third host behind it: the handover and the protection of its heir, checked as
//! one.
//!
//! The source, which fills the standby and is the witness once it has committed; the target, which inherits;
//! the third host. Any message may be lost, repeated, late and overtaken; either daemon restarts, the
//! target's QEMU dies, or a host dies for good, at any step. The transition functions are those of the
//! product: `whimbrel_migrate::handover`, `whimbrel_protect::lease` and
//! `whimbrel_protect::inherited_primary`. In every state that can be reached the machine is seen on one host
//! at most, and whoever runs it has all that ever left it. From every state in which one host at most is dead
//! for good, and the target had heard the source's word before that if it is the source, the machine comes to
//! run somewhere once the faults end. That the checker can fail is checked by breaking the rules.

mod world;

use stateright::{Checker, Model, Property};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_migrate::handover::{Source, SourceEvent, Target};
use whimbrel_protect::{
    clock::BootTime,
    inherited_primary::AcceptedPrimary,
    lease::{PrimaryState, StandbyLease, StandbyLeaseAction, WitnessLease, WitnessState},
    protocol::StandbyOutcome,
};
use world::{Broken, Host, Message, STEP, TERM, World};

/// Units that are looked at: a lease and its end. The long check also looks at what comes late.
const HORIZON: u64 = 4;
const LONG_HORIZON: u64 = 6;
/// Messages under way at once.
const UNDER_WAY: usize = 2;
/// Epochs of the heir that are looked at.
const EPOCHS: u8 = 1;
/// Faults in one life.
const FAULTS: u8 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    Send(Message),
    /// The message stays in flight, so that it may arrive again, until it is lost.
    Deliver(Message),
    Lose(Message),
    Pause,
    GiveUpMoving,
    Cut,
    ThirdLooks,
    ThirdHearsNothing,
    /// The pages that the heir lacks cannot be had.
    PagesAreLost,
    QemuDies,
    Restart(Host),
    Dies(Host),
}

struct Inherited {
    broken: Broken,
    horizon: u64,
    /// The only property that is looked for: the search ends when it is broken.
    only: Option<&'static str>,
}

impl Model for Inherited {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let now = BootTime(Duration::ZERO);
        vec![World {
            ticks: 0,
            faults: 0,
            dead: None,
            unheard: false,
            source: Source::initial().0,
            sealed: false,
            ready: false,
            witness: self.broken.decides_early.then(|| WitnessLease::new(WitnessState::Open, TERM, now)),
            target: Target::initial().0,
            restarted: false,
            heir: None,
            cut: 0,
            released: 0,
            standby: StandbyLease::initial(true, TERM, now),
            voice: AcceptedPrimary::Source,
            has: None,
            messages: BTreeSet::new(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.ticks < self.horizon {
            actions.push(Action::Tick);
        }
        if world.messages.len() < UNDER_WAY {
            actions.extend(world.says(self.broken).into_iter().map(Action::Send));
        }
        for message in &world.messages {
            actions.push(Action::Deliver(message.clone()));
            actions.push(Action::Lose(message.clone()));
        }
        if world.source == Source::Copying && world.is_up(Host::Source) {
            actions.push(Action::Pause);
        }
        if world.is_up(Host::Third) {
            actions.push(Action::ThirdLooks);
            if world.standby.outcome() == StandbyOutcome::Asking {
                actions.push(Action::ThirdHearsNothing);
            }
        }
        if world.heir_stands() == Some(PrimaryState::Protected) {
            if world.cut == world.released && world.cut < EPOCHS {
                actions.push(Action::Cut);
            }
            // A link between the two others that is lost for good is a fault too.
            if world.dead == Some(Host::Source) || world.faults < FAULTS {
                actions.push(Action::PagesAreLost);
            }
        }
        if world.faults < FAULTS {
            if world.source == Source::Stopped && world.is_up(Host::Source) {
                actions.push(Action::GiveUpMoving);
            }
            actions.push(Action::QemuDies);
            for host in [Host::Source, Host::Target, Host::Third] {
                if world.is_up(host) {
                    actions.push(Action::Restart(host));
                    if world.dead.is_none() {
                        actions.push(Action::Dies(host));
                    }
                }
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        match action {
            Action::Tick => next.ticks += STEP,
            Action::Send(message) => drop(next.messages.insert(message)),
            Action::Deliver(message) => {
                next.deliver(&message, self.broken);
                if next.messages.len() > UNDER_WAY {
                    return None;
                }
            }
            Action::Lose(message) => drop(next.messages.remove(&message)),
            Action::Pause => next.source = next.source.step(SourceEvent::RoundsOver).0,
            Action::GiveUpMoving => {
                next.faults += 1;
                next.source = next.source.step(SourceEvent::Failed).0;
            }
            Action::Cut => {
                next.cut += 1;
                if self.broken.lets_out_early {
                    next.released = next.cut;
                }
            }
            Action::ThirdLooks => {
                if next.standby.tick(next.has.is_some(), next.now()) != StandbyLeaseAction::AskWitness {
                    return None;
                }
            }
            Action::ThirdHearsNothing => drop(next.standby.handle_witness_reply(None, next.now())),
            Action::PagesAreLost => {
                next.faults += u8::from(world.dead != Some(Host::Source));
                if !next.pages_are_lost(self.broken) {
                    return None;
                }
            }
            Action::QemuDies => {
                next.faults += 1;
                let heir = next.heir.as_mut().filter(|heir| heir.state() == PrimaryState::Protected)?;
                heir.yield_machine();
            }
            Action::Restart(host) => {
                next.faults += 1;
                if !next.restart(host, self.broken) {
                    return None;
                }
            }
            Action::Dies(host) => {
                next.faults += 1;
                next.dead = Some(host);
                next.unheard = host == Host::Source && next.target != Target::Running;
            }
        }
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let all = vec![
            Property::always(ONE_SIDE, |model: &Self, world: &World| {
                world.seen(model.broken).iter().filter(|seen| **seen).count() <= 1
            }),
            Property::always(NOTHING_LOST, |_, world: &World| {
                let has_it = world.has.is_some_and(|has| has >= world.released);
                world.standby.outcome() != StandbyOutcome::TakenOver || has_it
            }),
            Property::always(GOES_ON, |model: &Self, world: &World| {
                // What the witness has given to the third host ends with it, as a machine does with any host.
                let its_own = world.witness.is_some_and(|witness| witness.state() == WitnessState::Taken)
                    || world.standby.outcome() == StandbyOutcome::TakenOver;
                let ended =
                    world.standby.outcome() == StandbyOutcome::Ended || world.dead == Some(Host::Third);
                let ended_with_it = its_own && ended;
                // Closed, the protection is over: the machine is the target's alone, and nobody promises
                // anything.
                let closed = world.witness.is_some_and(|witness| witness.state() == WitnessState::Closed);
                world.unheard || closed || ended_with_it || world.faults > 1 || world.heals(model.broken)
            }),
            Property::sometimes("the target dies and the third host goes on", |_, world: &World| {
                world.dead == Some(Host::Target) && world.standby.outcome() == StandbyOutcome::TakenOver
            }),
            Property::sometimes("the source dies and the third host goes on", |_, world: &World| {
                world.dead == Some(Host::Source) && world.standby.outcome() == StandbyOutcome::TakenOver
            }),
            Property::sometimes("the third host dies and the target goes on", |_, world: &World| {
                world.dead == Some(Host::Third) && world.heir_stands() == Some(PrimaryState::Alone)
            }),
            Property::sometimes("the third host takes over the state of the pause", |_, world: &World| {
                world.has == Some(0) && world.standby.outcome() == StandbyOutcome::TakenOver
            }),
            Property::sometimes("an epoch of the heir leaves", |_, world: &World| world.released == EPOCHS),
            Property::sometimes("the source goes on", |_, world: &World| {
                world.source == Source::Aborted && world.has.is_some()
            }),
        ];
        all.into_iter().filter(|property| self.only.is_none_or(|only| property.name == only)).collect()
    }
}

const ONE_SIDE: &str = "the machine is seen on one host at most";
const NOTHING_LOST: &str = "whoever takes over has all that has left";
const GOES_ON: &str = "after one fault the machine comes to run somewhere";

fn check(horizon: u64) {
    let begun = std::time::Instant::now();
    let checked =
        Inherited { broken: Broken::default(), horizon, only: None }.checker().threads(2).spawn_bfs().join();
    let (unique, all) = (checked.unique_state_count(), checked.state_count());
    println!("{unique} states, {all} transitions, {:.1} s", begun.elapsed().as_secs_f64());
    checked.assert_properties();
    assert!(unique > 10_000, "the model reached only {unique} states");
}

#[test]
fn one_host_runs_it_and_none_that_dies_takes_with_it_what_has_left() {
    check(HORIZON);
}

#[test]
#[ignore = "takes minutes: run it after a change of the rules"]
fn whatever_comes_late_one_host_runs_it() {
    check(LONG_HORIZON);
}

#[test]
fn every_fault_in_the_rules_is_found() {
    let faults = [
        (Broken { decides_early: true, ..Broken::default() }, ONE_SIDE),
        (Broken { commits_early: true, ..Broken::default() }, GOES_ON),
        (Broken { lets_out_early: true, ..Broken::default() }, NOTHING_LOST),
        (Broken { goes_on: true, ..Broken::default() }, ONE_SIDE),
        (Broken { needs_no_lease: true, ..Broken::default() }, ONE_SIDE),
        (Broken { never_decides: true, ..Broken::default() }, GOES_ON),
        (Broken { waits: true, ..Broken::default() }, GOES_ON),
    ];
    for (fault, property) in faults {
        let checked = Inherited { broken: fault, horizon: HORIZON, only: Some(property) }
            .checker()
            .threads(2)
            .spawn_bfs()
            .join();
        println!("{fault:?}: {} states", checked.unique_state_count());
        assert!(checked.discovery(property).is_some(), "{fault:?} is not found");
    }
}
