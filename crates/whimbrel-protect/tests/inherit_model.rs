//! A machine that moves with a third host behind it: the handover and the protection of its heir, checked as one.
//!
//! The source, which fills the standby and is the witness once it has committed; the target, which inherits; the third host. Any
//! message may be lost, repeated, late and overtaken; either daemon restarts, the target's QEMU dies, or a host dies for
//! good, at any step. The transition functions are those of the product: `whimbrel_migrate::handover`, `whimbrel_protect::lease`
//! and `whimbrel_protect::inherit`. In every state that can be reached the machine is seen on one host at most, and whoever runs it has
//! all that ever left it. From every state in which one host at most is dead for good, and the target had heard the source's word
//! before that if it is the source, the machine comes to run somewhere once the faults end. That the checker can fail is
//! checked by breaking the rules.

use stateright::{Checker, Model, Property};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_migrate::handover::{
    Source, SourceEvent, SourceRecord, Target, TargetEvent, TargetRecord, Waiting,
};
use whimbrel_protect::{
    clock::Moment,
    inherit::{self, Voice},
    lease::{Primary, PrimaryStand, Question, Stand, Standby, StandbyAction, Verdict, Witness},
    protocol::{Fate, Heard},
};

const TERM: Duration = Duration::from_secs(4);
/// Units of a step, and how many are looked at: a lease and its end. The long check also looks at what comes late.
const STEP: u64 = 2;
const HORIZON: u64 = 4;
const LONG_HORIZON: u64 = 6;
/// Messages under way at once.
const UNDER_WAY: usize = 2;
/// Epochs of the heir that are looked at.
const EPOCHS: u8 = 1;
/// Rounds after which a move is given up.
const PATIENCE: u64 = 10;
/// Faults in one life.
const FAULTS: u8 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    ticks: u64,
    faults: u8,
    dead: Option<Host>,
    /// The source is dead and the target had not heard its word.
    unheard: bool,
    source: Source,
    /// The standby has said that it is whole as of the pause.
    sealed: bool,
    /// The target has said that it is ready.
    ready: bool,
    witness: Option<Witness>,
    target: Target,
    restarted: bool,
    heir: Option<Primary>,
    /// The last epoch that was cut, and the last whose output has left.
    cut: u8,
    released: u8,
    standby: Standby,
    voice: Voice,
    /// The epoch that is whole at the third host.
    has: Option<u8>,
    messages: BTreeSet<Message>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Host {
    Source,
    Target,
    Third,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    // From the source, and answers to it.
    Fill,
    Filled,
    Finish,
    Ready,
    Commit,
    Runs,
    Abort,
    Forgot,
    EndBySource,
    // From the heir, and answers to it.
    Beat { asked: Moment },
    Heard { asked: Moment, fate: u8 },
    Renew { asked: Moment },
    Renewed { asked: Moment, verdict: u8 },
    Close,
    Closed { verdict: u8 },
    Seal(u8),
    Sealed(u8),
    Yield,
    Yielded { fate: u8 },
    // From the third host, and answers to it.
    Take,
    Taken { verdict: u8 },
}

const VERDICTS: [Verdict; 5] =
    [Verdict::Yes, Verdict::Held, Verdict::Taken, Verdict::Closed, Verdict::Unknown];
const FATES: [Fate; 4] = [Fate::Standing, Fate::Asking, Fate::TakenOver, Fate::Ended];
const PROMISE: u8 = 9;
const TAKE: Question = Question::Take { yielded: false };

fn of<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).expect("one of them") as u8
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    Send(Message),
    /// It stays under way, so that it may come again, until it is lost.
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

/// What may be broken in the rules.
#[derive(Debug, Clone, Copy, Default)]
struct Broken {
    /// The source is the witness before it has committed.
    decides_early: bool,
    /// It commits before the third host has the state of the pause.
    commits_early: bool,
    /// The heir's output leaves when its epoch is cut.
    lets_out_early: bool,
    /// A restarted heir goes on as if nothing had been written.
    goes_on: bool,
    /// The heir runs without asking anybody.
    needs_no_lease: bool,
    /// The source never takes up being the witness.
    never_decides: bool,
    /// The heir waits for its pages for ever.
    waits: bool,
}

struct Inherited {
    broken: Broken,
    horizon: u64,
    /// The only property that is looked for: the search ends when it is broken.
    only: Option<&'static str>,
}

impl World {
    fn now(&self) -> Moment {
        Moment(Duration::from_secs(self.ticks))
    }

    fn is_up(&self, host: Host) -> bool {
        self.dead != Some(host)
    }

