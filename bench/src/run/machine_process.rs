//! `vm`: machines that have a process of their own while no daemon runs.
//!
//! A daemon that is killed leaves its machine to a process that has waited for it. What the guest notices is
//! the longest of its writes to the disk, which it makes all the time, beside that of a quiet minute.
//!
//! A restart of the daemon is two swaps: to the process, and to the next daemon. What a client notices of
//! each is the longest gap of a probe at 1 kHz, beside that of as long a time in which nothing is swapped.

use super::{Context, Experiment, campaign::agent, process_cost, resting};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, GUEST, Hosts, Machine};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;
use whimbrel_testkit::lab::Probe;

const MEMORY: ByteSize = ByteSize(192 << 20);
const DISK: ByteSize = ByteSize(32 << 20);
/// Answers before and after a swap, and the time for them.
const ANSWERS: u64 = 500;
const PATIENCE: Duration = Duration::from_secs(60);
/// Until a process has come to rest.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["vm.upgrade", "vm.memory", "vm.threads"],
        about: "replace the daemon under a running guest, and see what serves it meanwhile",
        run: replace,
    },
    Experiment {
        rows: &["daemon.gone"],
        about: "kill the daemon under a guest that writes to its disk, and start it again",
        run: kill,
    },
    Experiment {
        rows: &["vm.threads"],
        about: "count the threads of a daemon with a hundred machines",
        run: daemon_threads,
    },
    Experiment {
        rows: &["vm.start"],
        about: "resume a machine on a host with processes for machines, and on one without",
        run: process_cost::start,
    },
    Experiment {
        rows: &["vm.checkpoint"],
        about: "the first checkpoint of a machine on both",
        run: process_cost::checkpoint,
    },
];

/// A host that has processes for machines, with the machine `web`.
pub(super) fn start() -> Result<Hosts> {
    let mut hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get_mut("alpha")?;
    alpha.use_machine_processes();
    alpha.restart()?;
    let address = Some(format!("{GUEST}/24"));
    let options = GuestOptions { buffer_mib: 16, address, ..GuestOptions::default() };
    let folder = hosts.disk().to_owned();
    Machine::small(MEMORY, options).with_blank_disk(&folder, DISK)?.run(hosts.get("alpha")?, "web")?;
    Ok(hosts)
}

fn daemon_threads(context: &Context) -> Result<Vec<Row>> {
    let machines = if context.quick { 50 } else { 100 };
    let hosts = resting::at_rest(machines, true)?;
    let threads = fs::read_dir(format!("/proc/{}/task", hosts.get("alpha")?.pid()?))?.count();
    let case = format!("daemon, {machines} machines at rest");
    let row = Row::new("vm.threads", case, "threads", &Samples::new(vec![threads as f64]));
    Ok(vec![row.goal(Goal::AtMost(64.0))])
}

fn kill(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = start()?;
    let mut inside = agent(&hosts)?;
    let mut longest = || -> Result<f64> { Ok(inside.longest_write()?.as_secs_f64() * 1e3) };
    // The guest begins to write.
    longest()?;
    sleep(Duration::from_secs(context.times(60, 10) as u64));
    let quiet = longest()?;
    let (times, mut gone, mut logged) = (context.times(100, 5), 0.0_f64, 0);
    for _ in 0..times {
        wait_waiting(hosts.get("alpha")?, logged)?;
        logged = hosts.get("alpha")?.log_text().len();
        hosts.get_mut("alpha")?.end_daemon()?;
        hosts.get_mut("alpha")?.begin()?;
        gone = gone.max(longest()?);
    }
    let log = hosts.get("alpha")?.log_text();
    ensure!(!log.contains("adopting it"), "a machine had no process: {log}");
    eprintln!("    longest write: {quiet:.1} ms in a quiet time, {gone:.1} ms in {times} kills");
    let (over, quiet) = (Samples::new(vec![(gone - quiet).max(0.0)]), Samples::new(vec![quiet]));
    let row = Row::new("daemon.gone", format!("longest write to a disk, {times} kills"), "ms", &over);
    // The value is what the kills add, so it has no ratio to the peer.
    let row = Row { ratio: None, ..row.against("all of it in a quiet minute", &quiet) };
    Ok(vec![row.goal(Goal::AtMost(10.0))])
}

