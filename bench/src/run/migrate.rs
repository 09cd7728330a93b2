//! `migrate.*`: a guest moves between two hosts over one Gbit/s, beside QEMU's own pre-copy of the same
//! guest.
//!
//! Downtime is the longest silence that a client sees who asks a thousand times a second, whatever its cause.
//! Bytes are what passes the source's uplink in both directions from the request to the end, the client's few
//! included. Every measurement has a freshly booted guest.

use super::Context;
use super::move_cost::Meter;
use super::precopy;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::{ByteSize, PAGE_SIZE};
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::{Lab, Probe};

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Rate of the source's and the target's cable.
const MBIT: u64 = 1000;
/// The slower link of the rows about time.
const SLOW_MBIT: u64 = 256;
/// Until a fresh guest has dirtied its region a few times.
const SETTLE: Duration = Duration::from_secs(3);
/// How long the guest may take to answer on its other host.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
const PEER: &str = "QEMU pre-copy";
const BUSY: &str = "64 MiB at 20k pages/s";
/// A host may need this much beside the guest: and so much of the guest's memory.
const COST_FLAT: f64 = 64.0 * 1.048_576;
const COST_SHARE: f64 = 0.005;
/// Memory of the small and the large guest of `migrate.growth`.
const GROWTH: [ByteSize; 2] = [ByteSize(512 << 20), ByteSize(8 << 30)];

/// What one move cost.
pub(super) struct Moved {
    pub(super) seen_ms: f64,
    /// Datagrams of the client that were never answered.
    pub(super) lost: f64,
    /// What the machinery itself says of the downtime.
    pub(super) believed_ms: f64,
    pub(super) total_ms: f64,
    pub(super) bytes: f64,
    /// What it cost our daemons; nothing is known of a peer's.
    pub(super) cost: Cost,
}

/// What a move cost the daemons of both hosts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    /// Processor seconds.
    pub(super) cpu: f64,
    /// MB by which the one that grew more grew, at most.
    pub(super) memory: f64,
    /// GiB of pages that were looked at.
    pub(super) gib: f64,
}

/// What the target has of the guest before it moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Empty,
    /// Nothing, and the guest frees caches and free pages before it goes.
    EmptyFreed,
    /// A capsule of it that is a few seconds old.
    Primed,
}

/// The rows about an idle guest at one Gbit/s: they come of the same moves.
pub(crate) fn idle(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let (ours, theirs) = beside(context, &hosts, "idle", Work::Idle, MBIT)?;
    let mut rows = compare("idle", &ours, &theirs).to_vec();
    rows.extend(empty_and_primed(context, &hosts, &ours, &theirs)?);
    rows.sort_by_key(|row| row.row);
    Ok(rows)
}

/// Those about one that writes.
pub(crate) fn busy(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let work = Work::Dirty { region_mib: 64, pages_per_second: 20_000, bytes_per_page: 64 };
    let (ours, theirs) = beside(context, &hosts, BUSY, work, MBIT)?;
    Ok(compare(BUSY, &ours, &theirs).to_vec())
}

/// The rows about time on a slower link, and about downtime of a larger guest.
pub(crate) fn slower_and_larger(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(SLOW_MBIT)?;
    let (ours, theirs) = beside(context, &hosts, "idle, slow", Work::Idle, SLOW_MBIT)?;
    let time = row("migrate.time.256m", "idle", "ms", &ours, |moved| moved.total_ms);
    let time = time.against(PEER, &Samples::of(&theirs, |moved| moved.total_ms));
    drop(hosts);
    let hosts = linked(MBIT)?;
    let idle = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle };
    let grown = |memory| {
        let moves = (0..context.times(20, 1)).map(|_| ours_of(&hosts, memory, idle.clone(), Target::Empty));
        moves.collect::<Result<Vec<_>>>()
    };
    let [small, large] = GROWTH.map(grown);
    let (small, large) = (small?, large?);
    let seen = |moved: &Moved| moved.seen_ms;
    let growth = row("migrate.growth", "downtime, 8 GiB idle, as a client sees it", "ms", &large, seen);
    let growth = growth.against("0.5 GiB", &Samples::of(&small, seen));
    Ok(vec![time.goal(Goal::PeerAtMost(0.6)), growth.goal(Goal::PeerAtMost(2.0))])
}