    fn heir_may_be_seen(&self, broken: Broken) -> bool {
        let may = self.heir.is_some_and(|heir| broken.needs_no_lease || heir.may_run(self.now()));
        self.is_up(Host::Target) && self.target.may_run() && may
    }

    fn seen(&self, broken: Broken) -> [bool; 3] {
        [
            self.is_up(Host::Source) && self.source.may_run(),
            self.heir_may_be_seen(broken),
            self.is_up(Host::Third) && self.standby.fate() == Fate::TakenOver,
        ]
    }

    fn heir_stands(&self) -> Option<PrimaryStand> {
        self.heir.filter(|_| self.is_up(Host::Target)).map(|heir| heir.stand())
    }

    fn has_given_up(&self) -> bool {
        self.heir_stands() == Some(PrimaryStand::Gone) && self.standby.fate() != Fate::TakenOver
    }

    /// What a host says again and again until it is answered, as things are.
    fn says(&self, broken: Broken) -> Vec<Message> {
        let (mut says, asked) = (Vec::new(), self.now());
        if self.is_up(Host::Source) {
            match self.source {
                Source::Stopped if !self.sealed && !broken.commits_early => says.push(Message::Fill),
                Source::Stopped if !self.ready => says.push(Message::Finish),
                Source::Committed => says.push(Message::Commit),
                Source::Aborted => says.extend([Message::Abort, Message::EndBySource]),
                _ => {}
            }
        }
        match self.heir_stands() {
            Some(PrimaryStand::Guarded) => {
                says.extend([Message::Beat { asked }, Message::Renew { asked }, Message::Close]);
                if self.cut > self.released {
                    says.push(Message::Seal(self.cut));
                }
            }
            Some(PrimaryStand::Gone) if self.has_given_up() => says.push(Message::Yield),
            _ => {}
        }
        if self.is_up(Host::Third) && self.standby.fate() == Fate::Asking {
            says.push(Message::Take);
        }
        says
    }

    fn deliver(&mut self, message: &Message, broken: Broken) {
        use Message::*;
        let to = match message {
            Filled | Ready | Runs | Forgot | Renew { .. } | Close | Take => Host::Source,
            Finish
            | Commit
            | Abort
            | Heard { .. }
            | Renewed { .. }
            | Closed { .. }
            | Sealed(_)
            | Yielded { .. } => Host::Target,
            Fill | EndBySource | Beat { .. } | Seal(_) | Yield | Taken { .. } => Host::Third,
        };
        if self.is_up(to) {
            match to {
                Host::Source => self.at_source(message, broken),
                Host::Target => self.at_target(message, broken),
                Host::Third => self.at_third(message),
            }
        }
    }

    fn at_source(&mut self, message: &Message, broken: Broken) {
        let now = self.now();
        let mut ask = |question: &Question| {
            of(
                &VERDICTS,
                self.witness.as_mut().map_or(Verdict::Unknown, |witness| witness.step(question, now)),
            )
        };
        match *message {
            Message::Renew { asked } => {
                let verdict = ask(&Question::Renew);
                self.messages.insert(Message::Renewed { asked, verdict });
            }
            Message::Close => {
                let verdict = ask(&Question::Close);
                self.messages.insert(Message::Closed { verdict });
            }
            Message::Take => {
                let verdict = ask(&TAKE);
                self.messages.insert(Message::Taken { verdict });
            }
            Message::Filled => self.sealed = true,
            Message::Ready => self.ready = true,
            Message::Runs => self.source = self.source.step(SourceEvent::TargetRuns).0,
            Message::Forgot => self.source = self.source.step(SourceEvent::TargetForgot).0,
            _ => {}
        }
        if self.source == Source::Stopped && self.ready && (self.sealed || broken.commits_early) {
            self.source = self.source.step(SourceEvent::TargetReady).0;
            self.is_witness_from_now(broken);
        }
    }

    /// As of what is on the source's disk.
    fn is_witness_from_now(&mut self, broken: Broken) {
        let record = if self.source.may_run() { SourceRecord::Ours } else { SourceRecord::HandedOver };
        if inherit::is_witness(record) && !broken.never_decides {
            let stand = self.witness.map_or(Stand::Open, |witness| witness.stand());
            self.witness = Some(Witness::new(stand, TERM, self.now()));
        }
    }

