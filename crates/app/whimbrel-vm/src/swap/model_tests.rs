//! Every order of messages, losses, deaths, failures and delays, of both sides together.

use super::{Knowledge, NewAction, NewEvent, NewSide, OldAction, OldEvent, OldSide};
use std::collections::{HashSet, VecDeque};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Message {
    Offer,
    Ready,
    State,
    Prepared,
    Yours,
    Running,
    Refusal,
    Withdrawn,
}

/// Both processes, what is between them, and the guest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    old: OldSide,
    new: NewSide,
    old_lives: bool,
    new_lives: bool,
    killed: bool,
    to_new: VecDeque<Message>,
    to_old: VecDeque<Message>,
    guest_runs: bool,
    /// Whether the offer reached a living new process.
    offered: bool,
    /// Pages were written since the old process last took its dirty sets, as only it would see.
    written_under_old: bool,
    /// Pages were written, or sets taken, under the new process.
    written_under_new: bool,
}

impl World {
    fn start() -> Self {
        Self {
            old: OldSide::Offered,
            new: NewSide::Waiting,
            old_lives: true,
            new_lives: true,
            killed: false,
            to_new: VecDeque::from([Message::Offer]),
            to_old: VecDeque::new(),
            guest_runs: true,
            offered: false,
            written_under_old: true,
            written_under_new: false,
        }
    }

    fn old_has(&self) -> bool {
        self.old_lives && self.old.may_touch()
    }

    fn new_has(&self) -> bool {
        self.new_lives && self.new.may_touch()
    }

    fn old_event(mut self, event: OldEvent) -> Self {
        match self.old.on(event) {
            None => {}
            Some(OldAction::StopAndSend) => {
                assert!(self.old_has(), "it stops the guest of another: {self:?}");
                (self.guest_runs, self.written_under_old) = (false, false);
                self.to_new.push_back(Message::State);
            }
            Some(OldAction::SendYours) => self.to_new.push_back(Message::Yours),
            Some(OldAction::Withdraw) => {
                self.to_new.push_back(Message::Withdrawn);
                return self.old_event(OldEvent::Withdrew);
            }
            Some(OldAction::KillPeer) => self.killed = true,
            Some(OldAction::GoOn { stopped, knowledge }) => {
                let is_told = self.new == NewSide::Over || self.to_new.contains(&Message::Withdrawn);
                assert!(self.old_has() && (!self.new_lives || is_told), "{self:?}");
                assert!(stopped || self.guest_runs, "a guest is forgotten: {self:?}");
                let lost = self.written_under_new;
                assert!(knowledge == Knowledge::Lost || !lost, "dirty pages are lost: {self:?}");
                (self.guest_runs, self.written_under_old) = (true, true);
            }
            Some(OldAction::End) => self.old_lives = false,
        }
        self
    }

    fn new_event(mut self, event: NewEvent) -> Self {
        match self.new.on(event) {
            None => {}
            Some(NewAction::SendReady) => {
                self.offered = true;
                self.to_old.push_back(Message::Ready);
            }
            Some(NewAction::SendPrepared) => self.to_old.push_back(Message::Prepared),
            Some(NewAction::TakeUp(knowledge)) => {
                assert!(self.new_has() && !self.old_has(), "{self:?}");
                let lost = self.written_under_old;
                assert!(knowledge == Knowledge::Lost || !lost, "dirty pages are lost: {self:?}");
                (self.guest_runs, self.written_under_new) = (true, true);
                self.to_old.push_back(Message::Running);
            }
            // It may live on, as a daemon does.
            Some(NewAction::Refuse) => self.to_old.push_back(Message::Refusal),
            Some(NewAction::End) => {}
        }
        self
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut next = self.clone();
        change(&mut next);
        next
    }

