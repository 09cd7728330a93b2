//! Scene: a protected machine on a primary, a standby and a witness, by the program's own leases. Messages
//! are lost, late and repeated, ways are cut, clocks drift; primary and witness are killed and restart, the
//! primary's QEMU dies, the standby fails to load. At no instant is the machine seen on both sides, some
//! side has a copy, and in the end it runs.

mod primary;
mod standby;
mod witness;

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
use std::{thread, time::Duration};
use whimbrel_protect::{
    clock::BootTime,
    lease::{WitnessQuery, WitnessReply},
    protocol::{HeartbeatReply, StandbyOutcome},
};

const PRIMARY: usize = 0;
const STANDBY: usize = 1;
const WITNESS: usize = 2;
const HOSTS: [&str; 3] = ["primary", "standby", "witness"];
const TERM: Duration = Duration::from_secs(8);
/// Parts in 1,024 that the primary's clock may lose. The rules allow an eighth, of which stopping needs
/// some.
const DRIFT_MAX: u64 = 90;
/// Time in which the machine comes to run once nothing fails: several terms, with pauses between loads.
const HEALS: Duration = Duration::from_secs(600);

/// What hosts say to each other.
#[derive(Debug, Clone)]
enum Message {
    Ask { from: usize, query: WitnessQuery, asked: BootTime },
    Answer { query: WitnessQuery, reply: WitnessReply, asked: BootTime },
    Heartbeat { asked: BootTime },
    Heard { reply: HeartbeatReply, asked: BootTime },
    Yield,
    Yielded { outcome: StandbyOutcome },
    End,
    Ended { outcome: StandbyOutcome },
}

/// What the rules look at.
#[derive(Debug)]
struct Guests {
    machine: MachineWatch,
    /// Whether the primary has a copy that could run.
    primary_has: bool,
    standby_has: bool,
    /// Whether the primary has asked to keep the machine: then its copy may be the only one.
    asked_to_keep: bool,
    standby_runs: bool,
    over: bool,
}

type World = Shared<Guests>;

fn now() -> u64 {
    with(|world| world.schedule.now)
}

/// The machine is seen on a host from now on, or no longer.
fn show(guests: &World, host: usize, is_seen: bool) {
    let seen = guests.see(|guests| match is_seen {
        true => guests.machine.runs(HOSTS[host]),
        false => {
            guests.machine.stops(HOSTS[host]);
            Ok(())
        }
    });
    one_runs::demand(seen);
}

/// A copy is deleted. Some side must have another one.
fn delete(guests: &World, host: usize) {
    let is_left = guests.see(|guests| {
        if host == PRIMARY {
            guests.primary_has = false
        } else {
            guests.standby_has = false
        }
        guests.primary_has || guests.standby_has
    });
    log(&format!("the copy at {} is deleted", HOSTS[host]));
    if !is_left {
        violation("acknowledged_exists", "the machine was deleted on both sides");
    }
}

pub(crate) fn run() {
    let guests = Shared::new(Guests {
        machine: MachineWatch::default(),
        primary_has: true,
        standby_has: true,
        asked_to_keep: false,
        standby_runs: false,
        over: false,
    });
    let rates = with(|world| {
        world.hosts[PRIMARY].drift = world.work.below(2) * world.work.below(DRIFT_MAX);
        Rates {
            stall: world.faults.draw_rate(30),
            failed_sync: world.faults.draw_rate(20),
            lost_message: world.faults.draw_rate(6),
            repeated_message: world.faults.draw_rate(6),
            late_message: world.faults.draw_rate(8),
            ..Rates::default()
        }
    });
    log(&format!("{rates:?}"));
    let mut daemons = [PRIMARY, STANDBY, WITNESS].map(|host| start(&guests, host));
    thread::sleep(Duration::from_millis(draw(20_000)));
    for _ in 0..1 + draw(4) {
        with(|world| world.faults.rates = rates);
        trouble(&guests, &mut daemons);
    }
    comes_back::end_faults();
    restart(&guests, &mut daemons);
    thread::sleep(HEALS);
    let (runs, machine) = guests.see(|guests| {
        let at_primary = guests.primary_has && guests.machine.is_running(HOSTS[PRIMARY]);
        (at_primary || guests.standby_runs, format!("{guests:?}"))
    });
    if !runs {
        violation("ends_or_says", &format!("ten minutes after the faults ended nobody runs: {machine}"));
    }
    guests.see(|guests| guests.over = true);
    if !daemons.iter().all(|daemon| daemon.await_end(Duration::from_secs(60))) {
        violation("ends_or_says", "a daemon does not end");
    }
}

/// Something happens to a host, or to a way between two.
fn trouble(guests: &World, daemons: &mut [Running; 3]) {
    match draw(7) {
        // A daemon that is dead shows nothing: the guest's port and disks are its own.
        0 | 1 => {
            let host = if draw(2) == 0 { PRIMARY } else { WITNESS };
            daemons[host].kill();
            show(guests, host, false);
            if host == WITNESS && draw(2) == 0 {
                processes::lose_power(host);
            }
            if draw(2) == 0 {
                restart(guests, daemons);
            }
        }
        2 => {
            let dies = guests.see(|guests| {
                let dies = !guests.asked_to_keep && guests.standby_has;
                guests.primary_has &= !dies;
                dies
            });
            log(if dies { "the primary's QEMU dies" } else { "nothing happens" });
        }
        // The standby hears nothing any more, and the witness forgets what it had only in memory.
        3 => {
            network::cut(PRIMARY, STANDBY, true);
            thread::sleep(TERM + Duration::from_millis(draw(8_000)));
            daemons[WITNESS].kill();
            restart(guests, daemons);
            thread::sleep(Duration::from_millis(draw(3_000)));
            network::cut(PRIMARY, STANDBY, false);
        }
        _ => {
            let (from, to) = (draw(3) as usize, draw(3) as usize);
            let both = draw(2) == 0;
            log(&format!(
                "no way from {} to {}{}",
                HOSTS[from],
                HOSTS[to],
                if both { " and back" } else { "" }
            ));
            network::cut(from, to, from != to);
            network::cut(to, from, both && from != to);
            thread::sleep(Duration::from_millis(draw(30_000)));
            if draw(2) == 0 {
                network::cut(from, to, false);
                network::cut(to, from, false);
            }
        }
    }
    thread::sleep(Duration::from_millis(draw(12_000)));
    restart(guests, daemons);
}

fn restart(guests: &World, daemons: &mut [Running; 3]) {
    for host in [PRIMARY, WITNESS] {
        if daemons[host].has_ended() {
            network::drop_mail(host);
            daemons[host] = start(guests, host);
        }
    }
}

fn start(guests: &World, host: usize) -> Running {
    let guests = guests.clone();
    processes::start(host, HOSTS[host], move || match host {
        PRIMARY => primary::live(&guests),
        STANDBY => standby::live(&guests),
        _ => witness::live(&guests),
    })
}
