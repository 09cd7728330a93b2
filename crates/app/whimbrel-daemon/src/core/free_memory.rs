//! Free memory: gives back to the kernel what ended work has freed.
//!
//! glibc keeps freed memory in the arena of the thread that allocated it, and has eight arenas a processor.
//! Every operation has threads of its own, and a part of what they allocate stays, such as cached frames. So
//! one arena after another grows to the most that an operation needs at once: after 110 checkpoints of a
//! machine of 192 MiB a daemon had 1.37 GB of memory, of which it used 0.23 GB.
//!
//! The process of a machine also gives back what of the program its start has read. Where it is the only one
//! of its program, which is so while no daemon runs, these pages are its memory.

use crate::{core::error::DaemonError, daemon::Daemon};
use std::{fs, ops::Range, path::Path, sync::Arc, time::Duration};

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

/// Gives back free memory, and the pages of the program: those that are used are found again in the page
/// cache.
pub(crate) fn give_back_program() {
    give_back();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let Ok(program) = fs::read_link("/proc/self/exe") else { return };
    for range in unchanged_ranges(&smaps, &program) {
        // SAFETY: the mapping is private and read-only and has no page of its own, so each of its pages is
        // that of the file, which is read again when it is touched. Nothing changes the mappings of the
        // program after its start.
        let done = unsafe { libc::madvise(range.start as *mut _, range.len(), libc::MADV_DONTNEED) };
        if done != 0 {
            tracing::debug!(error = %std::io::Error::last_os_error(), "cannot give pages of the program back");
        }
    }
}

/// Addresses at which `program` is mapped read-only and as its file is, by the text of `/proc/PID/smaps`. A
/// page that was changed once, as relocations are, counts as anonymous (proc_pid_smaps(5)).
fn unchanged_ranges(smaps: &str, program: &Path) -> Vec<Range<usize>> {
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let (mut found, mut current) = (Vec::new(), None);
    for line in smaps.lines() {
        if let Some(("Anonymous", size)) = line.split_once(':') {
            found.extend(current.take().filter(|_| size.trim() == "0 kB"));
        } else if let Some((from, rest)) = line.split_once('-')
            && let Some(from) = address(from)
        {
            let mut words = rest.split_whitespace();
            let to = words.next().and_then(address);
            let is_unchanged = words.next().is_some_and(|rights| matches!(rights, "r--p" | "r-xp"));
            let is_program = words.nth(3).is_some_and(|path| Path::new(path) == program);
            current = to.map(|to| from..to).filter(|_| is_unchanged && is_program);
        }
    }
    found
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
    fn only_mappings_of_the_program_that_nobody_changed_are_given_back() {
        let mapping = |range: &str, rights: &str, path: &str, anonymous: u32| {
            format!(
                "{range} {rights} 0000f000 fe:01 77 {path}\nSize: 4 kB\nAnonymous: {anonymous} kB\nAnonHugePages: 0 kB\n"
            )
        };
        let smaps = [
            mapping("1000-3000", "r--p", "/bin/whimbrel", 0),
            mapping("3000-9000", "r-xp", "/bin/whimbrel", 0),
            // Relocated and then protected, written, of another file, of none.
            mapping("9000-a000", "r--p", "/bin/whimbrel", 4),
            mapping("a000-b000", "rw-p", "/bin/whimbrel", 0),
            mapping("b000-c000", "r-xp", "/lib/libc.so.6", 0),
            mapping("c000-d000", "rw-p", "", 0),
        ];
        let found = unchanged_ranges(&smaps.concat(), Path::new("/bin/whimbrel"));
        assert_eq!(found, [0x1000..0x3000, 0x3000..0x9000]);
        // Nothing is lost: the test goes on in the program that has given its pages back.
        let own = fs::read_link("/proc/self/exe").unwrap();
        assert!(!unchanged_ranges(&fs::read_to_string("/proc/self/smaps").unwrap(), &own).is_empty());
        give_back_program();
        assert_eq!(unchanged_ranges(&smaps.concat(), Path::new("/bin/other")), []);
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
