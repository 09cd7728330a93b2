//! Daemon of the witness.

use super::{Message, TERM, WITNESS, World, now};
use crate::{scenes::record, world::network};
use std::{thread, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{WitnessAction, WitnessLease, WitnessState},
};

const TICK: u64 = 1_000_000_000;

pub(super) fn live(guests: &World) {
    let state: Option<WitnessState> = record::read(WITNESS, "protection");
    let mut lease = WitnessLease::new(state.unwrap_or(WitnessState::Open), TERM, BootTime::now());
    while !guests.see(|guests| guests.over) {
        let Some(message) = network::receive(WITNESS, now() + TICK) else { continue };
        let Some(Message::Ask { from, query, asked }) = message.downcast_ref::<Message>() else { continue };
        let action = lease.step(query, BootTime::now());
        if let WitnessAction::Record(state) = action {
            // Nobody hears of a change before it is durable.
            while record::write(WITNESS, "protection", &Some(state)).is_err() {
                thread::sleep(Duration::from_millis(300));
            }
        }
        let answer = Message::Answer { query: query.clone(), reply: action.reply(), asked: *asked };
        network::send(WITNESS, *from, answer);
    }
}