/// Two hosts with a link between them. Both have the files that the small guest boots from, as QEMU's have
/// theirs.
pub(super) fn linked(mbit: u64) -> Result<Hosts> {
    let hosts = Hosts::start(&["alpha", "beta"])?;
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let options = GuestOptions { address: None, buffer_mib: 8, work: Work::Idle };
    Machine::small(ByteSize(192 << 20), options).run(alpha, "first")?;
    alpha.run(&["migrate", "first", "beta"])?;
    beta.discard("first")?;
    for host in ["alpha", "beta"] {
        hosts.lab.limit(host, mbit)?;
    }
    Ok(hosts)
}

/// Moves of ours and of the peer in turn.
fn beside(
    context: &Context,
    hosts: &Hosts,
    case: &str,
    work: Work,
    mbit: u64,
) -> Result<(Vec<Moved>, Vec<Moved>)> {
    let options = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work };
    let plan = GuestPlan::small(MEMORY, options.clone());
    let ours = || {
        let moved = ours_of(hosts, MEMORY, options.clone(), Target::Empty);
        moved.with_context(|| format!("whimbrel, {case}"))
    };
    let peer = || precopy::moved(&hosts.lab, &plan, mbit).with_context(|| format!("{PEER}, {case}"));
    in_turn(context.times(20, 2), ours, peer)
}

fn row(name: &'static str, case: &str, unit: &'static str, moves: &[Moved], of: fn(&Moved) -> f64) -> Row {
    Row::new(name, case, unit, &Samples::of(moves, of))
}

/// The rows about what the target has already, and about what a move costs.
fn empty_and_primed(context: &Context, hosts: &Hosts, empty: &[Moved], theirs: &[Moved]) -> Result<Vec<Row>> {
    let idle = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle };
    let primed = (0..context.times(20, 2)).map(|_| ours_of(hosts, MEMORY, idle.clone(), Target::Primed));
    let primed = primed.collect::<Result<Vec<_>>>()?;
    let helped = GuestOptions { work: Work::GuestAgent, ..idle };
    let freed = (0..context.times(20, 2)).map(|_| ours_of(hosts, MEMORY, helped.clone(), Target::EmptyFreed));
    let freed = freed.collect::<Result<Vec<_>>>()?;
    let (bytes, time) = (|moved: &Moved| moved.bytes / 1e6, |moved: &Moved| moved.total_ms);
    let (their_bytes, their_time) = (Samples::of(theirs, bytes), Samples::of(theirs, time));
    let against_bytes = |row: Row, goal| row.against(PEER, &their_bytes).goal(Goal::PeerAtMost(goal));
    let against_time = |row: Row| row.against(PEER, &their_time);
    let case = "target holds an older capsule";
    let memory_max = COST_FLAT + MEMORY.0 as f64 / 1e6 * COST_SHARE;
    let cpu = |moved: &Moved| moved.cost.cpu / moved.cost.gib.max(1e-3);
    Ok(vec![
        against_bytes(row("migrate.bytes.empty", "target empty", "MB", empty, bytes), 0.45),
        against_bytes(
            row("migrate.bytes.empty", "target empty, caches freed by the guest", "MB", &freed, bytes),
            0.45,
        ),
        against_bytes(row("migrate.bytes.primed", case, "MB", &primed, bytes), 0.15),
        against_time(row("migrate.time.1g", "target empty", "ms", empty, time)).goal(Goal::PeerAtMost(0.6)),
        against_time(row("migrate.time.1g", case, "ms", &primed, time)),
        row("migrate.cost.cpu", "both daemons, a GiB of pages", "s", empty, cpu),
        row("migrate.cost.memory", "the daemon that grew more", "MB", empty, |moved| moved.cost.memory)
            .goal(Goal::AtMost(memory_max)),
    ])
}

