//! A bell for a thread that looks from time to time whether there is something to do, and at once when
//! somebody rings.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// Rung before anybody waits, it is heard all the same; rung twice, it is heard once.
#[derive(Default)]
pub(crate) struct Notifier {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Notifier {
    /// There may be something to do.
    pub(crate) fn notify(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.heard.notify_all();
    }

    /// Waits until somebody rings, or for so long.
    pub(crate) fn wait(&self, patience: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.heard.wait_timeout_while(rung, patience, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}
