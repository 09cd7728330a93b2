//! Time that goes on while a host sleeps, and that nobody can set. The only `unsafe` of this crate.
//!
//! `CLOCK_BOOTTIME` (clock_gettime(2)): unlike `Instant` it counts the time in which the host was suspended,
//! in which a lease runs out like in any other. Setting the wall clock does not touch it.

use std::time::Duration;

/// A moment on this host's clock. Means nothing on another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub Duration);

impl BootTime {
    /// This moment.
    pub fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a live, exclusive value of the layout the call writes to, and the clock's number
        // is a constant.
        let done = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
        // It fails only for clocks that do not exist (Linux 2.6.39 and later have this one).
        assert_eq!(done, 0, "the kernel has no boot time");
        Self(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    /// So much later.
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Time until `then`; zero if that has passed.
    pub fn until(self, then: BootTime) -> Duration {
        then.0.saturating_sub(self.0)
    }
}
