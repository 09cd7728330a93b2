//! `migrate.downtime.*`: how long clients hear nothing of a machine that moves over a Gbit/s, beside QEMU's
//! own pre-copy.
//!
//! Idle: a client who asks a thousand times a second. Web: the longest time in which none of many who fetch
//! files got a byte. Game: by how much the longest time between two updates was longer than it should be, of
//! six players. Of ours the hosts also say what the machine stood still for; what is left of the client's
//! time is the guest's until its first answer, which a translated guest spends on translating anew all that
//! an answer takes (`.guest`).

use super::Context;
use super::clients::{FILES, Game, Web, WebReport};
use super::migrate::{PATIENCE, linked, watch};
use super::precopy::{self, Pair};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Daemon, GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::Lab;

const MEMORY: ByteSize = ByteSize(512 << 20);
const MBIT: u64 = 1000;
const PEER: &str = "QEMU pre-copy";
/// Clients of the web server.
const CLIENTS: u64 = 100;
/// How long each waits between two files, so that a translated guest on a shared processor is not all that
/// there is to serve them.
const THINK: Duration = Duration::from_millis(1500);
/// Clients are served for so long before a move and after it.
const SERVED: Duration = Duration::from_secs(2);
/// A part of the time without a byte belongs to each side of the move.
const AFTER: Duration = Duration::from_millis(500);
/// What the worst move of a web server may take of its clients' time, in milliseconds.
const WORST: f64 = 60.0;
/// What a downtime may be of QEMU's.
const SHARE: f64 = 0.6;
/// Names of the parts of a pause, as the product tells them.
const PARTS: [&str; 8] = ["stop", "scan", "devices", "pages", "load", "link", "commit", "start"];

/// What a move of ours took of its clients' time, and what the hosts say of it.
struct Ours {
    seen_ms: f64,
    pause: Value,
    believed_ms: f64,
}

/// The rows about a guest that nobody asks for much.
pub(crate) fn idle(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let plan = GuestPlan::small(MEMORY, options());
    let mut lost = [Vec::new(), Vec::new()];
    let [lost_of_ours, lost_of_theirs] = &mut lost;
    let (ours, theirs) = both(
        context.times(20, 3),
        || {
            fresh(&hosts, |alpha| {
                let mut pause = Value::Null;
                let moved = watch(&hosts.lab, || {
                    let result = alpha.json(&["migrate", "web", "beta"])?;
                    pause = result["result"]["pause"].clone();
                    number(&result, "downtime_ms")
                })?;
                lost_of_ours.push(moved.lost);
                Ok(Ours { seen_ms: moved.seen_ms, pause, believed_ms: moved.believed_ms })
            })
        },
        || {
            let moved = precopy::moved(&hosts.lab, &plan, MBIT)?;
            lost_of_theirs.push(moved.lost);
            Ok(moved.seen_ms)
        },
    )?;
    let mut rows = compare("migrate.downtime.idle", 12.0, &ours, &theirs);
    let [lost, theirs] = lost.map(Samples::new);
    rows.push(
        Row::new("migrate.downtime.idle", "datagrams never answered", "", &lost).against(PEER, &theirs),
    );
    rows.extend(parts(&ours)?);
    Ok(rows)
}

/// The rows about a game.
pub(crate) fn game(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let plan = GuestPlan::small(MEMORY, options());
    let (ours, theirs) = both(
        context.times(20, 3),
        || {
            fresh(&hosts, |alpha| {
                let mut told = None;
                let seen_ms = played(&hosts.lab, GUEST, || {
                    told = Some(alpha.json(&["migrate", "web", "beta"])?);
                    Ok(())
                })?;
                said(seen_ms, &told.context("no result")?)
            })
        },
        || {
            let pair = Pair::start(&hosts.lab, [&plan, &plan], MBIT)?;
            played(&hosts.lab, GUEST, || pair.migrate().map(drop))
        },
    )?;
    Ok(compare("migrate.downtime.udp", 15.0, &ours, &theirs))
}

