//! Daemon of the target: does what the state machine of the handover says, with a record on a simulated
//! disk.

use super::{HOSTS, Message, SOURCE, Slot, TARGET, TargetDisk, What, World, runs};
use crate::{
    scenes::record,
    world::{network, with},
};
use std::{collections::BTreeMap, thread, time::Duration};
use whimbrel_migrate::handover::{PausedIncoming, Target, TargetAction, TargetEvent};

/// Nanoseconds of silence after which the connection counts as lost.
const PATIENCE: u64 = 5_000_000_000;
const TICK: u64 = 500_000_000;

struct Attempt {
    mind: Target,
    connection: Option<[u64; 2]>,
    since: u64,
}

struct Daemon<'a> {
    guests: &'a World,
    disk: TargetDisk,
    attempts: BTreeMap<u64, Attempt>,
}

fn now() -> u64 {
    with(|world| world.schedule.now)
}

/// Runs until it is killed, or the scene is over.
pub(super) fn live(guests: &World) {
    let mut daemon = Daemon { guests, disk: record::read(TARGET, "machine"), attempts: BTreeMap::new() };
    daemon.recover();
    while !guests.see(|guests| guests.over) {
        if let Some(message) = network::receive(TARGET, now() + TICK)
            && let Some(message) = message.downcast_ref::<Message>()
        {
            daemon.handle_message(*message);
        }
        daemon.lose_patience();
    }
}

impl Daemon<'_> {
    fn recover(&mut self) {
        let slot = self.guests.see(|guests| guests.target);
        let Some((attempt, record)) = self.disk.record() else {
            // A runtime directory that no record owns is removed.
            return self.end_qemu();
        };
        let waiting = match slot {
            Slot::Filling | Slot::Loaded => PausedIncoming::Unfinished,
            Slot::Marked | Slot::Running => PausedIncoming::Complete,
            Slot::Nothing => PausedIncoming::Gone,
        };
        self.act(attempt, None, Target::recovered(record, waiting));
    }

    fn handle_message(&mut self, message: Message) {
        let id = message.attempt;
        let start = self.guests.see(|guests| guests.starts[TARGET]);
        let is_open = message.connection[TARGET] == start;
        let mind = self.attempts.get(&id).map(|attempt| attempt.mind);
        match (message.what, mind) {
            (What::Offer, None) if is_open && self.is_free() => {
                self.act(id, Some(message.connection), Target::initial());
            }
            (What::Last, Some(Target::Receiving)) if is_open => {
                let is_filling = self.guests.see(|guests| guests.target == Slot::Filling);
                self.step(id, if is_filling { TargetEvent::Finished } else { TargetEvent::Failed });
            }
            (What::Commit, Some(_)) => {
                let has_ended = self.guests.see(|guests| guests.target == Slot::Nothing);
                self.step(id, if has_ended { TargetEvent::CommitOfEnded } else { TargetEvent::Commit });
            }
            (What::Abort, Some(_)) => self.step(id, TargetEvent::Abort),
            (What::Abort, None) => self.act(id, None, Target::discard_unknown()),
            _ => {}
        }
    }

    /// Whether the machine's name is free here.
    fn is_free(&self) -> bool {
        self.disk == TargetDisk::Nothing
            && self.attempts.values().all(|attempt| attempt.mind == Target::Discarded)
    }

    fn lose_patience(&mut self) {
        let lost = |attempt: &Attempt| attempt.connection.is_some() && now() - attempt.since > PATIENCE;
        let lost: Vec<u64> = self.attempts.iter().filter(|(_, a)| lost(a)).map(|(id, _)| *id).collect();
        for id in lost {
            self.step(id, TargetEvent::Failed);
            self.attempts.entry(id).and_modify(|attempt| attempt.connection = None);
        }
    }

    fn step(&mut self, id: u64, event: TargetEvent) {
        let Some(attempt) = self.attempts.get(&id) else { return };
        let (connection, next) = (attempt.connection, attempt.mind.step(event));
        self.act(id, connection, next);
    }

    fn act(&mut self, id: u64, connection: Option<[u64; 2]>, (mind, actions): (Target, &[TargetAction])) {
        self.attempts.insert(id, Attempt { mind, connection, since: now() });
        for action in actions {
            if !self.carry_out(id, *action) {
                return self.step(id, TargetEvent::Failed);
            }
        }
    }

    /// Does one action. Whether that went well.
    fn carry_out(&mut self, id: u64, action: TargetAction) -> bool {
        match action {
            TargetAction::ReserveAndAccept => {
                self.guests.see(|guests| guests.target = Slot::Filling);
                if record::write(TARGET, "machine", &TargetDisk::Arriving(id)).is_err() {
                    return false;
                }
                self.disk = TargetDisk::Arriving(id);
                self.send(id, What::Accepted);
            }
            TargetAction::LoadAndConfirmReady => {
                self.move_on(Slot::Filling, Slot::Loaded);
                thread::sleep(Duration::from_millis(30));
                self.move_on(Slot::Loaded, Slot::Marked);
                self.send(id, What::Ready);
            }
            TargetAction::RunAndConfirm => {
                if self.guests.see(|guests| guests.target != Slot::Nothing) {
                    self.guests.see(|guests| guests.target = Slot::Running);
                    runs(self.guests, TARGET);
                }
                self.must_write(TargetDisk::Ours(id));
                self.send(id, What::Runs);
            }
            TargetAction::ConfirmRunning => self.send(id, What::Runs),
            TargetAction::RecordNeverRan => {
                self.must_write(TargetDisk::NeverRan(id));
                self.send(id, What::NeverRan);
            }
            TargetAction::ConfirmNeverRan => self.send(id, What::NeverRan),
            TargetAction::Discard => {
                self.end_qemu();
                self.must_write(TargetDisk::Nothing);
                self.send(id, What::Discarded);
            }
            TargetAction::ConfirmDiscarded => self.send(id, What::Discarded),
        }
        true
    }

    fn move_on(&self, from: Slot, to: Slot) {
        self.guests.see(|guests| {
            if guests.target == from {
                guests.target = to;
            }
        });
    }

    /// Nothing is answered before the record is durable.
    fn must_write(&mut self, disk: TargetDisk) {
        while record::write(TARGET, "machine", &disk).is_err() {
            thread::sleep(Duration::from_millis(500));
        }
        self.disk = disk;
    }

    fn end_qemu(&self) {
        self.guests.see(|guests| {
            guests.target = Slot::Nothing;
            guests.machine.stops(HOSTS[TARGET]);
        });
    }

    fn send(&self, attempt: u64, what: What) {
        let connection = self.attempts.get(&attempt).and_then(|attempt| attempt.connection);
        let connection = connection.unwrap_or_default();
        network::send(TARGET, SOURCE, Message { attempt, connection, what });
    }
}
