//! Builds the test binaries of the workspace and runs them as `cargo test` does, and adds the time of each
//! case.
//!
//! A binary runs in its package's folder. One that failed does not stop the rest. [`Scope::Changed`] skips a
//! binary whose bytes, and those of the programs beside it, are the ones that passed before; what passed is
//! kept below `target/`.
//!
//! Cases that failed run again at the end, one at a time and beside nothing else. Those that pass then are
//! named as unsteady: guests are translated on two cores that all tests share, and one late answer among
//! 1,500 cases is no reason to refuse a change that did not cause it.
//!
//! A binary that says nothing for [`SILENCE_MAX`] is ended, and its cases without a result have failed: a
//! case that waits for ever would otherwise take the whole run with it, and nobody would know which it was.

use crate::{check::Scope, lint_build};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::{
    collections::{HashMap, HashSet},
    fs,
    hash::{DefaultHasher, Hasher},
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

/// The cases on whole hosts, and those of its modules that a small change is tried with.
const E2E_CASES: &str = "e2e it";
const E2E_CHANGED: &[&str] = &["life::", "migration::", "stages::"];
/// Cases on whole hosts that run beside as many as there are processors: each of them waits for a part of its
/// time, for links of a given rate and for leases.
const E2E_BESIDE: usize = 1;
/// Packages of the programs inside guests.
const GUEST: &[&str] = &["agent ", "test-agent ", "whimbrel-guest-protocol "];
/// Time without a line after which a binary counts as one that hangs. The longest case takes two minutes, and
/// several times that on a slow machine beside others.
const SILENCE_MAX: Duration = Duration::from_secs(15 * 60);
/// How many of the slowest cases are shown.
const SLOWEST: usize = 10;

/// A program of tests that was built.
pub(crate) struct TestBinary {
    /// Folder of the package and name of the target.
    name: String,
    program: PathBuf,
    package_dir: PathBuf,
}

/// What cargo says of something that it built; the fields that are needed here.
#[derive(Deserialize)]
struct Artifact {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Compiles all tests and the programs that they start; checks them by clippy meanwhile if `lints` says so.
pub(crate) fn build(root: &Path, lints: bool) -> Result<Vec<TestBinary>> {
    let mut command = Command::new(env!("CARGO"));
    if lints {
        lint_build::prepare(&mut command, root)?;
    }
    command.args(["test", "--workspace", "--no-run", "--locked"]);
    command.arg("--message-format=json-render-diagnostics").current_dir(root).stdout(Stdio::piped());
    let mut cargo = command.spawn().context("cannot start cargo test")?;
    let output = BufReader::new(cargo.stdout.take().expect("a pipe was asked for"));
    let mut binaries = Vec::new();
    for line in output.lines() {
        let line = line.context("cannot read what cargo says")?;
        let artifact: Artifact =
            serde_json::from_str(&line).context("cargo says something else than JSON")?;
        binaries.extend(test_binary(artifact));
    }
    if !cargo.wait().context("cannot wait for cargo")?.success() {
        bail!("build failed; repeat it with: cargo test --workspace --no-run --locked");
    }
    binaries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(binaries)
}

fn test_binary(artifact: Artifact) -> Option<TestBinary> {
    let (target, profile) = (artifact.target?, artifact.profile?);
    if artifact.reason != "compiler-artifact" || !profile.test {
        return None;
    }
    let package_dir = artifact.manifest_path?.parent()?.to_owned();
    let package = package_dir.file_name()?.to_string_lossy().into_owned();
    let part = match target.kind.first().map(String::as_str) {
        Some("test") => target.name,
        Some("lib") => "unit".to_owned(),
        _ => format!("{} unit", target.name),
    };
    Some(TestBinary { name: format!("{package} {part}"), program: artifact.executable?, package_dir })
}

/// The cases that took longest.
#[derive(Default)]
pub(crate) struct CaseTimes(Vec<(Duration, String)>);

impl CaseTimes {
    pub(crate) fn print(mut self) {
        self.0.sort_unstable_by(|a, b| b.cmp(a));
        println!("\n{:>7}  slowest cases", "seconds");
        self.0.iter().take(SLOWEST).for_each(|(time, name)| println!("{:>7.1}  {name}", time.as_secs_f64()));
    }
}

/// Runs the tests, all of them even where some fail. The cases on whole hosts wait more than they compute, so
/// the other binaries run beside them, and what each prints appears when it ends.
pub(crate) fn run(root: &Path, binaries: &[TestBinary], scope: Scope) -> Result<CaseTimes> {
    let passed = Mutex::new(Passed::read(root, binaries));
    let lane = |hosts: bool| binaries.iter().filter(move |binary| (binary.name == E2E_CASES) == hosts);
    let (hosts, others) = std::thread::scope(|scope_of_threads| {
        let hosts = scope_of_threads.spawn(|| run_lane(lane(true), &passed, scope));
        let others = run_lane(lane(false), &passed, scope);
        (hosts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), others)
    });
    let (mut hosts, others) = (hosts?, others?);
    hosts.times.0.extend(others.times.0);
    hosts.failed.extend(others.failed);
    let failed = repeat_failed(hosts.failed)?;
    if !failed.is_empty() {
        bail!("tests failed in: {}", failed.join(", "));
    }
    Ok(hosts.times)
}

/// Result of binaries that ran one after another.
#[derive(Default)]
struct Lane<'a> {
    times: CaseTimes,
    failed: Vec<Failure<'a>>,
}

