//! Daemon of the source: does what the state machine of the handover says, with records on a simulated
//! disk.

use super::{HOSTS, Message, Owner, Paused, SOURCE, SourceDisk, TARGET, What, World, runs};
use crate::{
    scenes::record,
    world::{draw, network, with},
};
use std::{collections::BTreeMap, thread, time::Duration};
use whimbrel_migrate::handover::{AbortedAction, CommittedAction, Source, SourceAction, SourceEvent};

/// Attempts of the user to move the machine.
const ATTEMPTS: u64 = 3;
/// Nanoseconds after which an unanswered attempt has failed, or a message is repeated.
const PATIENCE: u64 = 2_000_000_000;
const TICK: u64 = 200_000_000;

struct Attempt {
    mind: Source,
    connection: Option<[u64; 2]>,
    since: u64,
}

struct Daemon<'a> {
    guests: &'a World,
    disk: SourceDisk,
    attempts: BTreeMap<u64, Attempt>,
}

fn now() -> u64 {
    with(|world| world.schedule.now)
}

/// Runs until it is killed, or the scene is over.
pub(super) fn live(guests: &World) {
    let disk: SourceDisk = record::read(SOURCE, "machine");
    let mut daemon = Daemon { guests, disk, attempts: BTreeMap::new() };
    daemon.recover();
    while !guests.see(|guests| guests.over) {
        daemon.begin();
        if let Some(message) = network::receive(SOURCE, now() + TICK)
            && let Some(message) = message.downcast_ref::<Message>()
        {
            daemon.handle_message(*message);
        }
        daemon.lose_patience();
    }
}

impl Daemon<'_> {
    fn recover(&mut self) {
        if self.disk.owner == Owner::Gone {
            self.end_qemu();
        }
        let last = self.guests.see(|guests| guests.attempts);
        for attempt in 0..=last {
            if let Some(record) = self.disk.of(attempt) {
                self.act(attempt, None, Source::recovered(record));
            }
        }
    }

    /// The user moves the machine, again if it failed.
    fn begin(&mut self) {
        let idle = self.attempts.values().all(|attempt| attempt.mind == Source::Aborted);
        let may = self.guests.see(|guests| {
            guests.attempts < ATTEMPTS && guests.source == Some(Paused(false)) && guests.starts[TARGET] > 0
        });
        if !idle || !may || self.disk.owner != Owner::Ours || draw(8) > 0 {
            return;
        }
        let (attempt, connection) = self.guests.see(|guests| {
            guests.attempts += 1;
            (guests.attempts, guests.starts)
        });
        self.act(attempt, Some(connection), Source::initial());
    }

    fn handle_message(&mut self, message: Message) {
        let Some(attempt) = self.attempts.get(&message.attempt) else { return };
        let is_open = attempt.connection == Some(message.connection);
        let event = match message.what {
            What::Accepted if is_open => SourceEvent::RoundsOver,
            What::Ready if is_open => SourceEvent::TargetReady,
            What::Runs => SourceEvent::TargetRuns,
            What::NeverRan => SourceEvent::TargetNeverRan,
            What::Discarded => SourceEvent::TargetDiscarded,
            _ => return,
        };
        self.step(message.attempt, event);
    }

    fn lose_patience(&mut self) {
        let late = |attempt: &Attempt| now() - attempt.since > PATIENCE && attempt.mind != Source::Done;
        let known = |id: &u64| self.disk.begun.contains(id) || self.disk.owner == Owner::HandedOver(*id);
        let late: Vec<u64> = self
            .attempts
            .iter()
            .filter(|(id, attempt)| late(attempt) && (known(id) || attempt.mind != Source::Aborted))
            .map(|(id, _)| *id)
            .collect();
        late.into_iter().for_each(|attempt| self.step(attempt, SourceEvent::Failed));
    }

    fn step(&mut self, id: u64, event: SourceEvent) {
        let Some(attempt) = self.attempts.get(&id) else { return };
        let connection = attempt.connection.filter(|_| event != SourceEvent::Failed);
        let next = attempt.mind.step(event);
        self.act(id, connection, next);
    }

    fn act(&mut self, id: u64, connection: Option<[u64; 2]>, (mind, actions): (Source, &[SourceAction])) {
        self.attempts.insert(id, Attempt { mind, connection, since: now() });
        for action in actions {
            let result = self.carry_out(id, *action);
            if let Some(event) = result {
                return self.step(id, event);
            }
        }
    }

    /// Does one action. What follows from it, if that is an event.
    fn carry_out(&mut self, id: u64, action: SourceAction) -> Option<SourceEvent> {
        match action {
            SourceAction::RecordAndOffer => {
                // A record whose write failed may be on the disk, so the attempt has begun in any case.
                self.disk.begun.insert(id);
                if !self.write(self.disk.clone()) {
                    return Some(SourceEvent::Failed);
                }
                self.send(id, What::Offer);
            }
            SourceAction::Pause => {
                self.pause(true);
                self.send(id, What::Last);
            }
            SourceAction::RecordHandover => return Some(self.record(Owner::HandedOver(id))),
            SourceAction::RecordOurs | SourceAction::Committed(CommittedAction::RecordOurs) => {
                let event = self.record(Owner::Ours);
                if event == SourceEvent::Failed {
                    // Paused and silent until it is durable.
                    thread::sleep(Duration::from_millis(500));
                }
                return Some(event);
            }
            SourceAction::ResumeHere | SourceAction::Committed(CommittedAction::ResumeHere) => {
                self.pause(false)
            }
            SourceAction::Committed(CommittedAction::SendCommit) => self.send(id, What::Commit),
            SourceAction::Committed(CommittedAction::FreeMachine) => {
                while !self.write(SourceDisk { owner: Owner::Gone, ..SourceDisk::default() }) {
                    thread::sleep(Duration::from_millis(500));
                }
                self.end_qemu();
            }
            SourceAction::Aborted(AbortedAction::SendAbort) => self.send(id, What::Abort),
            SourceAction::Aborted(AbortedAction::RemoveRecord) => {
                let mut disk = self.disk.clone();
                disk.begun.remove(&id);
                self.write(disk);
            }
        }
        None
    }

    fn record(&mut self, owner: Owner) -> SourceEvent {
        match self.write(SourceDisk { owner, ..self.disk.clone() }) {
            true => SourceEvent::Recorded,
            false => SourceEvent::Failed,
        }
    }

    /// Replaces the record. Whether that is durable; if not, either may be on the disk.
    fn write(&mut self, disk: SourceDisk) -> bool {
        let is_written = record::write(SOURCE, "machine", &disk).is_ok();
        if is_written {
            self.disk = disk;
        }
        is_written
    }

    fn pause(&self, pause: bool) {
        let goes_on = self.guests.see(|guests| {
            let qemu = guests.source.as_mut();
            let before = qemu.map(|qemu| std::mem::replace(qemu, Paused(pause)));
            if pause {
                guests.machine.stops(HOSTS[SOURCE]);
            }
            before.is_some() && !pause
        });
        if goes_on {
            runs(self.guests, SOURCE);
        }
    }

    fn end_qemu(&self) {
        self.guests.see(|guests| {
            guests.source = None;
            guests.machine.stops(HOSTS[SOURCE]);
        });
    }

    fn send(&self, attempt: u64, what: What) {
        let connection = self.attempts.get(&attempt).and_then(|attempt| attempt.connection);
        let connection = connection.unwrap_or_default();
        network::send(SOURCE, TARGET, Message { attempt, connection, what });
    }
}
