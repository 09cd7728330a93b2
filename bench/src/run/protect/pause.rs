//! `pause.*`, `bytes.*`, `ping.25ms`, `memory.*`: what epochs cost while nothing fails.

use super::clients::{Fetchers, pings};
use super::site::{Site, figure};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::Resident;
use crate::run::Context;
use crate::run::clients::web_mix;
use anyhow::Result;
use serde_json::Value;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::Work;

/// A lease that a busy machine does not lose: here nothing is to fail.
pub(super) const LEASE: [&str; 2] = ["--lease", "5s"];
/// The same, and epochs of one length, whatever waits for them.
pub(super) const CALM: [&str; 4] = ["--lease", "5s", "--max-epoch-factor", "1"];
/// Until work has begun and settled.
pub(super) const WARM_UP: Duration = Duration::from_secs(10);

/// Time of some 160 epochs of 50 ms.
const WINDOW: Duration = Duration::from_secs(8);

/// Clients of this work, if it needs any.
pub(super) fn clients(site: &Site, load: &str) -> Option<Fetchers> {
    match load {
        "apache" => Some(Fetchers::start(site.client(), 100, |_| "/large".to_owned())),
        "web" => Some(Fetchers::start(site.client(), 64, web_mix)),
        _ => None,
    }
}

/// A work under protection for a while: figures at the beginning and at the end of it.
fn protected(load: &str, window: Duration, more: &[&str]) -> Result<[Value; 2]> {
    let site = Site::at_work(load)?;
    let _clients = clients(&site, load);
    sleep(WARM_UP);
    site.protect(&[&CALM, more].concat())?;
    sleep(Duration::from_secs(3));
    let before = site.figures()?;
    sleep(window);
    Ok([before, site.figures()?])
}

/// The type II downtime of the paper: how long each checkpoint stops the machine. One guest for each work,
/// protected anew for each window, so that the figures are of this window alone.
pub(crate) fn pauses(context: &Context) -> Result<Vec<Row>> {
    let loads = [
        ("idle", "pause.idle", [1.2, 4.0]),
        ("apache", "pause.apache", [2.0, 6.0]),
        ("ep", "pause.ep", [1.5, 5.0]),
    ];
    let mut rows = Vec::new();
    for (load, row, [p50, p99]) in loads {
        let site = Site::at_work(load)?;
        let _clients = clients(&site, load);
        sleep(WARM_UP);
        let [middle, high, pages] = windows(&site, context, ["pause_p50_ms", "pause_p99_ms", "dirty_pages"])?;
        let case = |which: &str| format!("{which}, epochs of 50 ms, {:.0} pages each", pages.median());
        rows.push(Row::new(row, case("p50"), "ms", &middle).goal(Goal::AtMost(p50)));
        rows.push(Row::new(row, case("p99"), "ms", &high).goal(Goal::AtMost(p99)));
    }
    Ok(rows)
}

/// How long after its cut the output of an epoch leaves: a web server that is protected over 1 Gbit/s.
pub(crate) fn output(context: &Context) -> Result<Vec<Row>> {
    let site = Site::at_work("web")?;
    for host in ["alpha", "beta", "gamma"] {
        site.hosts.lab.limit(host, 1000)?;
    }
    let _clients = clients(&site, "web");
    sleep(WARM_UP);
    let [late] = windows(&site, context, ["output_delay_p50_ms"])?;
    let row = Row::new("output.late", "web, epochs of 50 ms, 1 Gbit/s, after the cut", "ms", &late);
    Ok(vec![row.goal(Goal::AtMost(5.0))])
}

/// Figures of a protection over windows of some 160 epochs.
fn windows<const N: usize>(site: &Site, context: &Context, names: [&str; N]) -> Result<[Samples; N]> {
    let mut found = [const { Vec::new() }; N];
    for _ in 0..context.times(20, 2) {
        site.protect(&CALM)?;
        sleep(WINDOW);
        let figures = site.figures()?;
        site.unprotect()?;
        eprintln!("    {figures}");
        for (name, found) in names.iter().zip(&mut found) {
            found.push(figure(&figures, name)?);
        }
    }
    Ok(found.map(Samples::new))
}