/// A binary that did not pass.
struct Failure<'a> {
    binary: &'a TestBinary,
    /// Names of the cases that failed; none if the binary broke off before it could say.
    cases: Vec<String>,
}

/// Runs the failed cases again, one at a time. Names of the binaries of which one fails again.
fn repeat_failed(failures: Vec<Failure<'_>>) -> Result<Vec<&str>> {
    let mut failed = Vec::new();
    for Failure { binary, cases } in failures {
        let mut passed = !cases.is_empty();
        for case in &cases {
            println!("\n{} {case}: again, by itself", binary.name);
            let repeated = passes_alone(binary, case)?;
            passed &= repeated;
            println!("{}: {} {case}", if repeated { "unsteady, mend it" } else { "failed" }, binary.name);
        }
        if !passed {
            failed.push(binary.name.as_str());
        }
    }
    Ok(failed)
}

fn passes_alone(binary: &TestBinary, case: &str) -> Result<bool> {
    let mut command = command(binary);
    let child = command.args(["--exact", case]).stdout(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("cannot start {}", binary.name))?;
    // A name that matches no case passes too, with nothing run.
    let mut passed = false;
    let status = each_line(binary, child, |line| {
        passed |= line.contains("test result: ok. 1 passed");
        println!("{line}");
    })?;
    Ok(passed && status.is_some_and(|status| status.success()))
}

/// Calls `each` with every line that a binary prints. Its exit status, none if it was ended because it said
/// nothing for too long.
fn each_line(
    binary: &TestBinary,
    mut child: Child,
    mut each: impl FnMut(&str),
) -> Result<Option<ExitStatus>> {
    let (said, lines) = mpsc::channel();
    let output = BufReader::new(child.stdout.take().expect("a pipe was asked for"));
    // Ends with the binary, or with a process that it left behind: nobody waits for that one.
    std::thread::spawn(move || output.split(b'\n').try_for_each(|line| said.send(line)));
    loop {
        match lines.recv_timeout(SILENCE_MAX) {
            // A case may print any bytes.
            Ok(Ok(line)) => each(&String::from_utf8_lossy(&line)),
            Ok(Err(error)) => {
                return Err(error).with_context(|| format!("cannot read what {} prints", binary.name));
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                // A process that a case left behind may hold the pipe.
                if let Some(status) = child.try_wait()? {
                    return Ok(Some(status));
                }
                println!(
                    "{}: no word for {} minutes, so it is ended",
                    binary.name,
                    SILENCE_MAX.as_secs() / 60
                );
                child.kill().with_context(|| format!("cannot end {}", binary.name))?;
                child.wait().with_context(|| format!("cannot wait for {}", binary.name))?;
                return Ok(None);
            }
        }
    }
    child.wait().map(Some).with_context(|| format!("cannot wait for {}", binary.name))
}

fn command(binary: &TestBinary) -> Command {
    let mut command = Command::new(&binary.program);
    command.current_dir(&binary.package_dir).env("CARGO", env!("CARGO"));
    command
}

fn run_lane<'a>(
    binaries: impl Iterator<Item = &'a TestBinary>,
    passed: &Mutex<Passed>,
    scope: Scope,
) -> Result<Lane<'a>> {
    let mut lane = Lane::default();
    for binary in binaries {
        let digest = digest(&binary.program)?;
        if scope == Scope::Changed && lock(passed).has(binary, digest) {
            println!("{}: passed before, unchanged", binary.name);
            continue;
        }
        match run_one(binary, scope, &mut lane.times)? {
            None => lock(passed).add(binary, digest),
            Some(cases) => lane.failed.push(Failure { binary, cases }),
        }
        lock(passed).write()?;
    }
    Ok(lane)
}

fn lock(passed: &Mutex<Passed>) -> MutexGuard<'_, Passed> {
    passed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one binary. The cases that failed, if it did not pass.
fn run_one(binary: &TestBinary, scope: Scope, times: &mut CaseTimes) -> Result<Option<Vec<String>>> {
    let mut command = command(binary);
    command.stdout(Stdio::piped());
    // libtest tells the time of a case only as an unstable option, which this variable allows.
    command.env("RUSTC_BOOTSTRAP", "1").args(["-Zunstable-options", "--report-time"]);
    let is_long = binary.name == E2E_CASES;
    if is_long {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        command.arg(format!("--test-threads={}", processors + E2E_BESIDE));
    }
    let filters = if scope == Scope::Changed && is_long { E2E_CHANGED } else { &[] };
    command.args(filters);
    let child = command.spawn().with_context(|| format!("cannot start {}", binary.program.display()))?;
    let (mut printed, mut failed) = (format!("{}\n", binary.name), Vec::new());
    let mut ended = HashSet::new();
    let status = each_line(binary, child, |line| {
        if let Some((case, time)) = case_time(line) {
            times.0.push((time, format!("{} {case}", binary.name)));
        }
        ended.extend(ended_case(line).map(str::to_owned));
        failed.extend(failed_case(line).map(str::to_owned));
        printed.push_str(line);
        printed.push('\n');
        if is_long {
            print!("{}", std::mem::take(&mut printed));
        }
    })?;
    print!("{printed}");
    match status {
        Some(status) => Ok((!status.success()).then_some(failed)),
        None => {
            failed.extend(cases(binary, filters)?.into_iter().filter(|case| !ended.contains(case)));
            Ok(Some(failed))
        }
    }
}

