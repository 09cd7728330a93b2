//! A number of bytes that may be under way: who wants more waits. The buffer of the sliding window.

use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes that may be under way at once.
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

    /// Waits for room for `bytes`; when nothing is under way there is room for anything. `stop` ends the
    /// waiting.
    pub(crate) fn take(&self, bytes: usize, stop: impl Fn() -> bool) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used > 0 && *used + bytes > self.most && !stop() {
            used = self.less.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
        *used += bytes;
    }

    /// `bytes` are not under way any more.
    pub(crate) fn release(&self, bytes: usize) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(bytes);
        self.less.notify_all();
    }

    /// Those who wait look again whether to stop.
    pub(crate) fn wake(&self) {
        let _used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        self.less.notify_all();
    }
}
