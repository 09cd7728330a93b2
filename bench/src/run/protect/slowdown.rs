//! `slowdown.*`: how much less a machine gets done under protection, against the same machine unprotected in
//! the same run.
//!
//! On a machine of few processors the standby's daemon competes with the guest, which on hosts of their own
//! it would not. So each work has a second row without a goal, with the time that the guest's virtual
//! processor waited for a real one (schedstat of its thread) given back as far as it was the standby's doing:
//! its share of what both daemons used. The case says how much of a processor the standby took.
//!
//! The quick form measures each work once, over shorter windows: a direction, not a figure.

use super::clients::rounds;
use super::pause::{CALM, WARM_UP, clients};
use super::site::{NAME, Site};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(40);
const PATIENCE: Duration = Duration::from_secs(60);

/// What was done, and what it took.
struct Pace {
    /// Rounds a second.
    rate: f64,
    /// Part of the time that the virtual processor waited because of the standby.
    standby: f64,
    /// Processors that the standby's host took.
    standby_cpus: f64,
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let window = Duration::from_secs(if context.quick { 12 } else { 30 });
    let warm_up = if context.quick { WARM_UP / 2 } else { WARM_UP };
    let loads =
        [("compile", "slowdown.compile", 5.0), ("web", "slowdown.web", 6.0), ("ep", "slowdown.ep", 3.0)];
    let mut rows = Vec::new();
    for (load, row, goal) in loads {
        let site = Site::at_work(load)?;
        let clients = clients(&site, load);
        sleep(warm_up);
        let done = || match &clients {
            Some(clients) => Ok(clients.done()),
            None => rounds(site.client()),
        };
        let (mut whole, mut without, mut cpus) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..context.times(5, 1) {
            let [slower, standby, took] = slower(&site, window, &CALM, &done)?;
            whole.push(slower);
            without.push(slower - standby);
            cpus.push(took);
        }
        let cpus = Samples::new(cpus).median();
        let case = format!("epochs of 50 ms, standby {cpus:.0} % of a processor");
        rows.push(Row::new(row, case, "%", &Samples::new(whole)).goal(Goal::AtMost(goal)));
        let case = "the standby's share of the waiting taken out";
        rows.push(Row::new(row, case, "%", &Samples::new(without)));
    }
    Ok(rows)
}

/// In percent: how much less is done under protection, how much of the time was waited for the standby, and
/// how much of a processor that took.
fn slower(site: &Site, window: Duration, more: &[&str], done: &dyn Fn() -> Result<u64>) -> Result<[f64; 3]> {
    // Before and after, so that work which changes as it goes does it to both alike.
    let first = pace(site, window / 2, done)?;
    site.protect(more)?;
    sleep(Duration::from_secs(2));
    let under = pace(site, window, done)?;
    let figures = site.figures()?;
    site.unprotect()?;
    let second = pace(site, window / 2, done)?;
    let free = f64::midpoint(first.rate, second.rate);
    eprintln!(
        "    {:.2}, {:.2}, {:.2} a second; waited {:.3} for the standby, which took {:.2} processors; {figures}",
        first.rate, under.rate, second.rate, under.standby, under.standby_cpus
    );
    Ok([1.0 - under.rate / free, under.standby, under.standby_cpus].map(|part| 100.0 * part))
}

fn pace(site: &Site, window: Duration, done: &dyn Fn() -> Result<u64>) -> Result<Pace> {
    let hosts = [site.alpha()?, site.hosts.get("beta")?];
    let cpu = || -> Result<[f64; 2]> { Ok([hosts[0].cpu()?, hosts[1].cpu()?]) };
    let (rounds, begun) = next_round(done)?;
    let (cpu_before, waited) = (cpu()?, waited(site)?);
    sleep(window);
    let (rounds_after, ended) = next_round(done)?;
    let seconds = ended.duration_since(begun).as_secs_f64();
    let used: Vec<f64> = cpu()?.iter().zip(cpu_before).map(|(after, before)| after - before).collect();
    let waited = (self::waited(site)? - waited) / seconds;
    let share = used[1] / (used[0] + used[1]).max(1e-9);
    let rate = (rounds_after - rounds) as f64 / seconds;
    Ok(Pace { rate, standby: waited * share, standby_cpus: used[1] / seconds })
}

/// How far the work is at the instant at which it gets on, so that a window holds whole rounds: of some work
/// there is hardly one a second.
fn next_round(done: &dyn Fn() -> Result<u64>) -> Result<(u64, Instant)> {
    let (before, deadline) = (done()?, Instant::now() + PATIENCE);
    loop {
        let now = done()?;
        if now != before {
            return Ok((now, Instant::now()));
        }
        ensure!(Instant::now() < deadline, "the work does not get on");
        sleep(POLL);
    }
}

/// Seconds that the guest's virtual processor has waited for a real one: the thread of its QEMU that has run
/// most.
fn waited(site: &Site) -> Result<f64> {
    let alpha = site.alpha()?;
    let machines = alpha.json(&["ps"])?;
    let mut machines = machines.as_array().context("`ps` without a list")?.iter();
    let pid = machines.find(|one| one["name"] == NAME).and_then(|one| one["pid"].as_u64());
    let tasks = format!("/proc/{}/root/proc/{}/task", alpha.pid()?, pid.context("no process")?);
    let mut most = (0.0, 0.0);
    for task in fs::read_dir(&tasks)? {
        // One may have ended since it was listed.
        let Ok(stat) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let mut nanos = stat.split_whitespace().map(|number| number.parse().unwrap_or(0.0));
        let found = (nanos.next().unwrap_or(0.0), nanos.next().unwrap_or(0.0));
        most = if found.0 > most.0 { found } else { most };
    }
    Ok(most.1 / 1e9)
}
