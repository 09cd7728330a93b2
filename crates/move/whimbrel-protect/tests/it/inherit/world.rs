//! The three hosts and what is under way between them: what each says, and what it does when something
//! arrives, fails or dies.

use crate::spoken::{Answer, Reply, TAKE, take_over};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_migrate::handover::{
    PausedIncoming, Source, SourceEvent, SourceRecord, Target, TargetEvent, TargetRecord,
};
use whimbrel_protect::{
    clock::BootTime,
    inherited_primary::{self, AcceptedPrimary},
    lease::{
        PrimaryLease, PrimaryState, StandbyLease, WitnessLease, WitnessQuery, WitnessReply, WitnessState,
    },
    protocol::StandbyOutcome,
};

pub(crate) const TERM: Duration = Duration::from_secs(4);
/// Units of a step.
pub(crate) const STEP: u64 = 2;
/// Rounds after which a move is given up.
const PATIENCE: u64 = 10;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) ticks: u64,
    pub(crate) faults: u8,
    pub(crate) dead: Option<Host>,
    /// The source is dead and the target had not heard its word.
    pub(crate) unheard: bool,
    pub(crate) source: Source,
    /// The standby has said that it is whole as of the pause.
    pub(crate) sealed: bool,
    /// The target has said that it is ready.
    pub(crate) ready: bool,
    pub(crate) witness: Option<WitnessLease>,
    pub(crate) target: Target,
    pub(crate) restarted: bool,
    pub(crate) heir: Option<PrimaryLease>,
    /// The last epoch that was cut, and the last whose output has left.
    pub(crate) cut: u8,
    pub(crate) released: u8,
    pub(crate) standby: StandbyLease,
    pub(crate) voice: AcceptedPrimary,
    /// The epoch that is whole at the third host.
    pub(crate) has: Option<u8>,
    pub(crate) messages: BTreeSet<Message>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Host {
    Source,
    Target,
    Third,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Message {
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
    Beat { asked: BootTime },
    Heard { asked: BootTime, fate: Reply },
    Renew { asked: BootTime },
    Renewed { asked: BootTime, verdict: Answer },
    Close,
    Closed { verdict: Answer },
    Seal(u8),
    Sealed(u8),
    Yield,
    Yielded { fate: Reply },
    // From the third host, and answers to it.
    Take,
    Taken { verdict: Answer },
}

/// What may be broken in the rules.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Broken {
    /// The source is the witness before it has committed.
    pub(crate) decides_early: bool,
    /// The source commits before the backup host has the state of the pause.
    pub(crate) commits_early: bool,
    /// The heir's output leaves when its epoch is cut.
    pub(crate) lets_out_early: bool,
    /// A restarted heir goes on as if nothing had been written.
    pub(crate) goes_on: bool,
    /// The heir runs without asking anybody.
    pub(crate) needs_no_lease: bool,
    /// The source never takes up being the witness.
    pub(crate) never_decides: bool,
    /// The heir waits for its pages for ever.
    pub(crate) waits: bool,
}

impl World {
    pub(crate) fn now(&self) -> BootTime {
        BootTime(Duration::from_secs(self.ticks))
    }

    pub(crate) fn is_up(&self, host: Host) -> bool {
        self.dead != Some(host)
    }

    pub(crate) fn heir_may_be_seen(&self, broken: Broken) -> bool {
        let may = self.heir.is_some_and(|heir| broken.needs_no_lease || heir.may_run(self.now()));
        self.is_up(Host::Target) && self.target.may_run() && may
    }

    pub(crate) fn seen(&self, broken: Broken) -> [bool; 3] {
        [
            self.is_up(Host::Source) && self.source.may_run(),
            self.heir_may_be_seen(broken),
            self.is_up(Host::Third) && self.standby.outcome() == StandbyOutcome::TakenOver,
        ]
    }

    pub(crate) fn heir_stands(&self) -> Option<PrimaryState> {
        self.heir.filter(|_| self.is_up(Host::Target)).map(|heir| heir.state())
    }

