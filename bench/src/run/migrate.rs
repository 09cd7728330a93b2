//! `migrate.*`: a guest moves between two hosts over one Gbit/s, beside QEMU's own pre-copy of the same guest.
//!
//! Downtime is the longest silence that a client sees who asks a thousand times a second, whatever its cause. Bytes are what
//! passes the source's uplink in both directions from the request to the end, the client's few included. Every
//! measurement has a freshly booted guest.

use super::Context;
use super::precopy;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::{Lab, Probe};

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Rate of the source's and the target's cable.
pub(super) const MBIT: u64 = 1000;
/// Until a fresh guest has dirtied its region a few times.
const SETTLE: Duration = Duration::from_secs(3);
/// How long the guest may take to answer on its other host.
const PATIENCE: Duration = Duration::from_secs(60);
const PEER: &str = "QEMU pre-copy";

/// What one move cost.
pub(super) struct Moved {
    pub(super) seen_ms: f64,
    /// What the machinery itself says of the downtime.
    pub(super) believed_ms: f64,
    pub(super) total_ms: f64,
    pub(super) bytes: f64,
}

/// All rows: they come of the same moves.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha", "beta"])?;
    for host in ["alpha", "beta"] {
        hosts.lab.limit(host, MBIT)?;
    }
    let busy = Work::Dirty { region_mib: 64, pages_per_second: 20_000, bytes_per_page: 64 };
    let mut rows = Vec::new();
    for (case, work) in [("idle", Work::Idle), ("64 MiB at 20k pages/s", busy)] {
        let options = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work };
        let plan = GuestPlan::small(MEMORY, options.clone());
        let ours = || ours(&hosts, options.clone()).with_context(|| format!("whimbrel, {case}"));
        let peer = || precopy::moved(&hosts.lab, &plan).with_context(|| format!("{PEER}, {case}"));
        let (ours, theirs) = in_turn(context.times(7, 2), ours, peer)?;
        rows.extend(compare(case, &ours, &theirs));
    }
    rows.sort_by_key(|row| row.row);
    Ok(rows)
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

fn ours(hosts: &Hosts, options: GuestOptions) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    Machine::small(MEMORY, options).run(alpha, "web")?;
    let watched = watch(&hosts.lab, || {
        let result = alpha.json(&["migrate", "web", "beta"])?;
        number(&result, "downtime_ms")
    });
    let watched = watched.inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    })?;
    beta.discard("web")?;
    Ok(watched)
}

/// Has a guest moved by `migrate`, which returns what it believes of the downtime, while a client looks on.
pub(super) fn watch(lab: &Lab, migrate: impl FnOnce() -> Result<f64>) -> Result<Moved> {
    let address = format!("{GUEST}:7003").parse()?;
    let client = lab.host("client");
    // The guest before this one had the same address and another hardware address.
    client.ip("neigh flush all")?;
    let probe = Probe::start(client, address)?;
    ensure!(probe.wait_answers(200, PATIENCE), "the guest does not answer");
    sleep(SETTLE);
    let (before, begun) = (wire_bytes(lab)?, Instant::now());
    let believed_ms = migrate()?;
    let (total, after) = (begun.elapsed(), wire_bytes(lab)?);
    ensure!(probe.wait_answers(500, PATIENCE), "the guest does not answer where it went");
    let seen = probe.stop().downtime;
    Ok(Moved {
        seen_ms: seen.as_secs_f64() * 1e3,
        believed_ms,
        total_ms: total.as_secs_f64() * 1e3,
        bytes: (after - before) as f64,
    })
}

/// Bytes that have passed the uplink of the source, both directions.
fn wire_bytes(lab: &Lab) -> Result<u64> {
    let text = lab.host("alpha").output("ip", &["-json", "-statistics", "link", "show", "uplink"])?;
    let links: Value = serde_json::from_str(&text)?;
    let bytes = |way: &str| links[0]["stats64"][way]["bytes"].as_u64().context("`ip` without counters");
    Ok(bytes("rx")? + bytes("tx")?)
}
