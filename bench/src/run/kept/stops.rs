//! How long the processor of a guest did not run, seen from its host.
//!
//! A virtual CPU is a thread of QEMU, and the kernel says how long a thread has run and how long it waited
//! for a processor (schedstat, in the kernel's documentation of the scheduler). A guest that always has work
//! runs unless it is paused, slowed down, or waits for a page. So the longest time without either is what the
//! guest was stopped for, to within a tick of the kernel.

use crate::hosts::Daemon;
use anyhow::{Context as _, Result};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// Interval at which the thread is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// Time in which the thread that runs most is found.
const FIND: Duration = Duration::from_millis(300);

/// Watches the processor of a guest with work.
pub(super) struct StopWatch {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

/// Nanoseconds that a thread has run, and has waited for a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    ran: u64,
    waited: u64,
}

impl StopWatch {
    /// Watches a machine of this host, whose guest is at work.
    pub(super) fn start(host: &Daemon, machine: &str) -> Result<Self> {
        let file = File::open(busiest_thread(host, machine)?.join("schedstat"))?;
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let thread = spawn(move || watch(&file, &ends));
        Ok(Self { over, thread })
    }

    /// Ends the watch. Milliseconds of the longest stop.
    pub(super) fn end(self) -> Result<f64> {
        self.over.store(true, Ordering::Relaxed);
        let longest = self.thread.join().ok().context("the watch of a guest panicked")?;
        Ok(longest.as_secs_f64() * 1e3)
    }
}

fn watch(file: &File, over: &AtomicBool) -> Duration {
    let (mut longest, mut last) = (Duration::ZERO, None::<(Run, Instant)>);
    while !over.load(Ordering::Relaxed) {
        // The thread has ended if there is nothing to read.
        let Some(now) = read(file) else { break };
        let moment = Instant::now();
        match last {
            Some((before, since)) if before == now => longest = longest.max(moment - since),
            Some((before, since)) => {
                let waited = Duration::from_nanos(now.waited - before.waited);
                let ran = Duration::from_nanos(now.ran - before.ran);
                longest = longest.max((moment - since).saturating_sub(waited + ran));
                last = Some((now, moment));
            }
            None => last = Some((now, moment)),
        }
        sleep(LOOK);
    }
    longest
}

fn read(file: &File) -> Option<Run> {
    let mut text = [0; 80];
    let length = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..length]).ok()?;
    let mut numbers = text.split_whitespace().map(str::parse);
    Some(Run { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
}

/// The thread of a machine's QEMU that runs most at present, which is a virtual CPU while the guest works.
fn busiest_thread(host: &Daemon, machine: &str) -> Result<PathBuf> {
    let machines = host.json(&["ps"])?;
    let mut machines = machines.as_array().context("`ps` without a list")?.iter();
    let pid = machines.find(|one| one["name"] == machine).and_then(|one| one["pid"].as_u64());
    let tasks = format!("/proc/{}/root/proc/{}/task", host.pid()?, pid.context("no process")?);
    let ran = || -> Result<Vec<(PathBuf, u64)>> {
        let threads = fs::read_dir(&tasks)?.flatten().map(|entry| entry.path());
        // One may have ended since it was listed.
        let ran = |path: PathBuf| Some((path.clone(), read(&File::open(path.join("schedstat")).ok()?)?.ran));
        Ok(threads.filter_map(ran).collect())
    };
    let before = ran()?;
    sleep(FIND);
    let grown = ran()?.into_iter().map(|(path, ran)| {
        let earlier = before.iter().find(|(other, _)| *other == path).map_or(0, |(_, ran)| *ran);
        (ran - earlier, path)
    });
    Ok(grown.max().context("a QEMU without threads")?.1)
}
