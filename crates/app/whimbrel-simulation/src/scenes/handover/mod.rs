//! Scene: a machine is moved from one host to another, by the program's own state machines. Messages are
//! lost, late and repeated; either daemon is killed at any call, either host loses power; records fail. In
//! the end the machine is one host's, and at no instant did it run on both.

mod source;
mod target;

use crate::{
    report::violation,
    rules::{
        comes_back,
        one_runs::{self, MachineWatch},
    },
    world::{
        draw,
        faults::Rates,
        log, network,
        processes::{self, Running, Shared},
        with,
    },
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, thread, time::Duration};
use whimbrel_migrate::handover::{SourceRecord, TargetRecord};

const SOURCE: usize = 0;
const TARGET: usize = 1;
const HOSTS: [&str; 2] = ["source", "target"];
/// Rounds of trouble.
const ROUNDS: u64 = 3;
/// Time in which the outcome must be known once nothing fails.
const HEALS: Duration = Duration::from_secs(600);

/// What one host says to the other about an attempt to move the machine.
#[derive(Debug, Clone, Copy)]
enum What {
    /// Over the connection of the pages, which ends with either daemon.
    Offer,
    Accepted,
    Last,
    Ready,
    /// Over any connection, at any time.
    Commit,
    Runs,
    NeverRan,
    Abort,
    Discarded,
}

#[derive(Debug, Clone, Copy)]
struct Message {
    attempt: u64,
    /// Starts of the two daemons between which the connection was made.
    connection: [u64; 2],
    what: What,
}

/// The durable record of the source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SourceDisk {
    owner: Owner,
    /// Attempts that have begun and whose outcome the target may not know.
    begun: BTreeSet<u64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Owner {
    #[default]
    Ours,
    HandedOver(u64),
    Gone,
}

/// The durable record of the target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum TargetDisk {
    #[default]
    Nothing,
    Arriving(u64),
    NeverRan(u64),
    Ours(u64),
}

/// QEMUs of both hosts, which outlive their daemons, and what the rules look at.
#[derive(Debug)]
struct Guests {
    machine: MachineWatch,
    /// None after it has ended.
    source: Option<Paused>,
    target: Slot,
    starts: [u64; 2],
    attempts: u64,
    /// Whether the daemons may rest: the outcome is looked at.
    over: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Paused(bool);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Nothing,
    Filling,
    Loaded,
    Marked,
    Running,
}

type World = Shared<Guests>;

/// The machine runs on a host from now on.
fn runs(guests: &World, host: usize) {
    let seen = guests.see(|guests| guests.machine.runs(HOSTS[host]));
    one_runs::demand(seen);
}

pub(crate) fn run() {
    let guests = Shared::new(Guests {
        machine: MachineWatch::default(),
        source: Some(Paused(false)),
        target: Slot::Nothing,
        starts: [0; 2],
        attempts: 0,
        over: false,
    });
    runs(&guests, SOURCE);
    let rates = with(|world| Rates {
        stall: world.faults.draw_rate(40),
        slow_sync: world.faults.draw_rate(10),
        failed_sync: world.faults.draw_rate(10),
        failed_change: world.faults.draw_rate(30),
        lost_message: world.faults.draw_rate(6),
        repeated_message: world.faults.draw_rate(6),
        late_message: world.faults.draw_rate(8),
        ..Rates::default()
    });
    log(&format!("{rates:?}"));
    let mut daemons = [start(&guests, SOURCE), start(&guests, TARGET)];
    for _ in 0..ROUNDS {
        with(|world| world.faults.rates = rates);
        thread::sleep(Duration::from_millis(draw(4_000)));
        trouble(&guests, &mut daemons);
    }
    comes_back::end_faults();
    daemons.iter().for_each(|daemon| daemon.spare());
    for host in [SOURCE, TARGET] {
        restart(&guests, &mut daemons, host);
    }
    thread::sleep(HEALS);
    guests.see(|guests| guests.over = true);
    for daemon in daemons {
        if !daemon.await_end(Duration::from_secs(60)) {
            violation("ends_or_says", "a daemon does not end");
        }
    }
    judge(&guests);
}

