//! Stun: suspends guest processes that write too fast, for a while.
//!
//! A process is stopped by ptrace, so it continues when this process dies. Each stun has a lease that the
//! host must renew, and a latest end that cannot be extended. A thread in uninterruptible sleep stops only
//! when it wakes; if the stun has ended by then, it has to be detached, so it stays on a list until that is
//! done.

mod choose;
mod writers;

pub(crate) use choose::Bounds;
pub(crate) use writers::Sample;

use crate::{
    config::Config,
    memory::Layout,
    sys::ptrace::{self, ThreadState},
};
use choose::{Choice, choose};
use std::{
    fs,
    time::{Duration, Instant},
};
use whimbrel_guest_protocol::{PROCESSES_MAX, Process};

/// Time for the threads of one process to stop before the next process is stunned.
const STOP_TIMEOUT: Duration = Duration::from_millis(20);
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Interval of checks for threads that had not stopped when they were to be detached.
const DETACH_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
pub(crate) struct Stunned {
    pids: Vec<u32>,
    threads: Vec<i32>,
    detaching: Vec<i32>,
    ends: Option<StunEnd>,
}

#[derive(Debug, Clone, Copy)]
struct StunEnd {
    lease: Instant,
    latest: Instant,
}

impl Stunned {
    /// Stuns the processes that wrote most of the sample, in addition to those that are stunned already.
    pub(crate) fn stun(
        &mut self,
        sample: &Sample,
        layout: Layout,
        each: u32,
        bounds: Bounds,
        config: &Config,
    ) -> Choice {
        let mut writers = writers::of(sample, layout, each);
        // Pages of stunned processes were written before, and may be shared with others.
        writers.retain(|process| !self.pids.contains(&process.pid));
        let room = PROCESSES_MAX.saturating_sub(self.pids.len());
        let mut choice = choose(writers, bounds, |process| config.allows(&process.name));
        choice.stun.truncate(room);
        choice.exempt.truncate(PROCESSES_MAX);
        choice.stun.retain(|process| self.stun_process(process));
        choice
    }