/// Names of the cases of a binary.
fn cases(binary: &TestBinary, filters: &[&str]) -> Result<Vec<String>> {
    let output = command(binary).arg("--list").args(filters).output();
    let output = output.with_context(|| format!("cannot run {}", binary.name))?;
    let listed = String::from_utf8_lossy(&output.stdout);
    Ok(listed.lines().filter_map(|line| Some(line.strip_suffix(": test")?.to_owned())).collect())
}

/// The name in `test NAME ... RESULT`.
fn ended_case(line: &str) -> Option<&str> {
    let (case, _) = line.strip_prefix("test ")?.split_once(" ... ")?;
    Some(case.strip_suffix(" - should panic").unwrap_or(case))
}

/// The name in `test NAME ... FAILED <1.234s>`.
fn failed_case(line: &str) -> Option<&str> {
    let (_, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    ended_case(line).filter(|_| rest.starts_with("FAILED"))
}

/// Takes `test NAME ... ok <1.234s>` apart.
fn case_time(line: &str) -> Option<(&str, Duration)> {
    let (case, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, time) = rest.strip_suffix("s>")?.split_once('<')?;
    Some((case, Duration::from_secs_f64(time.parse().ok().filter(|seconds| *seconds >= 0.0)?)))
}

/// The digest of each binary when it last passed.
struct Passed {
    path: PathBuf,
    digests: HashMap<String, u64>,
    /// Of the programs that tests start: a change of one is a change of all who may start it.
    programs: u64,
}

impl Passed {
    fn read(root: &Path, binaries: &[TestBinary]) -> Self {
        let path = root.join("target/xtask-passed.json");
        let text = fs::read(&path).unwrap_or_default();
        // A file that cannot be read is none: everything runs.
        let digests = serde_json::from_slice(&text).unwrap_or_default();
        let started = ["whimbrel", "memory-target", "wire-remote", "examples/s3_server"];
        let started = started.iter().map(|name| root.join("target/debug").join(name));
        // Guests run programs that cases build themselves: the tests of their packages stand for them.
        let guest = binaries.iter().filter(|binary| GUEST.iter().any(|name| binary.name.starts_with(name)));
        let files = started.chain(guest.map(|binary| binary.program.clone()));
        let programs = files.fold(0u64, |sum, path| sum.rotate_left(1) ^ digest(&path).unwrap_or_default());
        Self { path, digests, programs }
    }

    /// Unit tests start no program but their own.
    fn of(&self, binary: &TestBinary, digest: u64) -> u64 {
        digest ^ if binary.name.ends_with(" unit") { 0 } else { self.programs }
    }

    fn has(&self, binary: &TestBinary, digest: u64) -> bool {
        self.digests.get(&binary.name) == Some(&self.of(binary, digest))
    }

    fn add(&mut self, binary: &TestBinary, digest: u64) {
        self.digests.insert(binary.name.clone(), self.of(binary, digest));
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&self.digests)?;
        fs::write(&self.path, text).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// A digest of a file's bytes, good enough to see that it was built anew.
fn digest(path: &Path) -> Result<u64> {
    let mut file = fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let (mut hasher, mut buffer) = (DefaultHasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))? {
            0 => return Ok(hasher.finish()),
            n => hasher.write(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_case_is_found_in_its_line() {
        let line = "test life::a_machine_boots ... ok <12.345s>";
        assert_eq!(case_time(line), Some(("life::a_machine_boots", Duration::from_millis(12_345))));
        assert_eq!(case_time("test a ... FAILED <0.5s>"), Some(("a", Duration::from_millis(500))));
        assert_eq!(case_time("test a ... ignored, takes hours"), None);
        assert_eq!(case_time("test result: ok. 3 passed; finished in 0.01s"), None);
    }

    #[test]
    fn a_case_that_failed_is_found_in_its_line() {
        assert_eq!(failed_case("test life::boots ... FAILED <12.345s>"), Some("life::boots"));
        assert_eq!(failed_case("test life::boots - should panic ... FAILED"), Some("life::boots"));
        assert_eq!(failed_case("test life::boots ... ok <12.345s>"), None);
        assert_eq!(failed_case("test result: FAILED. 3 passed"), None);
        assert_eq!(ended_case("test a ... ignored, takes hours"), Some("a"));
    }
}
