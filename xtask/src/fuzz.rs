//! `cargo xtask fuzz`: every parser of outside bytes by libFuzzer, guided by what it reaches.
//!
//! The corpus grows below `target/fuzz/corpus` from run to run and begins with the seeds of the targets. An
//! input that breaks a parser is left in `target/fuzz/found/TARGET`; once mended it belongs into
//! `fuzz/kept/TARGET`, which every test run tries.

use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const HOST: &str = "x86_64-unknown-linux-gnu";
/// What libFuzzer needs of the compiler (llvm.org/docs/LibFuzzer.html), and the address sanitizer.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address -Ccodegen-units=1 --cfg fuzzing \
    -Cdebug-assertions -Coverflow-checks";
/// Seconds after which one input counts as an endless loop, and the memory in MiB that one may take.
const LIMITS: [&str; 2] = ["-timeout=20", "-rss_limit_mb=4096"];
/// The one file of SQLite has two static variables of one name, which the sanitizer takes for one that is
/// defined twice.
const SANITIZER: &str = "detect_odr_violation=0";

pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<()> {
    let (minutes, wanted) = parse(arguments)?;
    let place = root.join("target/fuzz");
    let names = write_seeds(root, &place.join("corpus"))?;
    if let Some(unknown) = wanted.iter().find(|name| !names.contains(name)) {
        bail!("no target {unknown:?}; there are: {}", names.join(" "));
    }
    let chosen = if wanted.is_empty() { &names } else { &wanted };
    let program = build(root)?;
    let seconds = (minutes * 60 / chosen.len() as u64).max(1);
    let mut broken = Vec::new();
    for name in chosen {
        if !fuzz(&program, &place, name, seconds)? {
            broken.push(name.as_str());
        }
    }
    if !broken.is_empty() {
        bail!("broken: {}; the inputs are in target/fuzz/found", broken.join(", "));
    }
    Ok(())
}

fn parse(arguments: &[String]) -> Result<(u64, Vec<String>)> {
    let (mut minutes, mut names, mut rest) = (10, Vec::new(), arguments.iter());
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--minutes" => minutes = rest.next().context("--minutes takes a number")?.parse()?,
            name => names.push(name.to_owned()),
        }
    }
    Ok((minutes, names))
}

/// Writes the seeds of all targets. Names of the targets.
fn write_seeds(root: &Path, corpus: &Path) -> Result<Vec<String>> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "-q", "--locked", "-p", "whimbrel-fuzz", "--example", "seeds", "--"]).arg(corpus);
    succeed(cargo.current_dir(root))?;
    let folders = fs::read_dir(corpus).context("cannot list the corpus")?.flatten();
    let mut names: Vec<String> =
        folders.map(|folder| folder.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn build(root: &Path) -> Result<PathBuf> {
    let target = root.join("target/fuzz/build");
    let mut cargo = Command::new("rustup");
    cargo.args(["run", "nightly", "cargo", "build", "--release", "--locked", "-p", "whimbrel-fuzz"]);
    cargo.args(["--features", "libfuzzer", "--bin", "libfuzzer", "--target", HOST, "--target-dir"]);
    // A cargo that runs this program passes its own toolchain on.
    cargo.arg(&target).env("RUSTFLAGS", FLAGS).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    succeed(cargo.current_dir(root)).context("fuzzing needs a nightly toolchain and a C++ compiler")?;
    Ok(target.join(HOST).join("release/libfuzzer"))
}

/// Runs one target. Whether it held.
fn fuzz(program: &Path, place: &Path, name: &str, seconds: u64) -> Result<bool> {
    let found = place.join("found").join(name);
    fs::create_dir_all(&found).with_context(|| format!("cannot create {}", found.display()))?;
    let log = fs::File::create(place.join(format!("{name}.log"))).context("cannot create a log")?;
    let mut command = Command::new(program);
    command
        .env("WHIMBREL_FUZZ", name)
        .env("ASAN_OPTIONS", SANITIZER)
        .args(LIMITS)
        .arg(format!("-max_total_time={seconds}"));
    command.args(["-print_final_stats=1", "-close_fd_mask=1"]);
    command.arg(format!("-artifact_prefix={}/", found.display())).arg(place.join("corpus").join(name));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let held = command.status().with_context(|| format!("cannot run {}", program.display()))?.success();
    let log = fs::read(place.join(format!("{name}.log"))).unwrap_or_default();
    let executed = executed(&String::from_utf8_lossy(&log));
    if executed == 0 && fs::read_dir(&found).is_ok_and(|mut inputs| inputs.next().is_none()) {
        bail!("{name} did not start: see {}", place.join(format!("{name}.log")).display());
    }
    println!("{name:<16} {executed:>12} inputs  {}", if held { "held" } else { "BROKEN" });
    Ok(held)
}

/// How many inputs libFuzzer says that it has tried.
fn executed(log: &str) -> u64 {
    let lines = log.lines().filter_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    lines.filter_map(|count| count.trim().parse::<u64>().ok()).next_back().unwrap_or(0)
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    if !status.success() {
        bail!("failed: {command:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_read_from_the_last_count() {
        let log = "#2 INITED\nstat::number_of_executed_units: 4711\nstat::peak_rss_mb: 60\n";
        assert_eq!(executed(log), 4711);
        assert_eq!(executed("==1== ERROR: libFuzzer: deadly signal"), 0);
    }

    #[test]
    fn minutes_and_targets_are_told_apart() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(parse(&words("wire_frame --minutes 3 pool")).unwrap(), (3, words("wire_frame pool")));
        assert!(parse(&words("--minutes")).is_err());
    }
}
