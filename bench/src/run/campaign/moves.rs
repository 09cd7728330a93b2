//! `moves.lost`, `moves.both`: a machine moves to and fro while its hosts are disturbed.
//!
//! After each move both hosts must agree on the one that has the machine. There it must be the same life: its
//! random number, the checksum of its memory and of what it wrote to its disk. Both is a move after which two
//! hosts run it, or during which the switch saw it at the old host after it was at the new one.

use super::Length;
use super::disturbance::{Disturbance, limit_disks};
use super::guest::{self, NAME, PATIENCE, agent, broken, state};
use crate::harness::{Chance, Goal, Row, Samples};
use crate::hosts::Hosts;
use crate::run::Context;
use crate::run::protect::Switch;
use anyhow::Result;
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

const HOSTS: [&str; 2] = ["alpha", "beta"];
const MODES: [&str; 3] = ["precopy", "postcopy", "hybrid"];
/// Moves of one machine, before one with another number of CPUs takes its place.
const MOVES_OF_ONE: u64 = 25;
const CPUS: [u32; 3] = [1, 2, 4];
/// Minutes of a record, which is one of several in its set.
const MINUTES: u64 = 5;
const MINUTES_QUICK: u64 = 2;

/// What came of a campaign.
#[derive(Default)]
struct Outcome {
    moves: u64,
    /// Moves that reached the target, by what disturbed them.
    moved: BTreeMap<String, [u64; 2]>,
    lost: u64,
    both: u64,
}

/// How a move ended.
enum End {
    At(usize),
    Lost(String),
    Both(String),
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let length = Length::of(context, MINUTES, MINUTES_QUICK);
    let mut chance = Chance(length.seed);
    let mut hosts = Hosts::start(&HOSTS)?;
    limit_disks(&mut hosts, &HOSTS)?;
    let mut outcome = Outcome::default();
    let (mut at, mut round) = (0, 0);
    while length.goes_on() {
        guest::remove(&hosts, &HOSTS)?;
        guest::start(&hosts, HOSTS[at], CPUS[round % CPUS.len()])?;
        at = moves_of_one(&mut hosts, at, &mut chance, &length, &mut outcome)?;
        round += 1;
    }
    let of: Vec<String> =
        outcome.moved.iter().map(|(kind, [moved, all])| format!("{kind} {moved} of {all}")).collect();
    let case = format!(
        "{} moves in {} min, seed {}; moved: {}",
        outcome.moves,
        length.minutes,
        length.seed,
        of.join(", ")
    );
    let row = |name, value: u64| {
        Row::new(name, case.clone(), "moves", &Samples::new(vec![value as f64])).goal(Goal::AtMost(0.0))
    };
    Ok(vec![row("moves.lost", outcome.lost), row("moves.both", outcome.both)])
}

/// Moves one machine until something is wrong, or it is the turn of another. Returns where it was last.
fn moves_of_one(
    hosts: &mut Hosts,
    mut at: usize,
    chance: &mut Chance,
    length: &Length,
    outcome: &mut Outcome,
) -> Result<usize> {
    agent(hosts)?.write(20)?;
    let switch = Switch::watch(&hosts.lab)?;
    for _ in 0..MOVES_OF_ONE {
        if !length.goes_on() {
            break;
        }
        let (disturbance, mode) = (Disturbance::any(chance), MODES[chance.below(3) as usize]);
        let (delay, span) = (chance.below(2_000), chance.below(1_500));
        let begun = Instant::now();
        let end = one_move(hosts, &switch, at, mode, disturbance, (delay, span))?;
        outcome.moves += 1;
        let counts = outcome.moved.entry(format!("{disturbance:?}")).or_default();
        counts[1] += 1;
        let said = match &end {
            End::At(now) if *now == at => "stayed".to_owned(),
            End::At(_) => "moved".to_owned(),
            End::Lost(what) | End::Both(what) => format!("WRONG: {what}"),
        };
        eprintln!(
            "    {}: {mode}, {disturbance:?} at {delay} ms for {span} ms: {said} ({:.1} s)",
            outcome.moves,
            begun.elapsed().as_secs_f64()
        );
        match end {
            End::At(now) => {
                counts[0] += u64::from(now != at);
                at = now;
            }
            End::Lost(_) => outcome.lost += 1,
            End::Both(_) => outcome.both += 1,
        }
        if said.starts_with("WRONG") {
            tell(hosts)?;
            return Ok(at);
        }
    }
    // What was moved often also starts again.
    if let Err(error) = guest::reboot(hosts) {
        eprintln!("    WRONG: it was moved, and then does not reboot: {error:#}");
        outcome.lost += 1;
        tell(hosts)?;
    }
    Ok(at)
}