    /// What may happen next without a fault.
    fn steps(&self) -> Vec<Self> {
        let mut next = Vec::new();
        if self.old_lives && !self.to_old.is_empty() {
            let mut world = self.clone();
            let event = match world.to_old.pop_front() {
                Some(Message::Ready) => OldEvent::Ready,
                Some(Message::Prepared) => OldEvent::Prepared,
                Some(Message::Running) => OldEvent::Running,
                Some(Message::Refusal) => OldEvent::Refused,
                _ => OldEvent::Wrong,
            };
            next.push(world.old_event(event));
        }
        if self.new_lives && !self.to_new.is_empty() {
            let mut world = self.clone();
            let event = match world.to_new.pop_front() {
                Some(Message::Offer) => NewEvent::Offer,
                Some(Message::State) => NewEvent::State,
                Some(Message::Yours) => NewEvent::Yours,
                Some(Message::Withdrawn) => NewEvent::Withdrawn,
                _ => NewEvent::Failed,
            };
            next.push(world.new_event(event));
        }
        // The end of the other is noticed at any time after it, also before what it sent last. But not before
        // it was read that the machine is withdrawn: the channel returns what was sent first.
        let is_withdrawn = self.to_new.contains(&Message::Withdrawn);
        if self.old_lives && !self.new_lives && !matches!(self.old, OldSide::Kept | OldSide::Gone) {
            next.push(self.clone().old_event(OldEvent::PeerEnded));
        }
        if self.new_lives
            && !self.old_lives
            && !is_withdrawn
            && !matches!(self.new, NewSide::Has | NewSide::Over)
        {
            next.push(self.clone().new_event(NewEvent::PeerEnded));
        }
        if self.new_lives && self.killed {
            let mut world = self.clone();
            world.new_lives = false;
            next.push(world);
        }
        // A clock runs out at any time, also while the answer is under way.
        if self.old_lives && matches!(self.old, OldSide::Offered | OldSide::Stopped | OldSide::Gave) {
            next.push(self.clone().old_event(OldEvent::Late));
        }
        next
    }

    /// Losses, deaths and failures; as many in one history as it has room for.
    fn faults(&self) -> Vec<Self> {
        let own = self.old_lives && matches!(self.old, OldSide::Offered | OldSide::Stopped);
        let taking = self.new_lives && !matches!(self.new, NewSide::Has | NewSide::Over);
        let lose = |queue: &mut VecDeque<Message>| {
            queue.pop_front();
        };
        let all = [
            (self.old_lives, self.with(|world| world.old_lives = false)),
            (self.new_lives, self.with(|world| world.new_lives = false)),
            (!self.to_old.is_empty(), self.with(|world| lose(&mut world.to_old))),
            // No packet is lost between two processes of a host. That the others may be is only caution.
            (
                self.to_new.front().is_some_and(|first| *first != Message::Withdrawn),
                self.with(|world| lose(&mut world.to_new)),
            ),
        ];
        let mut next: Vec<_> = all.into_iter().filter_map(|(may, world)| may.then_some(world)).collect();
        next.extend(own.then(|| self.clone().old_event(OldEvent::Failed)));
        next.extend(taking.then(|| self.clone().new_event(NewEvent::Failed)));
        next
    }

    /// What must hold at every instant.
    fn check(&self) {
        assert!(!(self.old_has() && self.new_has()), "two have the machine: {self:?}");
        if self.new_has() && self.old_lives {
            assert!(!self.old.may_touch());
        }
    }

    /// What must hold once nothing more happens.
    fn check_end(&self) {
        // Whoever ended with the machine, or before it had offered it, leaves it to an adoption.
        if !self.old_lives && (!self.new_lives || !self.offered || self.new == NewSide::Over) {
            return;
        }
        assert!(self.old_has() || self.new_has(), "nobody has the machine: {self:?}");
        assert!(self.guest_runs, "the guest stands still: {self:?}");
    }
}

#[test]
fn at_every_instant_at_most_one_has_the_machine_and_in_the_end_one_that_lives_does() {
    let (mut seen, mut open) = (HashSet::from([World::start()]), vec![World::start()]);
    let (mut kept, mut passed) = (0, 0);
    while let Some(world) = open.pop() {
        world.check();
        let steps = world.steps();
        if steps.is_empty() {
            world.check_end();
            (kept, passed) = (kept + u32::from(world.old_has()), passed + u32::from(world.new_has()));
        }
        for next in steps.into_iter().chain(world.faults()) {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    assert!(kept > 0 && passed > 0, "the walk ended early: {kept} kept, {passed} passed");
    let ending = OldSide::Ending { gave: true, stopped: true };
    for side in [OldSide::Kept, OldSide::Gone, ending] {
        assert!(seen.iter().any(|world| world.old == side), "{side:?} is never reached");
    }
    for side in [NewSide::Has, NewSide::Over] {
        assert!(seen.iter().any(|world| world.new == side), "{side:?} is never reached");
    }
}

#[test]
fn without_a_fault_and_a_delay_the_machine_passes() {
    let mut world = World::start();
    while let Some(next) = world.steps().into_iter().next().filter(|_| world.old_lives) {
        world = next;
    }
    assert!(world.new_has() && !world.old_lives && world.guest_runs);
}
