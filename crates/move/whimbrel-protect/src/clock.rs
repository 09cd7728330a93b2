//! Boot time: a clock that keeps counting while the host sleeps and that nobody can set. The only `unsafe` of
//! this crate.
//!
//! `CLOCK_BOOTTIME` (clock_gettime(2)): unlike `Instant`, it counts the time in which the host was suspended,
//! so a lease expires during a suspend as well. Setting the wall clock does not affect it.

use std::time::Duration;

/// A point in this host's boot time. Meaningless on another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub Duration);

impl BootTime {
    /// The current boot time.
    pub fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a live, exclusive value of the layout the call writes to, and the clock's number
        // is a constant.
        let done = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
        // The call fails only for unknown clocks; this one exists since Linux 2.6.39.
        assert_eq!(done, 0, "the kernel has no boot time");
        Self(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    /// Adds `span` to this time.
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Time until `then`; zero if that has passed.
    pub fn until(self, then: BootTime) -> Duration {
        then.0.saturating_sub(self.0)
    }
}
