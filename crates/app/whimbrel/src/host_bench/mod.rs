//! `whimbrel doctor --bench`: what this host can do, in figures that its user can send to others.
//!
//! Two daemons of its own, with data, machines and a store that are gone afterwards, do what a user would
//! have them do. Their guest is a boot sector that writes 128 pages at each tick of its clock, so no image is
//! needed.

mod bench_hosts;
mod guest;

use crate::{context::Context, error::CliError, table::table};
use bench_hosts::BenchHosts;
use serde::Serialize;
use serde_json::Value;
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    time::Instant,
};

/// Memory of each machine.
const MEMORY: &str = "256M";
/// Memory that the host must have for each clone.
const CLONE_MEMORY: u64 = 64 << 20;
/// Bytes of a file that goes into the store and out of it.
const FILE: u64 = 256 << 20;

/// What was measured, of how many times.
#[derive(Debug, Serialize)]
struct Figure {
    what: String,
    unit: &'static str,
    median: f64,
    worst: f64,
    n: usize,
}

/// All figures of this host.
#[derive(Debug, Serialize)]
struct HostFigures {
    host: String,
    whimbrel: &'static str,
    figures: Vec<Figure>,
}

/// Measures this host with files in `folder`, and prints a table.
pub(crate) fn run(context: &Context, folder: &Path, clone_count: u32) -> Result<(), CliError> {
    let hosts = BenchHosts::start(folder)?;
    let mut figures = Vec::new();
    let steps: [(&str, &Step<'_>); 6] = [
        ("starts", &starts),
        ("checkpoints", &checkpoints),
        ("resumes", &resumes),
        ("clones", &|hosts| clones(hosts, clone_count)),
        ("moves", &moves),
        ("the store", &store),
    ];
    for (what, step) in steps {
        context.output.remark(&format!("measuring {what}"));
        figures.extend(step(&hosts)?);
    }
    let figures = HostFigures { host: host(&hosts), whimbrel: env!("CARGO_PKG_VERSION"), figures };
    context.output.result(&figures, text)
}

type Step<'a> = dyn Fn(&BenchHosts) -> Result<Vec<Figure>, CliError> + 'a;

impl Figure {
    /// A figure of milliseconds: the worst is the longest.
    fn times(what: &str, mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
        Self { what: what.to_owned(), unit: "ms", median, worst, n: all.len() }
    }

    /// A rate of bytes.
    fn rate(what: &str, bytes: u64, since: Instant) -> Self {
        let rate = bytes as f64 / 1e6 / since.elapsed().as_secs_f64();
        Self { what: what.to_owned(), unit: "MB/s", median: rate, worst: rate, n: 1 }
    }
}

/// A number in the result of an operation, at a path in it.
fn number(result: &Value, field: &'static str) -> Result<f64, CliError> {
    let found = result.pointer(&format!("/result/{field}")).and_then(Value::as_f64);
    found.ok_or_else(|| CliError::Step { step: field.to_owned(), said: result.to_string() })
}

fn starts(hosts: &BenchHosts) -> Result<Vec<Figure>, CliError> {
    let disk = hosts.boot_disk()?;
    let mut all = Vec::new();
    for name in ["first", "second", "probe"] {
        let begun = Instant::now();
        hosts.call(0, &["run", name, "--memory", MEMORY, "--disk", &disk])?;
        all.push(begun.elapsed().as_secs_f64() * 1e3);
        if name != "probe" {
            hosts.call(0, &["stop", name, "--kill"])?;
        }
    }
    Ok(vec![Figure::times(&format!("start a machine with {MEMORY} of memory"), all)])
}

fn checkpoints(hosts: &BenchHosts) -> Result<Vec<Figure>, CliError> {
    hosts.call(0, &["checkpoint", "probe"])?;
    let (mut pauses, mut totals) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        let done = hosts.call(0, &["checkpoint", "probe"])?;
        pauses.push(number(&done, "pause_ms")?);
        totals.push(number(&done, "total_ms")?);
    }
    Ok(vec![
        Figure::times("stop of the guest for a checkpoint", pauses),
        Figure::times("a checkpoint, until it is durable", totals),
    ])
}

fn resumes(hosts: &BenchHosts) -> Result<Vec<Figure>, CliError> {
    let mut all = Vec::new();
    for _ in 0..5 {
        hosts.call(0, &["suspend", "probe"])?;
        all.push(number(&hosts.call(0, &["resume", "probe"])?, "to_running_ms")?);
    }
    Ok(vec![Figure::times("resume a suspended machine, until it runs", all)])
}