    fn at_target(&mut self, message: &Message, broken: Broken) {
        let now = self.now();
        match *message {
            Message::Finish => {
                self.target = self.target.step(TargetEvent::Loaded).0;
                if self.target == Target::Prepared {
                    self.messages.insert(Message::Ready);
                }
            }
            Message::Commit => {
                let before = self.target;
                self.target = self.target.step(TargetEvent::Commit).0;
                if before == Target::Prepared && self.target == Target::Running {
                    let mut heir = Primary::begin(true, TERM);
                    if self.restarted && !broken.goes_on {
                        heir.give_up();
                    }
                    self.heir = Some(heir);
                }
                if self.target == Target::Running {
                    self.messages.insert(Message::Runs);
                }
            }
            Message::Abort => {
                self.target = self.target.step(TargetEvent::Abort).0;
                if self.target == Target::Discarded {
                    self.messages.insert(Message::Forgot);
                }
            }
            _ => {}
        }
        let Some(heir) = &mut self.heir else { return };
        match *message {
            Message::Heard { asked, fate } => {
                let heard = FATES.get(fate as usize).map_or(Heard::Promise, |fate| Heard::NoPromise(*fate));
                heir.standby_heard(heard, asked);
            }
            Message::Renewed { asked, verdict } => {
                heir.witness_said(&Question::Renew, VERDICTS[verdict as usize], asked);
            }
            Message::Closed { verdict } => {
                heir.witness_said(&Question::Close, VERDICTS[verdict as usize], now);
            }
            Message::Yielded { fate } if FATES[fate as usize] == Fate::Ended => {
                *heir = Primary::begin(true, TERM);
                heir.standby_is(Fate::Ended);
            }
            // An answer to an epoch that was given up is not waited for any more.
            Message::Sealed(epoch) if epoch == self.cut && heir.may_run(now) => {
                self.released = epoch;
            }
            _ => {}
        }
    }

    fn at_third(&mut self, message: &Message) {
        let now = self.now();
        let is_heir = !matches!(message, Message::Fill | Message::EndBySource);
        if !matches!(message, Message::Taken { .. }) {
            let (voice, heard) = self.voice.hears(is_heir);
            self.voice = voice;
            if !heard {
                return;
            }
        }
        let follows = self.standby.fate() == Fate::Standing;
        match *message {
            Message::Fill if follows => {
                // Sent again it is the same: the machine stands still.
                self.has = Some(0);
                self.messages.insert(Message::Filled);
            }
            Message::EndBySource => drop(self.standby.end()),
            Message::Beat { asked } => {
                let fate = match self.standby.heartbeat(now) {
                    Heard::Promise => PROMISE,
                    Heard::NoPromise(fate) => of(&FATES, fate),
                };
                self.messages.insert(Message::Heard { asked, fate });
            }
            Message::Seal(epoch) if follows => {
                if self.has.is_some_and(|has| has + 1 == epoch) {
                    self.has = Some(epoch);
                }
                if self.has == Some(epoch) {
                    self.messages.insert(Message::Sealed(epoch));
                }
            }
            Message::Yield => {
                self.standby.yielded(self.has.is_some());
                if self.standby.fate() == Fate::Standing {
                    self.standby.end();
                }
                self.messages.insert(Message::Yielded { fate: of(&FATES, self.standby.fate()) });
            }
            Message::Taken { verdict } => {
                self.standby.witness_said(Some(VERDICTS[verdict as usize]), now);
            }
            _ => {}
        }
    }

    fn restart(&mut self, host: Host, broken: Broken) -> bool {
        match host {
            Host::Source => {
                let record = match self.source {
                    Source::Committed => SourceRecord::HandedOver,
                    Source::Copying | Source::Stopped => SourceRecord::Ours,
                    Source::Done | Source::Aborted => return false,
                };
                self.source = Source::recovered(record).0;
                self.is_witness_from_now(broken);
            }
            Host::Target => match self.target {
                Target::Receiving | Target::Discarded => {
                    self.target = Target::recovered(TargetRecord::Arriving, Waiting::Unfinished).0;
                }
                Target::Prepared => {
                    self.target = Target::recovered(TargetRecord::Arriving, Waiting::Whole).0;
                    self.restarted = true;
                }
                Target::Running => match &mut self.heir {
                    Some(heir) if heir.stand() == PrimaryStand::Guarded && !broken.goes_on => {
                        heir.give_up();
                    }
                    Some(heir) if heir.stand() == PrimaryStand::Guarded => {
                        *heir = Primary::begin(true, TERM);
                        heir.standby_is(Fate::Ended);
                    }
                    _ => return false,
                },
            },
            Host::Third => {
                if self.standby.fate() == Fate::TakenOver {
                    return false;
                }
                self.has = None;
                self.standby = Standby::begin(true, TERM, self.now());
                self.standby.end();
            }
        }
        true
    }

