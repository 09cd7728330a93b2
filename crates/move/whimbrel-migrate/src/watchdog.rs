//! Watchdog of a migration: ends it before the commit point if its user cancels it or a budget is used up.
//!
//! It closes the link, which ends every wait for the target. From the commit point on nothing ends the
//! migration any more.

use crate::{link::Link, source::MigrateError};
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_capture::CaptureError;

/// Interval at which cancellation and budgets are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Limits of a migration until its commit point.
pub struct Budget<'a> {
    /// Longest time from the pause on.
    pub downtime: Option<Duration>,
    /// Longest time from the offer on.
    pub time: Option<Duration>,
    /// Whether the user has cancelled it.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
}

impl Budget<'_> {
    /// A budget without any limit.
    pub const UNLIMITED: Budget<'static> = Budget { downtime: None, time: None, cancelled: &|| false };

    fn exceeded(&self, begun: Instant, paused: Option<Instant>) -> Option<MigrateError> {
        let over = |what, since: Option<Instant>, limit: Option<Duration>| {
            let (since, limit) = (since?, limit?);
            (since.elapsed() > limit).then_some(MigrateError::OverBudget { what, limit })
        };
        let cancelled = (self.cancelled)().then_some(MigrateError::Capture(CaptureError::Cancelled));
        let downtime = || over("downtime", paused, self.downtime);
        cancelled.or_else(downtime).or_else(|| over("time", Some(begun), self.time))
    }
}

enum State {
    Watching { paused: Option<Instant> },
    Fired(Option<MigrateError>),
    Over,
}

/// Watches one migration, on a thread of its own.
pub(crate) struct Watchdog<'a> {
    budget: &'a Budget<'a>,
    link: &'a dyn Link,
    begun: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

impl<'a> Watchdog<'a> {
    pub(crate) fn new(budget: &'a Budget<'a>, link: &'a dyn Link) -> Self {
        let state = Mutex::new(State::Watching { paused: None });
        Self { budget, link, begun: Instant::now(), state, changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches until the end of the migration, or ends it.
    pub(crate) fn watch(&self) {
        let mut state = self.state();
        while let State::Watching { paused } = *state {
            if let Some(reason) = self.budget.exceeded(self.begun, paused) {
                *state = State::Fired(Some(reason));
                return self.link.close();
            }
            let waited = self.changed.wait_timeout(state, CHECK_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The machine is about to be paused.
    pub(crate) fn pausing(&self) {
        if let State::Watching { paused } = &mut *self.state() {
            paused.get_or_insert_with(Instant::now);
        }
    }

    /// Ends the watch; returns the reason if it has ended the migration.
    pub(crate) fn end(&self) -> Option<MigrateError> {
        let before = std::mem::replace(&mut *self.state(), State::Over);
        self.changed.notify_all();
        match before {
            State::Fired(reason) => reason,
            State::Watching { .. } | State::Over => None,
        }
    }
}
