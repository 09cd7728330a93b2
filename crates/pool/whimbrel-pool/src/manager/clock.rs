//! The clock of a manager: milliseconds since 1970 that neither step nor go back.
//!
//! Silence of benefactors, leases and the age of garbage are differences of these times. So a step of the wall
//! clock, a suspended host and a restart must not look like silence: while a manager runs, only the time of its
//! monotonic clock passes, and a new one starts no earlier than the latest time in the database.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

#[derive(Debug)]
pub(super) struct Clock {
    started: Instant,
    base: i64,
}

impl Clock {
    /// A clock that starts with the wall clock, but not before `latest`.
    pub(super) fn new(latest: i64) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        Self { started: Instant::now(), base: wall.max(latest) }
    }

    /// Current time in milliseconds.
    pub(super) fn now(&self) -> i64 {
        self.base.saturating_add(i64::try_from(self.started.elapsed().as_millis()).unwrap_or(i64::MAX))
    }

    /// Time at which the manager started.
    pub(super) fn start(&self) -> i64 {
        self.base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_does_not_go_back_behind_what_was_stored() {
        let ahead = Clock::new(0).now() + 3_600_000;
        assert!(Clock::new(ahead).now() >= ahead);
        assert!(Clock::new(0).now() < ahead);
    }
}
