//! A notifier that wakes a thread which otherwise polls at intervals.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};
use whimbrel_core::lock;

/// A notification before the wait is remembered; several count as one.
#[derive(Default)]
pub(crate) struct Notifier {
    notified: Mutex<bool>,
    changed: Condvar,
}

impl Notifier {
    /// Wakes the waiter: there may be work.
    pub(crate) fn notify(&self) {
        *lock(&self.notified) = true;
        self.changed.notify_all();
    }

    /// Waits for a notification, at most for `patience`.
    pub(crate) fn wait(&self, patience: Duration) {
        let rung = lock(&self.notified);
        let waited = self.changed.wait_timeout_while(rung, patience, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}
