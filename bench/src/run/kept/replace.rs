//! `replace.gap`: how long a guest waits for a write to its disk at most, while the process of its machine is
//! replaced by a new one.
//!
//! The process is that of the tests of `whimbrel-vm`: it has QEMU, memory, a disk, a network port and a
//! console, and passes them on over a socket (`docs/protocols/machine-process.md`).

use crate::harness::{Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};
use whimbrel_testkit::guest::{GuestFiles, GuestOptions, TestAgent};

const MEMORY_MIB: u32 = 256;
const DISK_MIB: u32 = 64;
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a process may take to end.
const END: Duration = Duration::from_secs(10);
/// Between two replacements.
const REST: Duration = Duration::from_millis(500);

/// The process of a machine. When it is dropped it ends with its standard input, and QEMU with it.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(program: &Path, args: &[&str]) -> Result<Self> {
        let mut child =
            Command::new(program).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self { child, input, output })
    }

    /// Reads the next line, which begins with this word.
    fn hear(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.starts_with(word), "{line:?} instead of {word}");
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.input.take());
        let deadline = Instant::now() + END;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            sleep(Duration::from_millis(10));
        }
        // Fails only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The row.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let (program, place) = (build()?, scratch("replace")?);
    let dir = place.path().to_str().context("a path that is not UTF-8")?;
    // The other ends of console and network port.
    let ends = ["tty", "wire"].map(|name| UnixListener::bind(place.path().join(name)));
    let files = GuestFiles::get();
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let options = GuestOptions { buffer_mib: 16, ..GuestOptions::default() }.to_string();
    let (kernel, initrd) = (text(&files.kernel)?, text(&files.initrd)?);
    let (memory, disk) = (MEMORY_MIB.to_string(), DISK_MIB.to_string());
    let words = ["start", dir, &kernel, &initrd, &options, &memory, &disk];
    let mut process = Process::start(&program, &words)?;
    process.hear("QEMU")?;
    process.hear("LISTENS")?;
    let serial = UnixStream::connect(place.path().join("serial"))?;
    let mut agent = TestAgent::over(serial.try_clone()?, serial);
    agent.wait_ready(PATIENCE)?;
    agent.dirty(8, 4000, 64)?;
    let (over, longest) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Duration::ZERO)));
    let (ends_when, noted) = (over.clone(), longest.clone());
    let writes = spawn(move || -> Result<()> {
        while !ends_when.load(Ordering::Relaxed) {
            let begun = Instant::now();
            agent.write(1)?;
            let mut longest = noted.lock().unwrap_or_else(PoisonError::into_inner);
            *longest = longest.max(begun.elapsed());
        }
        Ok(())
    });
    let mut gaps = Vec::new();
    for _ in 0..context.times(100, 20) {
        sleep(REST);
        *longest.lock().unwrap_or_else(PoisonError::into_inner) = Duration::ZERO;
        process = replaced(process, &program, dir)?;
        sleep(REST);
        gaps.push(longest.lock().unwrap_or_else(PoisonError::into_inner).as_secs_f64() * 1e3);
    }
    over.store(true, Ordering::Relaxed);
    writes.join().map_err(|_| anyhow!("the thread that writes panicked"))??;
    drop((process, ends));
    let (gaps, case) = (Samples::new(gaps), "the longest synced write of a guest, a replacement each");
    let row = Row::new("replace.gap", case, "ms", &gaps).percentile(100, &gaps);
    Ok(vec![row.goal(Goal::AtMost(250.0))])
}

/// Replaces the process by a new one.
fn replaced(mut old: Process, program: &Path, dir: &str) -> Result<Process> {
    writeln!(old.input.as_mut().context("no standard input")?, "give")?;
    let mut new = Process::start(program, &["take", dir])?;
    new.hear("HAS complete")?;
    old.hear("GONE")?;
    old.child.wait()?;
    new.hear("LISTENS")?;
    Ok(new)
}

/// The program, of the same profile as this one.
fn build() -> Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    cargo.args(["build", "--locked", "-p", "whimbrel-vm", "--bin", "machine-process"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    ensure!(cargo.status()?.success(), "cannot build the process of a machine");
    let me = std::env::current_exe()?;
    Ok(me.with_file_name("machine-process"))
}