    /// Stops all threads of a process; returns whether any was stopped.
    fn stun_process(&mut self, process: &Process) -> bool {
        let before = self.threads.len();
        let deadline = Instant::now() + STOP_TIMEOUT;
        // Threads that still run may create others, so repeat until no new one is found.
        loop {
            let new: Vec<i32> =
                threads_of(process.pid).filter(|thread| !self.threads.contains(thread)).collect();
            // Fails if the process has another tracer or has ended; then it cannot be stunned.
            let held: Vec<i32> = new.into_iter().filter(|thread| ptrace::stop(*thread).is_ok()).collect();
            if held.is_empty() {
                break;
            }
            self.threads.extend(&held);
            for thread in held {
                while matches!(ptrace::inspect(thread), Ok(ThreadState::Runs)) && Instant::now() < deadline {
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
        let is_held = self.threads.len() > before;
        if is_held {
            self.pids.push(process.pid);
        }
        is_held
    }

    /// Extends the lease from now on, up to `most` since the first process was stunned.
    pub(crate) fn extend(&mut self, lease: Duration, most: Duration) {
        if self.pids.is_empty() {
            return;
        }
        let now = Instant::now();
        let latest = self.ends.map_or(now + most, |ends| ends.latest);
        self.ends = Some(StunEnd { lease: now + lease, latest });
    }

    /// Releases all processes; returns their number.
    pub(crate) fn release(&mut self) -> u32 {
        let count = self.pids.len() as u32;
        self.pids.clear();
        self.ends = None;
        self.detaching.append(&mut self.threads);
        self.detach_stopped();
        count
    }

    fn detach_stopped(&mut self) {
        self.detaching.retain(|thread| {
            let done = match ptrace::inspect(*thread) {
                Ok(ThreadState::Stopped(signal)) => ptrace::detach(*thread, signal).is_ok(),
                // The thread has ended, or is in uninterruptible sleep.
                Ok(ThreadState::Runs) => ptrace::reap(*thread),
                Err(_) => true,
            };
            !done
        });
    }

    /// Handles timers; returns the number of processes released because a lease ended.
    pub(crate) fn tick(&mut self) -> u32 {
        self.detach_stopped();
        let now = Instant::now();
        let over = self.ends.is_some_and(|ends| now >= ends.lease || now >= ends.latest);
        if over { self.release() } else { 0 }
    }

    /// Time until [`Stunned::tick`] must be called; none if nothing is stunned.
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        let now = Instant::now();
        let end = self.ends.map(|ends| ends.lease.min(ends.latest).saturating_duration_since(now));
        let soon = (!self.detaching.is_empty()).then_some(DETACH_INTERVAL);
        end.into_iter().chain(soon).min()
    }
}

fn threads_of(pid: u32) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead as _, BufReader},
        process::{Child, Command, Stdio},
    };

    /// Process that works, and its parent that waits for it; both end when this is dropped. The test is not
    /// the parent, because a parent would see what it does as the tracer.
    struct Worker {
        parent: Child,
        pid: u32,
    }

    impl Worker {
        fn start() -> Self {
            let script = "sh -c 'while :; do :; done' & echo $!; wait";
            let mut parent = Command::new("sh")
                .args(["-c", script])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(parent.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            Self { parent, pid: line.trim().parse().unwrap() }
        }

        fn state(&self) -> String {
            let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("State:\t")).unwrap();
            line[..1].to_owned()
        }

        fn as_process(&self) -> Process {
            Process { pid: self.pid, pages: 1, name: "sh".into() }
        }

        fn kill(&self) {
            Command::new("kill").args(["-9", &self.pid.to_string()]).status().unwrap();
        }

        /// Whether its parent has seen it end.
        fn has_ended(&mut self) -> bool {
            self.parent.try_wait().unwrap().is_some()
        }
    }

    impl Drop for Worker {
        fn drop(&mut self) {
            if !self.has_ended() {
                self.kill();
                let _ = self.parent.kill();
                let _ = self.parent.wait();
            }
        }
    }

    fn wait_for(stunned: &mut Stunned, mut what: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            stunned.tick();
            if what() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    #[test]
    fn who_is_held_stands_still_until_the_lease_is_over_and_its_parent_sees_nothing() {
        let mut worker = Worker::start();
        let mut stunned = Stunned::default();
        assert!(stunned.stun_process(&worker.as_process()));
        stunned.extend(Duration::from_secs(60), Duration::from_secs(60));
        assert!(wait_for(&mut stunned, || worker.state() == "t"), "{}", worker.state());
        assert!(!worker.has_ended(), "to its parent it runs");
        assert_eq!(stunned.tick(), 0);
        stunned.extend(Duration::ZERO, Duration::from_secs(60));
        assert_eq!(stunned.tick(), 1);
        assert!(wait_for(&mut stunned, || worker.state() == "R"), "{}", worker.state());
        assert!(stunned.next_tick().is_none());
    }

    #[test]
    fn no_lease_is_renewed_beyond_the_end() {
        let worker = Worker::start();
        let mut stunned = Stunned::default();
        assert!(stunned.stun_process(&worker.as_process()));
        stunned.extend(Duration::from_secs(60), Duration::ZERO);
        stunned.extend(Duration::from_secs(60), Duration::from_secs(60));
        assert_eq!(stunned.tick(), 1);
    }

    #[test]
    fn one_that_is_killed_while_it_is_held_ends() {
        let mut worker = Worker::start();
        let mut stunned = Stunned::default();
        assert!(stunned.stun_process(&worker.as_process()));
        worker.kill();
        stunned.release();
        assert!(wait_for(&mut stunned, || worker.has_ended()), "a zombie is left");
    }
}
