//! Daemon of the primary: renews its lease, hears the standby's promises, and settles who has the machine
//! once it cannot go on. A thread of its own lets the machine be seen for as long as the lease says.

use super::{Message, PRIMARY, STANDBY, TERM, WITNESS, World, delete, now, show};
use crate::{
    report::violation,
    scenes::record,
    world::{draw, network, processes::Shared},
};
use serde::{Deserialize, Serialize};
use std::{thread, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{PrimaryLease, PrimaryLeaseAction, PrimaryState, WitnessQuery},
};

const TICK: u64 = 700_000_000;
/// How often the lease is looked at.
const WATCH: Duration = Duration::from_millis(50);
/// Nanoseconds without a promise after which the primary wants to go on alone.
const PATIENCE: u64 = 20_000_000_000;

/// The durable state of the primary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    #[default]
    New,
    Protected,
    Yielded,
    Alone,
    Gone,
}

struct Daemon<'a> {
    guests: &'a World,
    lease: Shared<PrimaryLease>,
    stage: Stage,
    promised: u64,
}

pub(super) fn live(guests: &World) {
    let stage: Stage = record::read(PRIMARY, "machine");
    let mut lease = match stage {
        Stage::New => PrimaryLease::initial(true, TERM),
        _ => PrimaryLease::recovered(true, TERM),
    };
    if stage == Stage::Yielded || !guests.see(|guests| guests.primary_has) {
        lease.yield_machine();
    }
    let lease = Shared::new(lease);
    let mut daemon = Daemon { guests, lease: lease.clone(), stage, promised: now() };
    if stage == Stage::New {
        daemon.record(Stage::Protected);
    }
    thread::scope(|scope| {
        scope.spawn(|| watch(guests, &lease));
        daemon.serve();
    });
}

/// Lets the machine be seen for as long as that is allowed.
fn watch(guests: &World, lease: &Shared<PrimaryLease>) {
    while !guests.see(|guests| guests.over) {
        let time = BootTime::now();
        let may = lease.see(|lease| lease.may_run(time)) && guests.see(|guests| guests.primary_has);
        show(guests, PRIMARY, may);
        thread::sleep(WATCH);
    }
}

impl Daemon<'_> {
    fn serve(&mut self) {
        while !self.guests.see(|guests| guests.over) {
            let deadline = now() + TICK;
            while let Some(message) = network::receive(PRIMARY, deadline) {
                message
                    .downcast_ref::<Message>()
                    .into_iter()
                    .for_each(|message| self.handle_message(message));
            }
            if !self.guests.see(|guests| guests.primary_has) {
                self.lease.see(PrimaryLease::yield_machine);
            }
            let is_protected = self.lease.see(|lease| lease.state()) == PrimaryState::Protected;
            let has_copy = self.guests.see(|guests| guests.primary_has);
            if is_protected && has_copy {
                let asked = BootTime::now();
                self.ask(WitnessQuery::Renew, asked);
                network::send(PRIMARY, STANDBY, Message::Heartbeat { asked });
            }
            if !is_protected || now() - self.promised > PATIENCE {
                self.find_owner();
            }
        }
    }

    fn handle_message(&mut self, message: &Message) {
        match message {
            Message::Answer { query, reply, asked } => {
                self.lease.see(|lease| lease.handle_witness_reply(query, *reply, *asked));
            }
            Message::Heard { reply, asked } => {
                self.promised = now();
                self.lease.see(|lease| lease.handle_heartbeat_reply(*reply, *asked));
            }
            Message::Yielded { outcome } => {
                self.lease.see(|lease| lease.handle_yield_reply(Some(*outcome)));
            }
            Message::Ended { outcome } => {
                self.lease.see(|lease| lease.handle_take_back_reply(Some(*outcome)));
            }
            _ => {}
        }
    }

    /// Finds out who has the machine.
    fn find_owner(&mut self) {
        let (time, has_copy) = (BootTime::now(), self.guests.see(|guests| guests.primary_has));
        match self.lease.see(|lease| lease.next_action(true, has_copy, time)) {
            PrimaryLeaseAction::RunHere => self.record(Stage::Alone),
            PrimaryLeaseAction::Retire => self.retire(has_copy),
            PrimaryLeaseAction::Ask | PrimaryLeaseAction::AskFenced if has_copy => {
                self.guests.see(|guests| guests.asked_to_keep = true);
                self.ask(WitnessQuery::Close, time);
                if draw(2) == 0 {
                    network::send(PRIMARY, STANDBY, Message::End);
                }
            }
            PrimaryLeaseAction::Ask | PrimaryLeaseAction::AskFenced => {}
            PrimaryLeaseAction::Yield => {
                self.record(Stage::Yielded);
                network::send(PRIMARY, STANDBY, Message::Yield);
            }
            PrimaryLeaseAction::TakeBack if has_copy => {
                self.guests.see(|guests| guests.asked_to_keep = true);
                network::send(PRIMARY, STANDBY, Message::End);
            }
            PrimaryLeaseAction::TakeBack => {
                if !self.guests.see(|guests| guests.standby_has) {
                    violation("acknowledged_exists", "neither side has a copy of the machine");
                }
                self.lease.see(|lease| lease.handle_take_back_reply(None));
            }
        }
    }

    fn retire(&mut self, has_copy: bool) {
        if has_copy {
            show(self.guests, PRIMARY, false);
            delete(self.guests, PRIMARY);
        }
        self.record(Stage::Gone);
    }

    fn ask(&self, query: WitnessQuery, asked: BootTime) {
        network::send(PRIMARY, WITNESS, Message::Ask { from: PRIMARY, query, asked });
    }

    /// Records a stage durably, once.
    fn record(&mut self, stage: Stage) {
        while self.stage != stage {
            match record::write(PRIMARY, "machine", &stage) {
                Ok(()) => self.stage = stage,
                Err(_) => thread::sleep(Duration::from_millis(300)),
            }
        }
    }
}