fn clones(hosts: &BenchHosts, most: u32) -> Result<Vec<Figure>, CliError> {
    hosts.call(0, &["checkpoint", "probe", "--tag", "golden"])?;
    let room = size_in("/proc/meminfo", "MemAvailable").unwrap_or_default() / CLONE_MEMORY;
    let count = room.clamp(1, most.max(1).into());
    let done = hosts.call(0, &["clone", "golden", "--count", &count.to_string(), "--prefix", "copy"])?;
    for copy in 1..=count {
        hosts.call(0, &["stop", &format!("copy-{copy}"), "--kill"])?;
    }
    let all = vec![number(&done, "to_running_ms")?];
    Ok(vec![Figure::times(&format!("{count} clones of one capsule, until all run"), all)])
}

fn moves(hosts: &BenchHosts) -> Result<Vec<Figure>, CliError> {
    let (mut downtimes, mut scans, mut totals) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..6 {
        let (from, to) = (turn % 2, 1 - turn % 2);
        let done = hosts.call(from, &["migrate", "probe", bench_hosts::NAMES[to]])?;
        downtimes.push(number(&done, "downtime_ms")?);
        scans.push(number(&done, "pause/scan_ms")?);
        totals.push(number(&done, "total_ms")?);
    }
    Ok(vec![
        Figure::times("stop of the guest for a move within this host", downtimes),
        Figure::times("search for the pages that are left, in that stop", scans),
        Figure::times("a move within this host", totals),
    ])
}

fn store(hosts: &BenchHosts) -> Result<Vec<Figure>, CliError> {
    let (raw, out) = (hosts.path("random.raw"), hosts.path("out.raw"));
    let random = File::open("/dev/urandom")
        .and_then(|random| io::copy(&mut random.take(FILE), &mut File::create(&raw)?));
    random.map_err(CliError::io("write a file for the store"))?;
    let begun = Instant::now();
    hosts.call(0, &["import", &raw, "random"])?;
    let ingest = Figure::rate("store new content", FILE, begun);
    let begun = Instant::now();
    hosts.call(0, &["export", "random", &out])?;
    Ok(vec![ingest, Figure::rate("read it from the store", FILE, begun)])
}

/// Field of a file of `/proc`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let found = text.lines().find(|line| line.starts_with(name))?;
    Some(found.split_once(':')?.1.trim().to_owned())
}

/// Bytes of a field in KiB.
fn size_in(path: &str, name: &str) -> Option<u64> {
    let kib = field(path, name)?.split(' ').next()?.parse::<u64>().ok()?;
    Some(kib << 10)
}

/// Processor, memory, kernel and QEMU of this host.
fn host(hosts: &BenchHosts) -> String {
    let cpu = field("/proc/cpuinfo", "model name").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let qemu = whimbrel_qemu::probe().map_or("unknown".to_owned(), |binary| binary.version.to_string());
    let gib = size_in("/proc/meminfo", "MemTotal").unwrap_or_default() >> 30;
    format!(
        "{cpu}, {cores} cores, {gib} GiB, Linux {}, QEMU {qemu}, guests by {}",
        kernel.trim(),
        hosts.accel()
    )
}

fn text(figures: &HostFigures) -> String {
    let number = |value: f64| if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    let row = |figure: &Figure| {
        let with_unit = |value| format!("{} {}", number(value), figure.unit);
        [figure.what.clone(), with_unit(figure.median), with_unit(figure.worst), figure.n.to_string()]
    };
    let rows = table(["WHAT", "MEDIAN", "WORST", "N"], figures.figures.iter().map(row), "");
    format!("{rows}\n{}\nwhimbrel {}\n", figures.host, figures.whimbrel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_the_median_and_the_longest_of_its_times() {
        let figure = Figure::times("x", vec![3.0, 1.0, 20.6]);
        assert_eq!((figure.median, figure.worst, figure.n), (3.0, 20.6, 3));
        let figures = HostFigures { host: "a host".into(), whimbrel: "1.2.3", figures: vec![figure] };
        let text = text(&figures);
        assert!(
            text.contains("3.0 ms") && text.contains("21 ms") && text.ends_with("a host\nwhimbrel 1.2.3\n"),
            "{text}"
        );
    }
}
