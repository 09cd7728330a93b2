//! `vm`: machines that have a process of their own.
//!
//! A daemon that is killed leaves its machine to its process, and the next one leaves it there. What the
//! guest notices is the longest of its writes to the disk, which it makes all the time, beside that of a
//! quiet minute. `daemon.gone.soon` kills right after an operation: the machine passes then, each time.
//!
//! `whimbrel upgrade` is one swap, and the machine's way to its next process another. What a client notices
//! of each is the longest gap of a probe at 1 kHz, beside that of as long a time in which nothing is swapped.

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
/// What daemons log: a process waits for the machine, has it, was given it, or had to give it back.
const WAITS: &str = "a process waits for it";
const HAS_IT: &str = "its own process has it";
const LEFT: &str = "left to a process of its own";
const TAKEN: &str = "took it from its own process";
/// Until a process has come to rest.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["vm.upgrade", "vm.memory", "vm.threads"],
        about: "replace what serves a running guest, and see what that needs",
        run: replace,
    },
    Experiment {
        rows: &["daemon.gone", "daemon.gone.soon"],
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
    Experiment { rows: &["vm.epoch"], about: "epochs of a protection on both", run: process_cost::epoch },
];

/// A host that has processes for machines, with the machine `web`.
pub(super) fn start() -> Result<Hosts> {
    let hosts = Hosts::start(&["alpha"])?;
    let address = Some(format!("{GUEST}/24"));
    let options = GuestOptions { buffer_mib: 16, address, ..GuestOptions::default() };
    let folder = hosts.disk().to_owned();
    Machine::small(MEMORY, options).with_blank_disk(&folder, DISK)?.run(hosts.get("alpha")?, "web")?;
    Ok(hosts)
}

fn daemon_threads(context: &Context) -> Result<Vec<Row>> {
    let machines = if context.quick { 50 } else { 100 };
    let hosts = resting::at_rest(machines)?;
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
    // The first kill finds a process that waits, the others one that has the machine.
    let (times, mut gone) = (context.times(100, 5), 0.0_f64);
    wait_logged(hosts.get("alpha")?, 0, WAITS)?;
    for _ in 0..times {
        let logged = hosts.get("alpha")?.log_text().len();
        hosts.get_mut("alpha")?.end_daemon()?;
        hosts.get_mut("alpha")?.begin()?;
        wait_logged(hosts.get("alpha")?, logged, HAS_IT)?;
        gone = gone.max(longest()?);
    }
    let (soon_times, mut soon) = (context.times(20, 3), 0.0_f64);
    for _ in 0..soon_times {
        let logged = hosts.get("alpha")?.log_text().len();
        upgrade(hosts.get_mut("alpha")?)?;
        wait_logged(hosts.get("alpha")?, logged, WAITS)?;
        // What the operation itself costs does not count.
        longest()?;
        hosts.get_mut("alpha")?.end_daemon()?;
        hosts.get_mut("alpha")?.begin()?;
        wait_logged(hosts.get("alpha")?, logged, HAS_IT)?;
        soon = soon.max(longest()?);
    }
    let log = hosts.get("alpha")?.log_text();
    ensure!(!log.contains("adopting it"), "a machine had no process: {log}");
    eprintln!("    longest write: {quiet:.1} ms in a quiet time, {gone:.1} ms in {times} kills");
    let row = |name, case: String, longest: f64| {
        let (over, quiet) = (Samples::new(vec![(longest - quiet).max(0.0)]), Samples::new(vec![quiet]));
        let row = Row::new(name, case, "ms", &over);
        // The value is what the kills add, so it has no ratio to the peer.
        Row { ratio: None, ..row.against("all of it in a quiet minute", &quiet) }
    };
    let case = format!("longest write to a disk, {times} kills");
    let soon_case = format!("longest write to a disk, {soon_times} kills, each right after an operation");
    Ok(vec![
        row("daemon.gone", case, gone).goal(Goal::AtMost(10.0)),
        row("daemon.gone.soon", soon_case, soon),
    ])
}

/// Has the daemon take the machine from its process.
pub(super) fn upgrade(alpha: &mut Daemon) -> Result<()> {
    alpha.run(&["upgrade", "web"]).map(drop)
}

/// Waits until the daemon has logged `text`, after as many bytes of its log.
fn wait_logged(alpha: &Daemon, logged: usize, text: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !alpha.log_text().get(logged..).unwrap_or_default().contains(text) {
        ensure!(Instant::now() < deadline, "not logged: {text}: {}", alpha.account());
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn replace(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = start()?;
    let (mut stops, mut quiet) = (Vec::new(), Vec::new());
    let (mut memory, mut threads) = (Vec::new(), Vec::new());
    // Its first process.
    hosts.get_mut("alpha")?.ask_to_end()?;
    hosts.get_mut("alpha")?.begin()?;
    let times = context.times(10, 3);
    for _ in 0..times {
        sleep(SETTLE);
        let process = process(hosts.get("alpha")?)?;
        memory.push(private(&process)? as f64 / 1e6);
        threads.push(fs::read_dir(process.join("task"))?.count() as f64);
        quiet.push(gap(&mut hosts, |_| Ok(()))?);
        stops.push(gap(&mut hosts, upgrade)?);
        stops.push(gap(&mut hosts, Daemon::ask_to_end)?);
        hosts.get_mut("alpha")?.begin()?;
    }
    let log = hosts.get("alpha")?.log_text();
    ensure!(!log.contains("adopting it"), "a machine did not pass: {log}");
    let swaps = (log.matches(TAKEN).count(), log.matches(LEFT).count());
    ensure!(swaps == (times, times + 1), "{swaps:?} swaps: {log}");
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