/// What the hosts say, and what the guest said last.
fn tell(hosts: &Hosts) -> Result<()> {
    for name in HOSTS {
        let host = hosts.get(name)?;
        let console = host.run(&["logs", NAME]).unwrap_or_default();
        let lines: Vec<&str> = console.lines().collect();
        eprintln!("{}\n{}", host.account(), lines[lines.len().saturating_sub(20)..].join("\n"));
    }
    Ok(())
}

/// One move from the host `at` to the other, with one disturbance.
fn one_move(
    hosts: &mut Hosts,
    switch: &Switch,
    at: usize,
    mode: &str,
    disturbance: Disturbance,
    (delay, span): (u64, u64),
) -> Result<End> {
    let (from, to) = (HOSTS[at], HOSTS[1 - at]);
    let before = {
        let mut inside = agent(hosts)?;
        inside.write(5)?;
        inside.check()?
    };
    switch.forget();
    let mut command = hosts.get(from)?.spawn(&["migrate", NAME, to, "--mode", mode])?;
    sleep(Duration::from_millis(delay));
    match disturbance {
        Disturbance::Cancel => command.interrupt()?,
        other => other.strike(hosts, (from, to), Duration::from_millis(span))?,
    }
    command.wait_for(PATIENCE)?;
    let now = match settled(hosts)? {
        Ok(now) => now,
        Err(end) => return Ok(end),
    };
    let after = match agent(hosts).and_then(|mut inside| Ok(inside.check()?)) {
        Ok(after) => after,
        Err(error) => {
            return Ok(End::Lost(format!("it is at {} and does not answer: {error:#}", HOSTS[now])));
        }
    };
    if let Some(what) = broken(&before, &after) {
        return Ok(End::Lost(format!("{what}: {before:?} {after:?}")));
    }
    if now != at && switch.was_seen_again(from, to) {
        return Ok(End::Both(format!("it was seen at {from} after it was at {to}")));
    }
    Ok(End::At(now))
}

/// Waits until both hosts agree on the one that runs the machine.
fn settled(hosts: &Hosts) -> Result<Result<usize, End>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let states = [state(hosts.get(HOSTS[0])?)?, state(hosts.get(HOSTS[1])?)?];
        let runs = |state: &Option<String>| state.as_deref().is_some_and(|kind| kind == "running");
        match &states {
            [one, other] if runs(one) && runs(other) => {
                return Ok(Err(End::Both("both hosts run it".into())));
            }
            [one, None] if runs(one) => return Ok(Ok(0)),
            [None, one] if runs(one) => return Ok(Ok(1)),
            [None, None] => return Ok(Err(End::Lost("no host has it".into()))),
            [Some(kind), None] | [None, Some(kind)] if kind == "crashed" || kind == "stopped" => {
                return Ok(Err(End::Lost(format!("it is {kind}"))));
            }
            _ => {}
        }
        if Instant::now() > deadline {
            return Ok(Err(End::Lost(format!("the hosts do not agree: {states:?}"))));
        }
        sleep(Duration::from_millis(50));
    }
}