/// What an epoch comes to on the wire against its whole pages, and what each step brings (the paper's figure
/// 5b).
pub(crate) fn bytes(context: &Context) -> Result<Vec<Row>> {
    let window = Duration::from_secs(context.times(60, 15) as u64);
    let mut rows = Vec::new();
    for (load, goal) in [("redis", Some(0.12)), ("web", Some(0.12)), ("compile", Some(0.25)), ("is", None)] {
        let steps = ["sent_bytes", "dirty_bytes", "changed_bytes", "unshared_bytes"];
        let mut found: [Vec<f64>; 4] = Default::default();
        for _ in 0..context.times(5, 1) {
            let [before, after] = protected(load, window, &[])?;
            eprintln!("    {load}: {after}");
            let epochs = figure(&after, "epochs")? - figure(&before, "epochs")?;
            for (step, found) in steps.iter().zip(&mut found) {
                found.push((figure(&after, step)? - figure(&before, step)?) / epochs.max(1.0) / 1e3);
            }
        }
        let [sent, whole, changed, unshared] = found.map(Samples::new);
        let row = |case: &str, of: &Samples| {
            Row::new("bytes.fgbi64", format!("{load}, an epoch, {case}"), "kB", of)
                .against("whole pages", &whole)
        };
        let sent = row("all steps, devices included", &sent);
        rows.push(match goal {
            Some(goal) => sent.goal(Goal::PeerAtMost(goal)),
            None => sent,
        });
        rows.push(row("changed blocks of 64 bytes", &changed));
        rows.push(row("changed blocks, each once", &unshared));
    }
    Ok(rows)
}

/// What epochs cost that are kept as capsules, one a second, against such that are not: one guest, in turn.
pub(crate) fn kept(context: &Context) -> Result<Vec<Row>> {
    let names = ["pause_p50_ms", "pause_p99_ms", "output_delay_p50_ms"];
    let site = Site::at_work("redis")?;
    sleep(WARM_UP);
    let mut found: [[Vec<f64>; 3]; 2] = Default::default();
    for _ in 0..context.times(10, 2) {
        for (keep, found) in [&["--snapshots", "1/s,10"][..], &[]].into_iter().zip(&mut found) {
            site.protect(&[&CALM[..], keep].concat())?;
            sleep(WINDOW);
            let figures = site.figures()?;
            site.unprotect()?;
            for (name, found) in names.iter().zip(found) {
                found.push(figure(&figures, name)?);
            }
            eprintln!("    {keep:?}: {figures}");
        }
    }
    let [with, without] = found.map(|found| found.map(Samples::new));
    let row = |row, what: &str, number: usize| {
        let case = format!("redis, an epoch a second is kept, {what}");
        Row::new(row, case, "ms", &with[number]).against("none kept", &without[number])
    };
    Ok(vec![
        row("pause.kept", "pause, median", 0),
        row("pause.kept.p99", "pause", 1).goal(Goal::PeerAtMost(1.3)),
        row("pause.kept", "output late, median", 2),
    ])
}