/// Something happens to one of the hosts, or to the way between them.
fn trouble(guests: &World, daemons: &mut [Running; 2]) {
    let host = draw(2) as usize;
    match draw(8) {
        0 => daemons[host].doom(draw(60), false),
        1 => daemons[host].kill(),
        2 => lose_power(guests, host),
        3 => {
            log(&format!("nothing arrives at {}", HOSTS[host]));
            network::cut(1 - host, host, true);
            thread::sleep(Duration::from_millis(draw(12_000)));
            network::cut(1 - host, host, false);
        }
        4 => {
            log("the QEMU of the target ends");
            guests.see(|guests| {
                guests.machine.stops(HOSTS[TARGET]);
                guests.target = Slot::Nothing;
            });
        }
        5 => {
            // The next daemon acts on what this one wrote last, and then power takes that back.
            daemons[host].doom_after_rename();
            thread::sleep(Duration::from_millis(draw(3_000)));
            restart(guests, daemons, host);
            thread::sleep(Duration::from_millis(draw(1_000)));
            lose_power(guests, host);
        }
        6 => {
            // A record is on the disk and counts as failed; the next daemon finds it.
            daemons[host].fail_sync_of_rename(1 + draw(3), 1 + draw(30));
            thread::sleep(Duration::from_millis(draw(6_000)));
        }
        _ => {}
    }
    thread::sleep(Duration::from_millis(draw(3_000)));
    for host in [SOURCE, TARGET] {
        restart(guests, daemons, host);
    }
}

fn lose_power(guests: &World, host: usize) {
    processes::lose_power(host);
    guests.see(|guests| {
        guests.machine.stops(HOSTS[host]);
        if host == SOURCE { guests.source = None } else { guests.target = Slot::Nothing }
    });
}

fn restart(guests: &World, daemons: &mut [Running; 2], host: usize) {
    if daemons[host].has_ended() {
        network::drop_mail(host);
        daemons[host] = start(guests, host);
    }
}

fn start(guests: &World, host: usize) -> Running {
    guests.see(|guests| guests.starts[host] += 1);
    let daemon = guests.clone();
    let live = move || match host {
        SOURCE => source::live(&daemon),
        _ => target::live(&daemon),
    };
    processes::start(host, HOSTS[host], live)
}

/// Exactly one host has the machine, it is not paused there, and the other has nothing of it.
fn judge(guests: &World) {
    let (source, target): (SourceDisk, TargetDisk) =
        (super::record::read(SOURCE, "machine"), super::record::read(TARGET, "machine"));
    let (qemu, slot) = guests.see(|guests| (guests.source, guests.target));
    let is_well = match (source.owner, target) {
        (Owner::Ours, TargetDisk::Nothing) => {
            source.begun.is_empty() && qemu != Some(Paused(true)) && slot == Slot::Nothing
        }
        (Owner::Gone, TargetDisk::Ours(_)) => qemu.is_none() && matches!(slot, Slot::Nothing | Slot::Running),
        _ => false,
    };
    if !is_well {
        let text = format!("source: {source:?}, {qemu:?}; target: {target:?}, {slot:?}");
        let rule = if source.owner == Owner::Gone && target == TargetDisk::Nothing {
            "acknowledged_exists"
        } else {
            "ends_or_says"
        };
        violation(rule, &format!("ten minutes after the faults ended: {text}"));
    }
}

impl SourceDisk {
    /// What a restarted daemon finds of an attempt.
    fn of(&self, attempt: u64) -> Option<SourceRecord> {
        match self.owner {
            Owner::HandedOver(by) if by == attempt => Some(SourceRecord::HandedOver),
            _ if !self.begun.contains(&attempt) => None,
            Owner::Ours => Some(SourceRecord::Ours),
            _ => Some(SourceRecord::Other),
        }
    }
}

impl TargetDisk {
    fn record(self) -> Option<(u64, TargetRecord)> {
        match self {
            Self::Nothing => None,
            Self::Arriving(attempt) => Some((attempt, TargetRecord::Arriving)),
            Self::NeverRan(attempt) => Some((attempt, TargetRecord::NeverRan)),
            Self::Ours(attempt) => Some((attempt, TargetRecord::Ours)),
        }
    }
}
