//! Machines that rest. `host.300`: what a daemon takes for three hundred of
//! them, whose guests wake once a second.

use super::Context;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Hosts, Machine, Resident};
use anyhow::{Result, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

/// With less the kernel of the small guest does not boot.
const MEMORY: ByteSize = ByteSize(80 << 20);
/// Clones that one command makes.
const AT_ONCE: usize = 50;
/// Until the machines have come to rest, and how long the daemon's processor time is counted.
const SETTLE: Duration = Duration::from_secs(30);
const COUNTED: Duration = Duration::from_secs(60);
/// Until all of them have passed to their processes.
const PATIENCE: Duration = Duration::from_secs(300);

/// A host with so many machines that rest, each with a process of its own.
pub(super) fn at_rest(machines: usize) -> Result<Hosts> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: 1, work: Work::Resting, ..GuestOptions::default() };
    Machine::small(MEMORY, options).run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    alpha.discard("origin")?;
    for batch in 0..machines / AT_ONCE {
        let prefix = format!("rest-{batch}");
        alpha.run(&["clone", "kept", "--count", &AT_ONCE.to_string(), "--prefix", &prefix])?;
    }
    sleep(SETTLE);
    let passed = || alpha.log_text().matches("at rest: its own process has it").count();
    let deadline = Instant::now() + PATIENCE;
    while passed() < machines {
        ensure!(Instant::now() < deadline, "{} of {machines} have processes: {}", passed(), alpha.account());
        sleep(Duration::from_secs(1));
    }
    Ok(hosts)
}

/// Memory and processor time of the daemon.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let machines = if context.quick { AT_ONCE } else { 300 };
    let hosts = at_rest(machines)?;
    let alpha = hosts.get("alpha")?;
    let (cpu, begun) = (alpha.cpu()?, Instant::now());
    sleep(COUNTED);
    let cpu = 100.0 * (alpha.cpu()? - cpu) / begun.elapsed().as_secs_f64();
    let memory = Resident::of_daemon(alpha)?.0 as f64 / 1e6;
    let row = |case: &str, unit, value| {
        Row::new(
            "host.300",
            format!("{case} of the daemon, {machines} machines"),
            unit,
            &Samples::new(vec![value]),
        )
    };
    Ok(vec![
        row("memory", "MB", memory).goal(Goal::AtMost(500.0)),
        row("cpu", "%", cpu).goal(Goal::AtMost(3.0)),
    ])
}