fn compare(case: &str, ours: &[Moved], theirs: &[Moved]) -> [Row; 4] {
    let row = |row: &'static str, case: String, unit: &'static str, number: fn(&Moved) -> f64| {
        let theirs = Samples::of(theirs, number);
        Row::new(row, case, unit, &Samples::of(ours, number)).against(PEER, &theirs)
    };
    [
        row("migrate.downtime", format!("{case}, as a client sees it"), "ms", |moved| moved.seen_ms)
            .goal(Goal::PeerAtMost(1.0)),
        row("migrate.downtime", format!("{case}, as the hosts say"), "ms", |moved| moved.believed_ms),
        row("migrate.bytes", case.to_owned(), "MB", |moved| moved.bytes / 1e6).goal(Goal::PeerAtMost(0.6)),
        row("migrate.time", case.to_owned(), "ms", |moved| moved.total_ms),
    ]
}

fn ours_of(hosts: &Hosts, memory: ByteSize, options: GuestOptions, target: Target) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    Machine::small(memory, options).run(alpha, "web")?;
    if target == Target::Primed {
        alpha.run(&["checkpoint", "web", "--tag", "older"])?;
        alpha.run(&["push", "older", "beta"])?;
    }
    let mut cost = Cost::default();
    let watched = watch(&hosts.lab, || {
        let meter = Meter::start(&[alpha, beta])?;
        let mut arguments = vec!["migrate", "web", "beta"];
        if target == Target::EmptyFreed {
            arguments.push("--drop-caches");
        }
        let result = alpha.json(&arguments)?;
        cost = meter.stop()?;
        let rounds = result["result"]["rounds"].as_array().context("no rounds")?;
        let pages: u64 = rounds.iter().filter_map(|round| round["pages"].as_u64()).sum();
        cost.gib = pages as f64 * PAGE_SIZE as f64 / (1u64 << 30) as f64;
        number(&result, "downtime_ms")
    });
    let watched = watched.inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    })?;
    beta.discard("web")?;
    Ok(Moved { cost, ..watched })
}

/// Has a guest moved by `migrate`, which returns what it believes of the downtime, while a client looks on.
pub(super) fn watch(lab: &Lab, migrate: impl FnOnce() -> Result<f64>) -> Result<Moved> {
    watch_at(lab, GUEST, migrate)
}

/// The same for a guest with another address.
pub(super) fn watch_at(lab: &Lab, guest: &str, migrate: impl FnOnce() -> Result<f64>) -> Result<Moved> {
    let address = format!("{guest}:7003").parse()?;
    let client = lab.host("client");
    // The guest before this one had the same address and another hardware address.
    client.ip("neigh flush all")?;
    let probe = Probe::start(client, address)?;
    ensure!(probe.wait_answers(200, PATIENCE), "the guest does not answer");
    sleep(SETTLE);
    let (before, begun) = (on_the_uplink(lab)?, Instant::now());
    let believed_ms = migrate()?;
    let (total, after) = (begun.elapsed(), on_the_uplink(lab)?);
    ensure!(probe.wait_answers(500, PATIENCE), "the guest does not answer where it went");
    let seen = probe.stop();
    Ok(Moved {
        seen_ms: seen.downtime.as_secs_f64() * 1e3,
        lost: seen.lost.len() as f64,
        believed_ms,
        total_ms: total.as_secs_f64() * 1e3,
        bytes: (after - before) as f64,
        cost: Cost::default(),
    })
}

/// Bytes that have passed the uplink of the source, both directions.
pub(super) fn on_the_uplink(lab: &Lab) -> Result<u64> {
    let text = lab.host("alpha").output("ip", &["-json", "-statistics", "link", "show", "uplink"])?;
    let links: Value = serde_json::from_str(&text)?;
    let bytes = |way: &str| links[0]["stats64"][way]["bytes"].as_u64().context("`ip` without counters");
    Ok(bytes("rx")? + bytes("tx")?)
}