    /// Whether the machine comes to run somewhere if nothing fails from now on.
    fn heals(&self, broken: Broken) -> bool {
        let mut world = self.clone();
        world.messages.clear();
        for round in 0..4 * PATIENCE {
            world.ticks += STEP;
            let [_, heir, third] = world.seen(broken);
            // An heir whose source is gone lacks pages: that it is seen to run does not help.
            if third || (heir && world.dead != Some(Host::Source)) || world.source == Source::Aborted {
                return true;
            }
            if world.source == Source::Copying {
                return world.is_up(Host::Source);
            }
            // A move that does not come to its commit is given up.
            if world.is_up(Host::Source) && world.source == Source::Stopped && round > PATIENCE {
                world.source = world.source.step(SourceEvent::Failed).0;
            }
            let closes = world.dead == Some(Host::Third) || world.standby.fate() == Fate::Ended;
            let heir_lacks = world.dead == Some(Host::Source);
            for message in world.says(broken) {
                if message != Message::Close || closes {
                    world.deliver(&message, broken);
                }
            }
            while let Some(message) = world.messages.pop_first() {
                world.deliver(&message, broken);
            }
            if heir_lacks {
                world.pages_are_lost(broken);
            }
            if world.is_up(Host::Third) {
                // Who is asked in vain is asked again later.
                world.standby.witness_said(None, world.now());
                world.standby.tick(world.has.is_some(), world.now());
            }
        }
        false
    }

    fn pages_are_lost(&mut self, broken: Broken) -> bool {
        let now = self.now();
        let up = self.is_up(Host::Target) && self.target == Target::Running;
        match &mut self.heir {
            Some(heir) if up && !broken.waits && inherit::gives_up(heir, now) => heir.give_up(),
            _ => false,
        }
    }
}

impl Model for Inherited {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let now = Moment(Duration::ZERO);
        vec![World {
            ticks: 0,
            faults: 0,
            dead: None,
            unheard: false,
            source: Source::begin().0,
            sealed: false,
            ready: false,
            witness: self.broken.decides_early.then(|| Witness::new(Stand::Open, TERM, now)),
            target: Target::begin().0,
            restarted: false,
            heir: None,
            cut: 0,
            released: 0,
            standby: Standby::begin(true, TERM, now),
            voice: Voice::Filler,
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
            if world.standby.fate() == Fate::Asking {
                actions.push(Action::ThirdHearsNothing);
            }
        }
        if world.heir_stands() == Some(PrimaryStand::Guarded) {
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
                if next.standby.tick(next.has.is_some(), next.now()) != StandbyAction::AskWitness {
                    return None;
                }
            }
            Action::ThirdHearsNothing => drop(next.standby.witness_said(None, next.now())),
            Action::PagesAreLost => {
                next.faults += u8::from(world.dead != Some(Host::Source));
                if !next.pages_are_lost(self.broken) {
                    return None;
                }
            }
            Action::QemuDies => {
                next.faults += 1;
                let heir = next.heir.as_mut().filter(|heir| heir.stand() == PrimaryStand::Guarded)?;
                heir.give_up();
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
                world.standby.fate() != Fate::TakenOver || has_it
            }),
            Property::always(GOES_ON, |model: &Self, world: &World| {
                // What the witness has given to the third host ends with it, as a machine does with any host.
                let its_own = world.witness.is_some_and(|witness| witness.stand() == Stand::Taken)
                    || world.standby.fate() == Fate::TakenOver;
                let ended = world.standby.fate() == Fate::Ended || world.dead == Some(Host::Third);
                let ended_with_it = its_own && ended;
                // Closed, the protection is over: the machine is the target's alone, and nobody promises anything.
                let closed = world.witness.is_some_and(|witness| witness.stand() == Stand::Closed);
                world.unheard || closed || ended_with_it || world.faults > 1 || world.heals(model.broken)
            }),
            Property::sometimes("the target dies and the third host goes on", |_, world: &World| {
                world.dead == Some(Host::Target) && world.standby.fate() == Fate::TakenOver
            }),
            Property::sometimes("the source dies and the third host goes on", |_, world: &World| {
                world.dead == Some(Host::Source) && world.standby.fate() == Fate::TakenOver
            }),
            Property::sometimes("the third host dies and the target goes on", |_, world: &World| {
                world.dead == Some(Host::Third) && world.heir_stands() == Some(PrimaryStand::Alone)
            }),
            Property::sometimes("the third host takes over the state of the pause", |_, world: &World| {
                world.has == Some(0) && world.standby.fate() == Fate::TakenOver
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
