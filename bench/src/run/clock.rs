//! `clock`: by how much the wall clock of a guest is off after many moves. Each move stops it for the
//! pause, and the agent in the guest sets it forward: ours, or the one that distributions have.

use super::Context;
use super::migrate::linked;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, GUEST, Machine, console};
use anyhow::{Result, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestFiles, GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(256 << 20);
const MBIT: u64 = 1000;
/// A pause that nobody would overlook, and a clock that is right again after it.
const PAUSE: Duration = Duration::from_secs(2);
const RIGHT_MS: f64 = 100.0;
/// Time for the agent to start, and to do its work.
const PATIENCE: Duration = Duration::from_secs(120);
const SETTLED: Duration = Duration::from_secs(3);
const QUESTIONS: usize = 9;

/// The rows.
pub(super) fn clock(context: &Context) -> Result<Vec<Row>> {
    let files = GuestFiles::with_qemu_ga()?;
    let theirs = (files.kernel, files.initrd);
    let idle = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 8, work: Work::Idle };
    let ours = GuestOptions { work: Work::GuestAgent, ..idle.clone() };
    let machines = [
        ("whimbrel-guest", Machine::small(MEMORY, ours)),
        ("qemu-ga", Machine { memory: MEMORY, boot: Some(theirs), options: idle, disks: Vec::new() }),
    ];
    let hosts = linked(MBIT)?;
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    // An even number, so that both begin on the same host.
    let times = context.times(100, 10).next_multiple_of(2);
    let mut rows = Vec::new();
    for (agent, machine) in machines {
        machine.run(sides[0], "web")?;
        wait_for_agent(sides[0])?;
        for turn in 0..times {
            let [here, there] = [sides[turn % 2], sides[(turn + 1) % 2]];
            here.run(&["migrate", "web", there.name()])?;
        }
        sleep(SETTLED);
        let off = Samples::new(vec![lag(sides[0])?.abs()]);
        let case = format!("{agent}, after {times} moves");
        rows.push(Row::new("clock", case, "ms", &off).goal(Goal::AtMost(50.0)));
        sides[0].discard("web")?;
    }
    Ok(rows)
}

/// Waits until the agent has set the clock after a pause.
fn wait_for_agent(daemon: &Daemon) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        daemon.run(&["pause", "web"])?;
        sleep(PAUSE);
        daemon.run(&["unpause", "web"])?;
        sleep(SETTLED);
        let lag = lag(daemon)?;
        if lag.abs() < RIGHT_MS {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "nobody in the guest sets its clock: {lag:.0} ms behind");
    }
}

/// Median of what a few questions say.
fn lag(daemon: &Daemon) -> Result<f64> {
    let mut guest = console(daemon, "web")?;
    guest.wait_ready(PATIENCE)?;
    let lags = (0..QUESTIONS).map(|_| guest.clock_lag_ms()).collect::<Result<Vec<_>, _>>()?;
    Ok(Samples::new(lags).median())
}
