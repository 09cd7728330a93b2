//! The memory budget of a write (the sliding window): writers wait while too many bytes are in flight.

use std::sync::{Condvar, Mutex, PoisonError};

/// A limit for bytes in flight.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    most: usize,
    used: Mutex<usize>,
    less: Condvar,
}

impl MemoryBudget {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, used: Mutex::new(0), less: Condvar::new() }
    }

    /// Waits until `bytes` fit. If nothing is in flight, any number fits. `stop` ends the wait.
    pub(crate) fn take(&self, bytes: usize, stop: impl Fn() -> bool) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used > 0 && *used + bytes > self.most && !stop() {
            used = self.less.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
        *used += bytes;
    }

    pub(crate) fn release(&self, bytes: usize) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(bytes);
        self.less.notify_all();
    }

    /// Makes waiting threads check `stop` again.
    pub(crate) fn wake(&self) {
        let _used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        self.less.notify_all();
    }
}
