//! CPU throttle: lets threads of another process run for a part of the time only.
//!
//! Each thread is alternately stopped by ptrace and left running; while it runs it has no tracer. That works
//! the same for translated and for hardware-run virtual CPUs, needs no cgroup, and ends by itself: a tracer
//! is a thread of this process, and when that ends, in any way, the kernel detaches and wakes the stopped
//! threads. The other threads of the process (main loop, disks) are not stopped, but one that needs a lock of
//! a stopped thread waits with it, for at most one stop.
//!
//! A thread that ends meanwhile, or that has another tracer, is skipped.

use crate::ptrace::{self, Stop};
use rustix::process::Pid;
use std::{
    io,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Time for which threads run, as with QEMU's own throttle (`system/cpu-throttle.c`).
const RUN: Duration = Duration::from_millis(10);
/// Time in which a thread must stop. One that sleeps in a driver takes longer, and is then left running.
const STOP_TIMEOUT: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(50);

/// Share of the time for which throttled threads run, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuShare(u8);

impl CpuShare {
    /// Least share. A smaller one would be noticed by network timeouts and watchdogs.
    pub const MIN: Self = Self(20);
    /// Full share: threads are not stopped.
    pub const FULL: Self = Self(100);

    /// Share of `percent`; none outside [`CpuShare::MIN`] to 100.
    pub fn percent(percent: u8) -> Option<Self> {
        (Self::MIN.0..=Self::FULL.0).contains(&percent).then_some(Self(percent))
    }

    /// Share in percent.
    pub fn as_percent(self) -> u8 {
        self.0
    }

    /// Time for which threads are stopped after they ran for [`RUN`].
    fn stop_time(self) -> Duration {
        RUN * u32::from(100 - self.0) / u32::from(self.0)
    }
}

/// Throttle of threads, which ends when dropped.
#[derive(Debug)]
pub struct Throttle {
    order: Arc<ThrottleState>,
    tracer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ThrottleState {
    /// Current share; none once the throttle has ended.
    share: Mutex<Option<CpuShare>>,
    changed: Condvar,
}

impl Throttle {
    /// Throttles these threads, by thread id. Requires permission to trace them.
    pub fn start(threads: &[u32], share: CpuShare) -> io::Result<Self> {
        let threads: Vec<Pid> =
            threads.iter().filter_map(|id| i32::try_from(*id).ok().and_then(Pid::from_raw)).collect();
        let order = Arc::new(ThrottleState { share: Mutex::new(Some(share)), changed: Condvar::new() });
        let theirs = order.clone();
        let tracer = thread::Builder::new().name("throttle".into()).spawn(move || theirs.run(&threads))?;
        Ok(Self { order, tracer: Some(tracer) })
    }

    /// Sets the share from now on.
    pub fn set(&self, share: CpuShare) {
        let mut now = lock(&self.order.share);
        *now = now.map(|_| share);
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        *lock(&self.order.share) = None;
        self.order.changed.notify_all();
        if let Some(tracer) = self.tracer.take() {
            // A panic was reported by the thread itself, and has released the stopped threads.
            let _ = tracer.join();
        }
    }
}

impl ThrottleState {
    /// Waits for `time`, or until the throttle ends; returns the share.
    fn wait(&self, time: Duration) -> Option<CpuShare> {
        let until = Instant::now() + time;
        let mut share = lock(&self.share);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || share.is_none() {
                return *share;
            }
            share = self.changed.wait_timeout(share, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn run(&self, threads: &[Pid]) {
        while let Some(share) = self.wait(RUN) {
            if share == CpuShare::FULL {
                continue;
            }
            let held: Vec<Pid> = threads.iter().copied().filter(|thread| hold(*thread)).collect();
            self.wait(share.stop_time());
            held.into_iter().for_each(release);
        }
    }
}

/// Stops a thread. If that fails, the thread is not traced any more.
fn hold(thread: Pid) -> bool {
    if ptrace::seize(thread).is_err() {
        return false;
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    let mut asked = ptrace::interrupt(thread).is_ok();
    while asked {
        match ptrace::stop(thread) {
            Ok(Some(Stop::Interrupt)) => return true,
            // The detachment delivers the signal, and the thread runs for one more period.
            Ok(Some(Stop::Signal(signal))) => {
                let _ = ptrace::detach(thread, signal);
                return false;
            }
            // The process was stopped by a signal, or the thread enters a call: not stopped by this tracer.
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < deadline => thread::sleep(NAP),
            Ok(None) | Err(_) => asked = false,
        }
    }
    release(thread);
    false
}

/// Releases a thread. One that did not stop in time stops later, so this waits as long as the thread lives.
fn release(thread: Pid) {
    let gone = |error: &io::Error| error.raw_os_error() == Some(libc::ESRCH);
    let deadline = Instant::now() + Duration::from_secs(1);
    loop {
        let signal = match ptrace::stop(thread) {
            Ok(Some(Stop::Signal(signal))) => signal,
            _ => 0,
        };
        match ptrace::detach(thread, signal) {
            Err(error) if gone(&error) && Instant::now() < deadline && is_traced(thread) => {
                thread::sleep(NAP);
            }
            _ => return,
        }
    }
}

/// Whether the thread has a tracer: `ESRCH` means "runs" as well as "has ended".
fn is_traced(thread: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", thread.as_raw_nonzero()));
    status.is_ok_and(|text| !text.contains("TracerPid:\t0\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// Thread that uses a processor until it is dropped.
    struct Burner(Child);

    impl Burner {
        fn start() -> Self {
            Self(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell"))
        }

        /// Clock ticks that it has used.
        fn burnt(&self) -> u64 {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
            let fields: Vec<_> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
            fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
        }

        fn runs_free(&self) -> bool {
            let pid = Pid::from_raw(self.0.id().cast_signed()).unwrap();
            let before = self.burnt();
            wait_for(|| self.burnt() > before) && !is_traced(pid)
        }
    }

    impl Drop for Burner {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn wait_for(mut what: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if what() {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    }

    #[test]
    fn a_share_is_bounded_and_says_how_long_to_hold() {
        assert_eq!(CpuShare::percent(19), None);
        assert_eq!(CpuShare::percent(101), None);
        assert_eq!(CpuShare::MIN.stop_time(), Duration::from_millis(40));
        assert_eq!(CpuShare::percent(50).unwrap().stop_time(), RUN);
        assert!(CpuShare::FULL.stop_time().is_zero());
    }

    #[test]
    fn a_throttled_thread_runs_less_and_freely_afterwards() {
        let burner = Burner::start();
        assert!(burner.runs_free());
        let throttle = Throttle::start(&[burner.0.id(), 1 << 30], CpuShare::MIN).unwrap();
        let pid = Pid::from_raw(burner.0.id().cast_signed()).unwrap();
        assert!(wait_for(|| is_traced(pid)), "it is never held");
        let (before, begun) = (burner.burnt(), Instant::now());
        thread::sleep(Duration::from_secs(1));
        // A tick is 10 ms. On a busy machine only the upper bound is guaranteed.
        let share = (burner.burnt() - before) as f64 / (begun.elapsed().as_secs_f64() * 100.0);
        assert!(share < 0.6, "{share} of the time instead of a fifth");
        assert!(share > 0.0, "it does not run at all");
        throttle.set(CpuShare::FULL);
        assert!(burner.runs_free());
        throttle.set(CpuShare::MIN);
        drop(throttle);
        assert!(burner.runs_free(), "nobody holds it once the throttle is gone");
    }

    const VICTIM: &str = "WHIMBREL_TEST_THROTTLE";

    /// Run by the test below in a process of its own, which is killed.
    #[test]
    fn as_a_process_that_is_killed() {
        let Ok(victim) = std::env::var(VICTIM) else { return };
        let _throttle = Throttle::start(&[victim.parse().unwrap()], CpuShare::MIN).unwrap();
        thread::sleep(Duration::from_secs(60));
    }

    #[test]
    fn the_death_of_who_throttles_lets_go() {
        let burner = Burner::start();
        let pid = Pid::from_raw(burner.0.id().cast_signed()).unwrap();
        for _ in 0..5 {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "cpu_throttle::tests::as_a_process_that_is_killed", "--nocapture"]);
            command.env(VICTIM, burner.0.id().to_string()).stdout(Stdio::null());
            let mut throttler = command.spawn().unwrap();
            let held = wait_for(|| is_traced(pid));
            throttler.kill().unwrap();
            throttler.wait().unwrap();
            assert!(held, "it was never held");
            assert!(burner.runs_free(), "it is held by nobody");
        }
    }
}