/// Bytes of an epoch by the size of blocks. One guest, protected in one way after the other.
pub(crate) fn steps(context: &Context) -> Result<Vec<Row>> {
    let window = Duration::from_secs(context.times(30, 6) as u64);
    let ways: [(&str, &[&str]); 3] = [
        ("blocks, shared and compressed", &[]),
        ("blocks of 128 bytes, shared and compressed", &["--diff-block", "128"]),
        ("blocks of 256 bytes, shared and compressed", &["--diff-block", "256"]),
    ];
    let mut rows = Vec::new();
    for load in ["ep", "redis"] {
        let site = Site::at_work(load)?;
        sleep(WARM_UP);
        let mut found: [(Vec<f64>, Vec<f64>); 3] = Default::default();
        for _ in 0..context.times(5, 1) {
            for ((way, more), (sent, whole)) in ways.iter().zip(&mut found) {
                site.protect(&[&CALM[..], more].concat())?;
                sleep(Duration::from_secs(2));
                let before = site.figures()?;
                sleep(window);
                let after = site.figures()?;
                site.unprotect()?;
                let epochs = figure(&after, "epochs")? - figure(&before, "epochs")?;
                let grown = |name: &str| -> Result<f64> {
                    Ok((figure(&after, name)? - figure(&before, name)?) / epochs.max(1.0) / 1e3)
                };
                sent.push(grown("sent_bytes")? - grown("device_bytes")?);
                whole.push(grown("dirty_bytes")?);
                eprintln!(
                    "    {load}, {way}: {:.1} kB an epoch of {:.1}",
                    sent[sent.len() - 1],
                    whole[whole.len() - 1]
                );
            }
        }
        for ((way, _), (sent, whole)) in ways.iter().zip(found) {
            let case = format!("{load}, an epoch, {way}, without devices");
            let row = Row::new("bytes.steps", case, "kB", &Samples::new(sent));
            rows.push(row.against("whole pages", &Samples::new(whole)));
        }
    }
    Ok(rows)
}

/// What a client waits for an answer of an idle guest at the shortest epochs.
pub(crate) fn ping(context: &Context) -> Result<Vec<Row>> {
    let site = Site::at_work("idle")?;
    sleep(WARM_UP);
    let count = context.times(1000, 100) as u64;
    let alone = Samples::new(pings(site.client(), count)?);
    site.protect(&[&CALM[..], &["--epoch", "25ms"]].concat())?;
    sleep(Duration::from_secs(2));
    let trips = Samples::new(pings(site.client(), count)?);
    let row = Row::new("ping.25ms", "idle, epochs of 25 ms", "ms", &trips).against("unprotected", &alone);
    Ok(vec![row.goal(Goal::AtMost(30.0))])
}

/// Memory of ours on the host that takes more of it, of the guest's RAM, with every page of it known.
pub(crate) fn memory(context: &Context) -> Result<Vec<Row>> {
    const RAM: ByteSize = ByteSize(1 << 30);
    let mut rows = Vec::new();
    for (row, block, goal) in [("memory.64", "64", 15.0), ("memory.256", "256", 5.0)] {
        let mut shares = Vec::new();
        for _ in 0..context.times(5, 1) {
            let work = Work::Dirty { region_mib: 512, pages_per_second: 20_000, bytes_per_page: 64 };
            let site = Site::small(RAM, work)?;
            sleep(WARM_UP);
            let hosts = [site.alpha()?, site.hosts.get("beta")?];
            let before = [Resident::of_daemon(hosts[0])?, Resident::of_daemon(hosts[1])?];
            site.protect(&[&CALM[..], &["--diff-block", block]].concat())?;
            sleep(WARM_UP);
            let grown = hosts.iter().zip(before).map(|(host, before)| {
                Ok(Resident::of_daemon(host)?.0.saturating_sub(before.0) as f64 / RAM.0 as f64 * 100.0)
            });
            let grown = grown.collect::<Result<Vec<f64>>>()?;
            eprintln!(
                "    blocks of {block}: primary {:.2} %, standby {:.2} %; {}",
                grown[0],
                grown[1],
                site.figures()?
            );
            shares.push(grown.into_iter().fold(0.0, f64::max));
        }
        let case = "1 GiB, 512 MiB of it written at 20k pages/s";
        rows.push(Row::new(row, case, "%", &Samples::new(shares)).goal(Goal::AtMost(goal)));
    }
    Ok(rows)
}