/// Waits until a process waits for the machine, after as many bytes of the log.
fn wait_waiting(alpha: &Daemon, logged: usize) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !alpha.log_text().get(logged..).unwrap_or_default().contains("a process waits for it") {
        ensure!(Instant::now() < deadline, "no process waits for the machine: {}", alpha.account());
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn replace(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = start()?;
    let (mut stops, mut quiet) = (Vec::new(), Vec::new());
    let (mut memory, mut threads) = (Vec::new(), Vec::new());
    for _ in 0..context.times(10, 3) {
        quiet.push(gap(&mut hosts, |_| Ok(()))?);
        stops.push(gap(&mut hosts, Daemon::ask_to_end)?);
        sleep(SETTLE);
        let process = process(hosts.get("alpha")?)?;
        memory.push(private(&process)? as f64 / 1e6);
        threads.push(fs::read_dir(process.join("task"))?.count() as f64);
        stops.push(gap(&mut hosts, Daemon::begin)?);
        let log = hosts.get("alpha")?.log_text();
        ensure!(!log.contains("adopting it"), "a machine did not pass: {log}");
    }
    let one = "one disk, one port";
    Ok(vec![
        Row::new("vm.upgrade", "longest gap at a client, one swap", "ms", &Samples::new(stops))
            .against("no swap", &Samples::new(quiet))
            .goal(Goal::AtMost(50.0)),
        Row::new("vm.memory", one, "MB", &Samples::new(memory)).goal(Goal::AtMost(10.0)),
        Row::new("vm.threads", format!("vm, {one}"), "threads", &Samples::new(threads))
            .goal(Goal::AtMost(8.0)),
    ])
}

/// Longest time without an answer of the guest, in ms, around `work`.
fn gap(hosts: &mut Hosts, work: impl FnOnce(&mut Daemon) -> Result<()>) -> Result<f64> {
    let probe = Probe::start(hosts.lab.host("client"), format!("{GUEST}:7003").parse()?)?;
    ensure!(probe.wait_answers(ANSWERS, PATIENCE), "the guest does not answer");
    work(hosts.get_mut("alpha")?)?;
    ensure!(probe.wait_answers(ANSWERS, PATIENCE), "the guest does not answer any more");
    Ok(probe.stop().downtime.as_secs_f64() * 1e3)
}

/// Folder in `/proc` of the process that has the machine.
fn process(alpha: &Daemon) -> Result<PathBuf> {
    let slots = alpha.run_dir().join("slots");
    let is_it = |folder: &Path| {
        let line = fs::read(folder.join("cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0).skip(1);
        words.next() == Some(b"vm".as_slice())
            && words.next().is_some_and(|slot| slot.starts_with(slots.as_os_str().as_encoded_bytes()))
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let all = fs::read_dir("/proc")?.filter_map(|entry| Some(entry.ok()?.path()));
        if let Some(found) = all.into_iter().find(|folder| is_it(folder)) {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "no process has the machine");
        sleep(Duration::from_millis(20));
    }
}

/// Bytes that only the process has. Memory of the guest is in a file on a tmpfs.
fn private(process: &Path) -> Result<u64> {
    let text = fs::read_to_string(process.join("smaps_rollup"))?;
    let field = |name: &str| -> Option<u64> {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix(" kB")?.parse().ok()
    };
    let anonymous = field("Pss_Anon:").context("no Pss_Anon")?;
    let files = field("Private_Clean:").context("no Private_Clean")?.min(field("Pss_File:").unwrap_or(0));
    Ok((anonymous + files) << 10)
}
