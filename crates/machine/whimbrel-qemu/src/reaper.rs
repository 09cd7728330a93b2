//! Reaper of the QEMUs that this program has started: one thread for all of them, so that none stays a
//! zombie, also while another process has its machine.

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    io,
    os::fd::OwnedFd,
    process::Child,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};
use whimbrel_core::lock;

/// Pause after the kernel could not be asked.
const RETRY: Duration = Duration::from_secs(1);

struct Reaper {
    /// Can be read while there are children in `coming`.
    bell: OwnedFd,
    coming: Mutex<Vec<Living>>,
}

struct Living {
    child: Child,
    pidfd: OwnedFd,
}

/// Waits for the end of `child` on the thread of the reaper. Nothing else may call wait for it.
pub(crate) fn reap(child: Child, pidfd: OwnedFd) -> io::Result<()> {
    static REAPER: Mutex<Option<Arc<Reaper>>> = Mutex::new(None);
    let reaper = {
        let mut running = lock(&REAPER);
        match &*running {
            Some(reaper) => reaper.clone(),
            None => running.insert(Reaper::start()?).clone(),
        }
    };
    lock(&reaper.coming).push(Living { child, pidfd });
    rustix::io::write(&reaper.bell, &1_u64.to_ne_bytes())?;
    Ok(())
}

impl Reaper {
    fn start() -> io::Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let reaper = Arc::new(Self { bell, coming: Mutex::default() });
        let own = reaper.clone();
        thread::Builder::new().name("qemu-reap".into()).spawn(move || own.run())?;
        Ok(reaper)
    }

    fn run(&self) {
        let mut living: Vec<Living> = Vec::new();
        loop {
            // Before the list is read: a child that comes in between rings again.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            living.append(&mut lock(&self.coming));
            let mut ended = self.wait(&living).into_iter();
            // The pidfd is asked first: wait also returns when this program traces a child and the child
            // stops, which is not its end.
            living.retain_mut(|one| {
                let has_ended = ended.next() == Some(true);
                if has_ended {
                    // Fails only if it was waited for already.
                    let _ = one.child.wait();
                }
                !has_ended
            });
        }
    }

    /// Waits for the end of a child, or for another child. Returns which have ended.
    fn wait(&self, living: &[Living]) -> Vec<bool> {
        let all = living.iter().map(|one| &one.pidfd).chain([&self.bell]);
        let mut events: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut events, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                tracing::warn!(%errno, "cannot wait for the end of a QEMU");
                thread::sleep(RETRY);
            }
        }
        events.iter().take(living.len()).map(|event| !event.revents().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::{fs, process::Command, time::Instant};

    #[test]
    fn children_that_end_in_any_order_leave_no_zombies() {
        let start = |seconds: &str| {
            let child = Command::new("sleep").arg(seconds).spawn().unwrap();
            let pid = child.id();
            let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
            reap(child, pidfd).unwrap();
            pid
        };
        let pids = ["0.2", "0", "0.1", "60"].map(start);
        let is_there = |pid: &u32| fs::exists(format!("/proc/{pid}/stat")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while pids[..3].iter().any(is_there) {
            assert!(Instant::now() < deadline, "a child stays a zombie");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(is_there(&pids[3]));
        rustix::process::kill_process(
            Pid::from_raw(pids[3].cast_signed()).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        while is_there(&pids[3]) {
            assert!(Instant::now() < deadline, "a child that was killed stays a zombie");
            thread::sleep(Duration::from_millis(5));
        }
    }
}
