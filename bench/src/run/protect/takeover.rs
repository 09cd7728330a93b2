//! `takeover`, `takeover.detected`: a host is gone from one instant to the next, and a client is answered
//! again by the other.
//!
//! Default settings. The host's cable is pulled and all of its processes are killed, so that nothing of it
//! says that it is gone. The client asks a thousand times a second; detection is when the standby asks the
//! witness, by its log.

use super::site::{NAME, Site};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, GUEST};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::Work;
use whimbrel_testkit::lab::Probe;

const MEMORY: ByteSize = ByteSize(256 << 20);
const PATIENCE: Duration = Duration::from_secs(60);
const DAY_MS: f64 = 86_400_000.0;

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let (mut whole, mut detected) = (Vec::new(), Vec::new());
    for _ in 0..context.times(20, 3) {
        let (silent, after) = once()?;
        eprintln!("    a client was not answered for {silent:.0} ms, {after:.0} ms after detection");
        whole.push(silent);
        detected.push(after);
    }
    let case = "host killed and unplugged, as a client sees it";
    Ok(vec![
        Row::new(
            "takeover.detected",
            "from the standby's question to the witness",
            "ms",
            &Samples::new(detected),
        )
        .goal(Goal::AtMost(60.0)),
        Row::new("takeover", case, "ms", &Samples::new(whole)).goal(Goal::AtMost(500.0)),
    ])
}

/// Milliseconds without an answer in all, and after detection.
fn once() -> Result<(f64, f64)> {
    let work = Work::Dirty { region_mib: 16, pages_per_second: 2000, bytes_per_page: 64 };
    let mut site = Site::small(MEMORY, work)?;
    site.protect(&[])?;
    sleep(Duration::from_secs(2));
    let address = format!("{GUEST}:7003").parse()?;
    let probe = Probe::start(site.client(), address)?;
    let begun = SystemTime::now();
    ensure!(probe.wait_answers(200, PATIENCE), "the guest does not answer");
    site.hosts.lab.unplug("alpha")?;
    site.hosts.get_mut("alpha")?.end()?;
    let beta = site.hosts.get("beta")?;
    wait_running(beta)?;
    sleep(Duration::from_secs(1));
    let report = probe.stop();
    let answered = begun + report.downtime_at + report.downtime;
    let asked = asked_at(beta).context("the standby has not asked")?;
    Ok((report.downtime.as_secs_f64() * 1e3, (of_day(answered)? - asked).rem_euclid(DAY_MS)))
}

/// Waits until the machine runs on this host.
pub(super) fn wait_running(host: &Daemon) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let machines = host.json(&["ps"])?;
        let mut machines = machines.as_array().context("`ps` without a list")?.iter();
        if machines.any(|one| one["name"] == NAME && one["state"]["kind"] == "running") {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "nobody takes over: {}", host.log_text());
        sleep(Duration::from_millis(20));
    }
}

/// When the standby asked the witness for the last time, in milliseconds of the day.
fn asked_at(host: &Daemon) -> Option<f64> {
    let log = host.log_text();
    let line = log.lines().rfind(|line| line.contains("asking the witness"))?;
    // 2026-11-21T18:26:02.824849Z
    let (_, time) = line.split_whitespace().next()?.trim_end_matches('Z').split_once('T')?;
    let parts = time.split(':').map(str::parse::<f64>).collect::<Result<Vec<_>, _>>().ok()?;
    Some(parts.iter().fold(0.0, |sum, part| sum * 60.0 + part) * 1e3)
}

fn of_day(time: SystemTime) -> Result<f64> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64() * 1e3;
    Ok(since.rem_euclid(DAY_MS))
}
