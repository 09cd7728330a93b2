//! Daemon of the standby. It is not killed: what a standby has in memory ends with it, and with that the
//! protection.

use super::{Message, PRIMARY, STANDBY, TERM, WITNESS, World, delete, now, show};
use crate::{
    scenes::record,
    world::{draw, log, network},
};
use std::{thread, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{StandbyLease, StandbyLeaseAction, WitnessQuery},
};

const TICK: u64 = 300_000_000;
/// Nanoseconds after which the witness counts as not reached.
const PATIENCE: u64 = 2_000_000_000;
/// Loads of which some fail.
const LOADS_FAILING: u64 = 3;

struct Daemon<'a> {
    guests: &'a World,
    lease: StandbyLease,
    asked: u64,
    loads: u64,
}

pub(super) fn live(guests: &World) {
    let lease = StandbyLease::initial(true, TERM, BootTime::now());
    let mut daemon = Daemon { guests, lease, asked: 0, loads: 0 };
    while !guests.see(|guests| guests.over) {
        if let Some(message) = network::receive(STANDBY, now() + TICK)
            && let Some(message) = message.downcast_ref::<Message>()
        {
            daemon.handle_message(message);
        }
        let mut action = daemon.lease.tick(true, BootTime::now());
        if now().saturating_sub(daemon.asked) > PATIENCE && action == StandbyLeaseAction::Nothing {
            daemon.asked = u64::MAX / 2;
            action = daemon.lease.handle_witness_reply(None, BootTime::now());
        }
        daemon.carry_out(action);
    }
}

impl Daemon<'_> {
    fn handle_message(&mut self, message: &Message) {
        let time = BootTime::now();
        match message {
            Message::Heartbeat { asked } => {
                let reply = self.lease.heartbeat(time);
                network::send(STANDBY, PRIMARY, Message::Heard { reply, asked: *asked });
            }
            Message::Answer { query: WitnessQuery::TakeOver { .. }, reply, .. } => {
                let action = self.lease.handle_witness_reply(Some(*reply), time);
                self.carry_out(action);
            }
            Message::Yield => {
                let action = self.lease.handle_yield(true);
                self.carry_out(action);
                let outcome = self.lease.outcome();
                network::send(STANDBY, PRIMARY, Message::Yielded { outcome });
            }
            Message::End => {
                let action = self.lease.end(false);
                self.carry_out(action);
                let outcome = self.lease.outcome();
                network::send(STANDBY, PRIMARY, Message::Ended { outcome });
            }
            _ => {}
        }
    }

    fn carry_out(&mut self, mut action: StandbyLeaseAction) {
        loop {
            action = match action {
                StandbyLeaseAction::Nothing => return,
                StandbyLeaseAction::AskWitness => {
                    self.asked = now();
                    let query = WitnessQuery::TakeOver { yielded: false };
                    network::send(
                        STANDBY,
                        WITNESS,
                        Message::Ask { from: STANDBY, query, asked: BootTime::now() },
                    );
                    return;
                }
                StandbyLeaseAction::Load => {
                    self.loads += 1;
                    thread::sleep(Duration::from_millis(100 + draw(900)));
                    let fails = self.loads <= LOADS_FAILING && draw(3) == 0;
                    log(if fails { "the machine cannot be loaded" } else { "the machine is loaded" });
                    self.lease.handle_loaded(!fails, BootTime::now())
                }
                StandbyLeaseAction::Record => {
                    while record::write(STANDBY, "machine", &true).is_err() {
                        thread::sleep(Duration::from_millis(300));
                    }
                    self.lease.handle_recorded()
                }
                StandbyLeaseAction::Run => {
                    self.guests.see(|guests| guests.standby_runs = true);
                    show(self.guests, STANDBY, true);
                    return;
                }
                StandbyLeaseAction::Retain | StandbyLeaseAction::Discard => {
                    if self.guests.see(|guests| guests.standby_has) {
                        delete(self.guests, STANDBY);
                    }
                    return;
                }
            };
        }
    }
}
