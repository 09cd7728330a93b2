//! Free memory: gives back to the kernel what ended work has freed. The only `unsafe` of this crate.
//!
//! glibc keeps freed memory in the arena of the thread that allocated it, and has eight arenas a processor.
//! Every operation has threads of its own, and a part of what they allocate stays, such as cached frames. So
//! one arena after another grows to the most that an operation needs at once: after 110 checkpoints of a
//! machine of 192 MiB a daemon had 1.37 GB of memory, of which it used 0.23 GB.

use crate::{core::error::DaemonError, daemon::Daemon};
use std::{fs, sync::Arc, time::Duration};

/// Interval of the checks.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Growth since memory was last given back that is worth the work: a call for each free range.
const GROWTH_MIN: u64 = 32 << 20;
/// Checks after which memory is given back again if it is that much above the least so far: when it was given
/// back last, work may have been under way that has ended since.
const AGAIN_AFTER: u32 = 6;

impl Daemon {
    /// Starts the thread that gives free memory back.
    pub(crate) fn start_freeing_memory(self: &Arc<Self>) -> Result<(), DaemonError> {
        let host = self.clone();
        let work = move || {
            let mut freed = FreeMemory::default();
            while host.sleep_unless_closing(CHECK_EVERY) {
                freed.check(private_bytes(), give_back);
            }
        };
        let thread = std::thread::Builder::new().name("free-memory".into()).spawn(work);
        thread.map(drop).map_err(|source| DaemonError::Thread { source })
    }
}

/// Private memory of the process after it was last given back.
#[derive(Default)]
struct FreeMemory {
    after: u64,
    /// Least of it so far; none before the first time.
    least: Option<u64>,
    /// Checks since then.
    checks: u32,
}

impl FreeMemory {
    /// Gives memory back if the process has grown to `now` bytes. `give_back` returns what is left.
    fn check(&mut self, now: u64, give_back: impl FnOnce() -> u64) {
        // The process may have shrunk by itself.
        self.after = self.after.min(now);
        self.checks += 1;
        let is_above = self.least.is_some_and(|least| now >= least + GROWTH_MIN);
        if now - self.after >= GROWTH_MIN || (is_above && self.checks >= AGAIN_AFTER) {
            self.after = give_back();
            self.checks = 0;
            self.least = Some(self.least.map_or(self.after, |least| least.min(self.after)));
            tracing::debug!(before = now, after = self.after, "gave free memory back");
        }
    }
}

/// Gives free memory back to the kernel. Returns the private memory of the process afterwards.
fn give_back() -> u64 {
    // SAFETY: the call changes nothing but free memory of the allocator, which it locks.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
    private_bytes()
}

/// Memory that only this process has: not that of guests, which it shares with their QEMUs.
fn private_bytes() -> u64 {
    // Total, resident and shared pages, and others (proc_pid_statm(5)).
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut pages = statm.split(' ').skip(1).map(|field| field.parse().unwrap_or(0u64));
    let (resident, shared) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    resident.saturating_sub(shared) * rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_after_growth_and_not_before() {
        let mut freed = FreeMemory::default();
        let mut calls = Vec::new();
        for (now, left) in [(100, 80), (110, 0), (112, 90), (60, 0), (91, 0), (92, 70)] {
            freed.check(now << 20, || {
                calls.push(now);
                left << 20
            });
        }
        assert_eq!(calls, [100, 112, 92]);
        // The work that had 200 has ended, and nothing has grown since.
        let mut left = [200, 72].into_iter();
        for now in [200; 7].into_iter().chain([72; 12]) {
            freed.check(now << 20, || left.next().expect("two calls") << 20);
        }
        assert_eq!((left.next(), freed.after), (None, 72 << 20));
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_many_threads_have_freed_goes_back_although_some_of_it_stays() {
        const BLOCKS: usize = 8192;
        let fill = || {
            let blocks: Vec<Box<[u8]>> = (0..BLOCKS).map(|_| vec![1; 4096].into()).collect();
            // One block in 64 stays, also at the end of each arena.
            blocks.into_iter().rev().step_by(64).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(fill)).collect();
        let stays: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let before = private_bytes();
        let after = give_back();
        // Half of what was allocated: tests beside this one allocate too.
        assert!(after + (128 << 20) < before, "{before} bytes before, {after} after");
        assert_eq!(stays.iter().map(Vec::len).sum::<usize>(), 8 * BLOCKS / 64);
    }
}