/// The rows about a web server: a guest that goes to and fro, and the worst of it.
pub(crate) fn web(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let plan = GuestPlan::small(MEMORY, options());
    let mut theirs = Vec::new();
    for _ in 0..context.times(20, 2) {
        let pair = Pair::start(&hosts.lab, [&plan, &plan], MBIT)?;
        let (report, from, to) = served(&hosts.lab, GUEST, || pair.migrate().map(drop)).context(PEER)?;
        theirs.push(report.events.silence(from, to).as_secs_f64() * 1e3);
    }
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    Machine::small(MEMORY, options()).run(sides[0], "web")?;
    hosts.lab.host("client").ip("neigh flush all")?;
    let (mut ours, mut failed) = (Vec::new(), 0);
    for turn in 0..context.times(100, 6) {
        let [here, there] = [sides[turn % 2], sides[(turn + 1) % 2]];
        let mut told = Value::Null;
        let (report, from, to) = served(&hosts.lab, GUEST, || {
            told = here.json(&["migrate", "web", there.name()])?;
            Ok(())
        })?;
        failed += report.failed;
        let one = said(report.events.silence(from, to).as_secs_f64() * 1e3, &told)?;
        if one.seen_ms > WORST {
            eprintln!("    move {turn}: nothing came for {:.0} ms; {}", one.seen_ms, one.pause);
        }
        ours.push(one);
    }
    let seen = Samples::of(&ours, |ours| ours.seen_ms);
    let worst = Samples::new(vec![seen.max()]);
    let mut rows = compare("migrate.downtime.web", 25.0, &ours, &theirs);
    let case = format!("web, the worst of {}", ours.len());
    rows.push(Row::new("migrate.downtime.p99", case, "ms", &worst).goal(Goal::AtMost(WORST)));
    let failed = Samples::new(vec![failed as f64]);
    rows.push(Row::new("migrate.downtime.web", "requests that failed", "", &failed).goal(Goal::AtMost(0.0)));
    Ok(rows)
}

fn options() -> GuestOptions {
    GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle }
}

fn said(seen_ms: f64, result: &Value) -> Result<Ours> {
    let pause = result["result"]["pause"].clone();
    Ok(Ours { seen_ms, pause, believed_ms: number(result, "downtime_ms")? })
}

/// Ours and the peer's in turn.
fn both(
    times: usize,
    mut ours: impl FnMut() -> Result<Ours>,
    mut theirs: impl FnMut() -> Result<f64>,
) -> Result<(Vec<Ours>, Vec<f64>)> {
    let (mut mine, mut others) = (Vec::new(), Vec::new());
    in_turn(
        times,
        || ours().context("whimbrel").map(|ours| mine.push(ours)),
        || theirs().context(PEER).map(|theirs| others.push(theirs)),
    )?;
    Ok((mine, others))
}

/// A guest that has just booted on `alpha` and that `moved` moves to `beta`.
fn fresh(hosts: &Hosts, moved: impl FnOnce(&Daemon) -> Result<Ours>) -> Result<Ours> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    Machine::small(MEMORY, options()).run(alpha, "web")?;
    let moved = moved(alpha).inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    })?;
    beta.discard("web")?;
    Ok(moved)
}

/// Moves a guest by `migrate` while it is played on; what the players missed, in milliseconds.
pub(super) fn played(lab: &Lab, guest: &str, migrate: impl FnOnce() -> Result<()>) -> Result<f64> {
    let client = lab.host("client");
    client.ip("neigh flush all")?;
    let game = Game::start(client, format!("{guest}:7004").parse()?);
    sleep(SERVED);
    let from = Instant::now();
    migrate()?;
    sleep(AFTER);
    let missed = game.stop(from, Instant::now())?;
    Ok(missed.as_secs_f64() * 1e3)
}

/// The same while it serves files; what the clients saw, and from when to when it moved.
pub(super) fn served(
    lab: &Lab,
    guest: &str,
    migrate: impl FnOnce() -> Result<()>,
) -> Result<(WebReport, Instant, Instant)> {
    let client = lab.host("client");
    client.ip("neigh flush all")?;
    let web = Web::start(client, format!("{guest}:7080").parse()?, (CLIENTS, THINK), FILES)?;
    web.wait_fetched(CLIENTS, PATIENCE)?;
    sleep(SERVED);
    let from = Instant::now();
    migrate()?;
    sleep(AFTER);
    let to = Instant::now();
    Ok((web.stop(), from, to))
}

/// What clients saw, by itself and beside the peer; what the hosts say; and what is left of it for the guest.
fn compare(row: &'static str, most: f64, ours: &[Ours], theirs: &[f64]) -> Vec<Row> {
    let of = |case: &str, number: fn(&Ours) -> f64| Row::new(row, case, "ms", &Samples::of(ours, number));
    let theirs = Samples::new(theirs.to_vec());
    vec![
        of("as clients see it", |ours| ours.seen_ms).goal(Goal::AtMost(most)),
        of("beside QEMU", |ours| ours.seen_ms).against(PEER, &theirs).goal(Goal::PeerAtMost(SHARE)),
        of("of that no CPU ran", |ours| ours.believed_ms),
        of("of that the guest until its first answer", |ours| ours.seen_ms - ours.believed_ms),
    ]
}

/// What the machine stood still for.
fn parts(ours: &[Ours]) -> Result<Vec<Row>> {
    let part = |name: &&str| {
        let of =
            |ours: &Ours| ours.pause[format!("{name}_ms")].as_f64().context("a part of the pause is missing");
        let samples = ours.iter().map(of).collect::<Result<Vec<_>>>()?;
        Ok(Row::new("migrate.downtime.parts", *name, "ms", &Samples::new(samples)))
    };
    PARTS.iter().map(part).collect()
}
