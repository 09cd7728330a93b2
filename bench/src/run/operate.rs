//! `scrape`, `daemon.idle`, `package`: what a host with 200 machines costs those who run it.
//!
//! Twenty machines run and idle; the others are switched off, with a record each. Figures are those of the
//! daemon alone: not of QEMUs, nor of what it maps of guests.

use super::{Context, Experiment, operate_web};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, Resident};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;

pub(super) const MACHINES: usize = 200;
const RUNNING: usize = 20;
const CASE: &str = "200 machines, 20 of them running";

pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["operate.scrape", "operate.daemon.idle"],
        about: "read the metrics of a host with 200 machines, and let its daemon idle",
        run: host,
    },
    Experiment { rows: &["operate.package"], about: "build the package of a host", run: package },
    Experiment { rows: &["operate.book"], about: "run every command of the manual", run: book },
    Experiment {
        rows: &["operate.web.first"],
        about: "load the web page of a host with 200 machines",
        run: operate_web::first,
    },
    Experiment {
        rows: &["operate.web.live"],
        about: "watch the rounds of a migration on the web page",
        run: operate_web::live,
    },
];

fn host(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = Hosts::start(&["alpha"])?;
    fill(&mut hosts)?;
    let alpha = hosts.get("alpha")?;
    // What a daemon does after its start is not idling.
    sleep(Duration::from_secs(if context.quick { 5 } else { 30 }));
    let (mut times, mut bytes) = (Vec::new(), 0);
    for _ in 0..context.times(20, 10) {
        let begun = Instant::now();
        bytes = scrape(alpha.socket())?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        sleep(Duration::from_secs(1));
    }
    let memory = Resident::of_daemon(alpha)?.0 as f64 / 1e6;
    let (begun, before) = (Instant::now(), alpha.cpu()?);
    sleep(Duration::from_secs(if context.quick { 10 } else { 120 }));
    let cpu = (alpha.cpu()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let one = |value| Samples::new(vec![value]);
    Ok(vec![
        Row::new("operate.scrape", CASE, "ms", &Samples::new(times)).goal(Goal::AtMost(20.0)),
        Row::new("operate.scrape.bytes", CASE, "KB", &one(bytes as f64 / 1e3)).goal(Goal::AtMost(2000.0)),
        Row::new("operate.daemon.idle", format!("memory, {CASE}"), "MB", &one(memory))
            .goal(Goal::AtMost(200.0)),
        Row::new("operate.daemon.idle", format!("cpu, {CASE}"), "%", &one(cpu)).goal(Goal::AtMost(1.0)),
    ])
}

/// Gives the host its machines, and a daemon that has just started.
pub(super) fn fill(hosts: &mut Hosts) -> Result<()> {
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: 16, ..GuestOptions::default() };
    Machine::small(ByteSize(96 << 20), options).run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    alpha.discard("origin")?;
    alpha.run(&["clone", "kept", "--count", &(RUNNING + 1).to_string(), "--prefix", "twin"])?;
    let last = format!("twin-{}", RUNNING + 1);
    alpha.run(&["stop", &last, "--kill"])?;
    let folder = hosts.disk().join("alpha/machines");
    let alpha = hosts.get_mut("alpha")?;
    alpha.end_daemon()?;
    for number in RUNNING + 2..=MACHINES {
        copy_record(&folder, &last, &format!("twin-{number}"))?;
    }
    alpha.begin()?;
    count(alpha)
}

/// Copies the record of a machine that is off and has no disk.
fn copy_record(folder: &Path, from: &str, to: &str) -> Result<()> {
    let record = fs::read(folder.join(from).join("machine.json"))?;
    let mut record: serde_json::Value = serde_json::from_slice(&record)?;
    // A record that was written by hand has no checksum.
    record.as_object_mut().context("the record is no object")?.remove("check");
    record["name"] = to.into();
    let copy = folder.join(to);
    fs::create_dir(&copy)?;
    fs::write(copy.join("machine.json"), record.to_string())?;
    Ok(())
}

/// Fails unless the host has as many machines as the row says.
fn count(daemon: &Daemon) -> Result<()> {
    let machines = daemon.json(&["ps", "--all"]).or_else(|_| daemon.json(&["ps"]))?;
    let machines = machines.as_array().context("`ps` without a list")?;
    let running = machines.iter().filter(|machine| machine["pid"].is_u64()).count();
    ensure!((machines.len(), running) == (MACHINES, RUNNING), "{} machines, {running} run", machines.len());
    Ok(())
}

/// Reads the metrics once; the bytes of the page.
fn scrape(socket: &Path) -> Result<usize> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, page) = answer.split_once("\r\n\r\n").context("no answer")?;
    let all = page.matches("\nwhimbrel_machine_vcpus{").count();
    ensure!(head.contains(" 200 ") && all == MACHINES, "{head}\nfigures of {all} machines");
    Ok(page.len())
}

fn package(_: &Context) -> Result<Vec<Row>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let built = Command::new(root.join("scripts/deb")).status().context("cannot start scripts/deb")?;
    ensure!(built.success(), "scripts/deb failed");
    let tree = root.join("target/debian/tree");
    let size = bytes_below(&tree)? - bytes_below(&tree.join("DEBIAN"))?;
    let row = Row::new("operate.package", "installed", "MB", &Samples::new(vec![size as f64 / 1e6]));
    Ok(vec![row.goal(Goal::AtMost(60.0))])
}

/// Pages of the manual whose commands fail. Their tests print `N command blocks run`.
fn book(_: &Context) -> Result<Vec<Row>> {
    let mut cargo = super::trust::cargo();
    cargo.args(["test", "--workspace", "--locked", "--test", "it", "--", "guides::the_", "operations::the_"]);
    cargo.arg("--nocapture");
    let output = cargo.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let count =
        |ending: &str, line: &str| line.trim().strip_suffix(ending)?.rsplit(' ').next()?.parse::<u32>().ok();
    let run: u32 = said.lines().filter_map(|line| count(" command blocks run", line)).sum();
    let is_page = |line: &str| line.starts_with("test guides::") || line.starts_with("test operations::");
    let failed = said.lines().filter(|line| is_page(line) && line.ends_with("FAILED")).count();
    ensure!(run > 0 || failed > 0, "no page was run: {}", String::from_utf8_lossy(&output.stderr));
    let case = format!("{run} command blocks of the manual run");
    Ok(vec![
        Row::new("operate.book", case, "failed", &Samples::new(vec![failed as f64])).goal(Goal::AtMost(0.0)),
    ])
}

fn bytes_below(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_below(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
