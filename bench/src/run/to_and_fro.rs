//! `migrate.web.dip` and `migrate.thousand`: what clients of a web server notice of moves beside the silence
//! at their end.
//!
//! The dip: how much less they get while the first round goes at its least rate, 100 Mbit/s as in Clark et
//! al. (NSDI 2005, section 6.2). The thousand: requests that fail and connections that break while the
//! machine goes to and fro.

use super::Context;
use super::clients::{FILES, Web};
use super::downtime::served;
use super::migrate::{PATIENCE, linked};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{GUEST, Machine, number};
use anyhow::{Context as _, Result, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::{StreamEnd, StreamProbe};

const MEMORY: ByteSize = ByteSize(512 << 20);
const MBIT: u64 = 1000;
/// Rates of the first and of the last round.
const RATES: [&str; 2] = ["100Mbit", "500Mbit"];
/// What clients get is counted for so long before the move.
const BEFORE: Duration = Duration::from_secs(2);
/// Until then the first round has begun.
const RESERVED: Duration = Duration::from_millis(400);
/// Clients of the machine that goes to and fro: few, for what breaks is what counts.
const CLIENTS: u64 = 8;
const THINK: Duration = Duration::from_millis(100);
/// A pause that is told of at once, in milliseconds.
const LONG: f64 = 100.0;
/// Connections over all of it, each told a number a millisecond.
const STREAMS: usize = 4;

fn options() -> GuestOptions {
    GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle }
}

/// The dip.
pub(crate) fn dip(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    Machine::small(MEMORY, options()).run(sides[0], "web")?;
    let mut dips = Vec::new();
    for turn in 0..context.times(20, 3) {
        let [here, there] = [sides[turn % 2], sides[(turn + 1) % 2]];
        let arguments =
            ["migrate", "web", there.name(), "--adaptive", "--rate-min", RATES[0], "--rate-max", RATES[1]];
        let mut first = None;
        let (report, from, _) = served(&hosts.lab, GUEST, || {
            let result = here.json(&arguments)?;
            let round = &result["result"]["rounds"][0];
            let ms = |field: &str| round[field].as_f64().context("a round without times");
            first = Some((ms("begun_ms")?, ms("ms")?));
            Ok(())
        })?;
        let (begun, took) = first.context("no round")?;
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        // Rounds are told from when the first began, which is a little after the request.
        let (begun, ended) = (from + ms(begun) + RESERVED, from + ms(begun + took));
        let (before, during) = (report.events.rate(from - BEFORE, from), report.events.rate(begun, ended));
        dips.push(100.0 * (1.0 - during / before));
    }
    let case = "100 clients, 512 KB files, first round at 100 Mbit/s";
    Ok(vec![Row::new("migrate.web.dip", case, "%", &Samples::new(dips)).goal(Goal::AtMost(12.0))])
}

/// The thousand.
pub(crate) fn thousand(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    Machine::small(MEMORY, options()).run(sides[0], "web")?;
    let client = hosts.lab.host("client");
    client.ip("neigh flush all")?;
    let web = Web::start(client, format!("{GUEST}:7080").parse()?, (CLIENTS, THINK), FILES)?;
    web.wait_fetched(CLIENTS, PATIENCE)?;
    let stream =
        |_| StreamProbe::start(client, format!("{GUEST}:7001").parse()?, PATIENCE).context("no stream");
    let streams = (0..STREAMS).map(stream).collect::<Result<Vec<_>>>()?;
    let (times, begun) = (context.times(1000, 10), Instant::now());
    let mut longest = 0.0_f64;
    for turn in 0..times {
        let [here, there] = [sides[turn % 2], sides[(turn + 1) % 2]];
        let moved = here.json(&["migrate", "web", there.name()]).with_context(|| format!("move {turn}"))?;
        let stood = number(&moved, "downtime_ms")?;
        if stood > LONG {
            eprintln!("    move {turn}: nobody ran it for {stood:.0} ms: {}", moved["result"]["pause"]);
        }
        longest = longest.max(stood);
        // So that each move interrupts somebody, and none is hidden in the silence of the one before.
        web.wait_fetched(1, PATIENCE)?;
    }
    let took = begun.elapsed();
    sleep(BEFORE);
    let report = web.stop();
    ensure!(report.fetched > times as u64, "only {} files were fetched", report.fetched);
    let broken = streams.into_iter().map(StreamProbe::stop).filter(|report| report.end != StreamEnd::Stopped);
    let lost = report.failed as f64 + broken.count() as f64;
    if lost > 0.0 {
        sides.iter().for_each(|side| eprintln!("{}: {}", side.name(), side.account()));
    }
    let case = format!("{times} moves, {} files, {STREAMS} connections", report.fetched);
    let each = Samples::new(vec![took.as_secs_f64() * 1e3 / times as f64]);
    Ok(vec![
        Row::new("migrate.thousand", case, "", &Samples::new(vec![lost])).goal(Goal::AtMost(0.0)),
        Row::new("migrate.thousand", "from one move to the next", "ms", &each),
        // Tells a silence of the hosts from one of the network or of the guest.
        Row::new("migrate.thousand", "longest pause, as the hosts say", "ms", &Samples::new(vec![longest])),
    ])
}