    pub(crate) fn has_given_up(&self) -> bool {
        matches!(self.heir_stands(), Some(PrimaryState::Yielded { .. }))
            && self.standby.outcome() != StandbyOutcome::TakenOver
    }

    /// What a host says again and again until it is answered, as things are.
    pub(crate) fn says(&self, broken: Broken) -> Vec<Message> {
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
            Some(PrimaryState::Protected) => {
                says.extend([Message::Beat { asked }, Message::Renew { asked }, Message::Close]);
                if self.cut > self.released {
                    says.push(Message::Seal(self.cut));
                }
            }
            Some(PrimaryState::Yielded { .. }) if self.has_given_up() => says.push(Message::Yield),
            _ => {}
        }
        if self.is_up(Host::Third) && self.standby.outcome() == StandbyOutcome::Asking {
            says.push(Message::Take);
        }
        says
    }

    pub(crate) fn deliver(&mut self, message: &Message, broken: Broken) {
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

    pub(crate) fn at_source(&mut self, message: &Message, broken: Broken) {
        let now = self.now();
        let mut ask = |question: &WitnessQuery| {
            let verdict = self
                .witness
                .as_mut()
                .map_or(WitnessReply::Unknown, |witness| witness.step(question, now).reply());
            Answer::of(verdict)
        };
        match *message {
            Message::Renew { asked } => {
                let verdict = ask(&WitnessQuery::Renew);
                self.messages.insert(Message::Renewed { asked, verdict });
            }
            Message::Close => {
                let verdict = ask(&WitnessQuery::Close);
                self.messages.insert(Message::Closed { verdict });
            }
            Message::Take => {
                let verdict = ask(&TAKE);
                self.messages.insert(Message::Taken { verdict });
            }
            Message::Filled => self.sealed = true,
            Message::Ready => self.ready = true,
            Message::Runs => self.source = self.source.step(SourceEvent::TargetRuns).0,
            Message::Forgot => self.source = self.source.step(SourceEvent::TargetDiscarded).0,
            _ => {}
        }
        if self.source == Source::Stopped && self.ready && (self.sealed || broken.commits_early) {
            self.source = self.source.step(SourceEvent::TargetReady).0.step(SourceEvent::Recorded).0;
            self.is_witness_from_now(broken);
        }
    }

    /// As of what is on the source's disk.
    pub(crate) fn is_witness_from_now(&mut self, broken: Broken) {
        let record = if self.source.may_run() { SourceRecord::Ours } else { SourceRecord::HandedOver };
        if inherited_primary::is_witness(record) && !broken.never_decides {
            let stand = self.witness.map_or(WitnessState::Open, |witness| witness.state());
            self.witness = Some(WitnessLease::new(stand, TERM, self.now()));
        }
    }

    pub(crate) fn at_target(&mut self, message: &Message, broken: Broken) {
        let now = self.now();
        match *message {
            Message::Finish => {
                self.target = self.target.step(TargetEvent::Finished).0;
                if self.target == Target::Prepared {
                    self.messages.insert(Message::Ready);
                }
            }
            Message::Commit => {
                let before = self.target;
                self.target = self.target.step(TargetEvent::Commit).0;
                if matches!(before, Target::Prepared | Target::PerhapsStarted)
                    && self.target == Target::Running
                {
                    let mut heir = PrimaryLease::initial(true, TERM);
                    if self.restarted && !broken.goes_on {
                        heir.yield_machine();
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
                heir.handle_heartbeat_reply(fate.heard(), asked);
            }
            Message::Renewed { asked, verdict } => {
                heir.handle_witness_reply(&WitnessQuery::Renew, verdict.verdict(), asked);
            }
            Message::Closed { verdict } => {
                heir.handle_witness_reply(&WitnessQuery::Close, verdict.verdict(), now);
            }
            Message::Yielded { fate } => heir.handle_yield_reply(fate.ended()),
            // An answer to an epoch that was given up is not waited for any more.
            Message::Sealed(epoch) if epoch == self.cut && heir.may_run(now) => {
                self.released = epoch;
            }
            _ => {}
        }
    }

    pub(crate) fn at_third(&mut self, message: &Message) {
        let now = self.now();
        let is_heir = !matches!(message, Message::Fill | Message::EndBySource);
        if !matches!(message, Message::Taken { .. }) {
            let (voice, heard) = self.voice.accept(is_heir);
            self.voice = voice;
            if !heard {
                return;
            }
        }
        let follows = self.standby.outcome() == StandbyOutcome::Standing;
        match *message {
            Message::Fill if follows => {
                // Sent again it is the same: the machine stands still.
                self.has = Some(0);
                self.messages.insert(Message::Filled);
            }
            Message::EndBySource => drop(self.standby.end(false)),
            Message::Beat { asked } => {
                let fate = Reply::of(self.standby.heartbeat(now));
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
                let action = self.standby.handle_yield(self.has.is_some());
                take_over(&mut self.standby, action, now);
                if self.standby.outcome() == StandbyOutcome::Standing {
                    self.standby.end(false);
                }
                self.messages.insert(Message::Yielded { fate: Reply::fate(self.standby.outcome()) });
            }
            Message::Taken { verdict } => {
                let action = self.standby.handle_witness_reply(Some(verdict.verdict()), now);
                take_over(&mut self.standby, action, now);
            }
            _ => {}
        }
    }

    pub(crate) fn restart(&mut self, host: Host, broken: Broken) -> bool {
        match host {
            Host::Source => {
                let record = match self.source {
                    // A move with a third host is never taken back.
                    Source::Committed | Source::TakingBack => SourceRecord::HandedOver,
                    Source::Copying | Source::Stopped | Source::Recording | Source::Reverting => {
                        SourceRecord::Ours
                    }
                    Source::Done | Source::Aborted => return false,
                };
                self.source = Source::recovered(record).0;
                self.is_witness_from_now(broken);
            }
            Host::Target => match self.target {
                Target::Receiving | Target::Discarded => {
                    self.target = Target::recovered(TargetRecord::Arriving, PausedIncoming::Unfinished).0;
                }
                Target::Prepared | Target::PerhapsStarted => {
                    self.target = Target::recovered(TargetRecord::Arriving, PausedIncoming::Complete).0;
                    self.restarted = true;
                }
                Target::Returned => return false,
                Target::Running => match &mut self.heir {
                    Some(heir) if heir.state() == PrimaryState::Protected && !broken.goes_on => {
                        heir.yield_machine();
                    }
                    Some(heir) if heir.state() == PrimaryState::Protected => {
                        *heir = PrimaryLease::initial(true, TERM);
                        heir.handle_outcome(StandbyOutcome::Ended);
                    }
                    _ => return false,
                },
            },
            Host::Third => {
                if self.standby.outcome() == StandbyOutcome::TakenOver {
                    return false;
                }
                self.has = None;
                self.standby = StandbyLease::initial(true, TERM, self.now());
                self.standby.end(false);
            }
        }
        true
    }

    /// Whether the machine comes to run somewhere if nothing fails from now on.
    pub(crate) fn heals(&self, broken: Broken) -> bool {
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
            let closes = world.dead == Some(Host::Third) || world.standby.outcome() == StandbyOutcome::Ended;
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
                // A witness that was not reached is asked again later.
                world.standby.handle_witness_reply(None, world.now());
                world.standby.tick(world.has.is_some(), world.now());
            }
        }
        false
    }

    pub(crate) fn pages_are_lost(&mut self, broken: Broken) -> bool {
        let now = self.now();
        let up = self.is_up(Host::Target) && self.target == Target::Running;
        match &mut self.heir {
            Some(heir) if up && !broken.waits && inherited_primary::yields(heir, now) => {
                heir.yield_machine();
                true
            }
            _ => false,
        }
    }
}
