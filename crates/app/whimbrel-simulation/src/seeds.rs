//! Seeds: each runs in a forked child, on one processor, with an alarm. Parents only wait and print. This
//! module has `unsafe`: fork and what the child needs before it begins.

use crate::{
    raw,
    report::{self, Outcome, PIPE, Violation},
    scenes::Scene,
    world::{self, Config},
};
use anyhow::{Context, Result};
use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::Read,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};
use whimbrel_core::loss::{self, Loss};

/// Seconds after which a seed counts as hung.
const SECONDS_MAX: u32 = 120;

/// One run of a scene.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) scene: &'static Scene,
    pub(crate) config: Config,
    /// What is brought back for it.
    pub(crate) loss: Option<Loss>,
}

/// Children that are running, `limit` at most.
pub(crate) struct Children {
    limit: usize,
    running: BTreeMap<i32, (Run, File, usize)>,
    free: VecDeque<usize>,
}

impl Children {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, running: BTreeMap::new(), free: (0..limit).collect() }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.running.len() >= self.limit
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    pub(crate) fn start(&mut self, run: Run) -> Result<()> {
        let (read, write) = pipe()?;
        let lane = self.free.pop_front().unwrap_or(0);
        // SAFETY: this process has one thread, so the child may do anything.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("cannot fork"),
            0 => child(&run, write.as_raw_fd(), lane),
            pid => {
                self.running.insert(pid, (run, File::from(read), lane));
                Ok(())
            }
        }
    }

    /// Waits for a child to end.
    pub(crate) fn next(&mut self) -> Result<(Run, Outcome)> {
        loop {
            let mut status = 0;
            // One child alone is waited for by its own number: others may be waited for elsewhere.
            let only = self.running.keys().next().filter(|_| self.running.len() == 1);
            // SAFETY: the status is a place of this function.
            let pid = unsafe { libc::waitpid(only.copied().unwrap_or(-1), &mut status, 0) };
            if pid < 0 {
                return Err(std::io::Error::last_os_error()).context("cannot wait for a seed");
            }
            let Some((run, mut pipe, lane)) = self.running.remove(&pid) else { continue };
            self.free.push_back(lane);
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).context("cannot read what a seed says")?;
            let outcome = serde_json::from_slice(&bytes).unwrap_or_else(|_| died(status));
            return Ok((run, outcome));
        }
    }
}

/// Runs one seed and waits for it.
pub(crate) fn run_one(run: Run) -> Result<Outcome> {
    let mut children = Children::new(1);
    children.start(run)?;
    Ok(children.next()?.1)
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the call fills two descriptors, which nobody else has.
    let ends = unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(std::io::Error::last_os_error()).context("cannot make a pipe");
        }
        ends.map(|end| OwnedFd::from_raw_fd(end))
    };
    Ok(ends.into())
}

/// Outcome of a child that could not say one itself.
fn died(status: i32) -> Outcome {
    let (rule, text) = match libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)) {
        Some(libc::SIGALRM) => ("ends_or_says", format!("no end after {SECONDS_MAX} seconds of real time")),
        Some(signal) => ("no_panic", format!("killed by signal {signal}")),
        None => ("no_panic", format!("exit code {}", libc::WEXITSTATUS(status))),
    };
    let violation = Some(Violation { rule: rule.to_owned(), text });
    Outcome { digest: 0, steps: 0, elapsed: 0, switches: 0, faults: 0, violation, story: Vec::new() }
}

/// Runs the seed in this process, which ends with it.
fn child(run: &Run, pipe: i32, lane: usize) -> ! {
    // SAFETY: plain calls on this process alone; the set is a value of this function.
    unsafe {
        libc::dup2(pipe, PIPE);
        libc::alarm(SECONDS_MAX);
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(lane, &mut set);
        // Where there is no such processor, the threads are slower and do the same.
        let arguments = [0, size_of_val(&set), &raw const set as usize, 0, 0, 0];
        raw::call(libc::SYS_sched_setaffinity, arguments);
    }
    report::watch_panics();
    run.loss.into_iter().for_each(loss::bring_back);
    world::begin(&run.config);
    // A thread of its own begins with no hash keys and no random numbers of its parent.
    let scene = run.scene.run;
    let played = std::thread::spawn(scene).join();
    if played.is_err() {
        report::violation("no_panic", "the scene broke off");
    }
    world::end()
}
