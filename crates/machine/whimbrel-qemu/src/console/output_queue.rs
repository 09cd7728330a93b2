//! Output queue: bytes from the reader of a console for one subscriber. Bounded in bytes and coalescing,
//! because a serial port often delivers one byte at a time.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use whimbrel_core::lock;

/// Most bytes queued for a subscriber that does not read.
pub(super) const BACKLOG: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct OutputQueue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    closed: bool,
}

impl OutputQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update under the lock is complete, even after a panic.
        lock(&self.state)
    }

    /// Adds `output`. If it does not fit or the queue is closed, returns false, and the queue ends after its
    /// present content.
    pub(super) fn push(&self, output: &[u8]) -> bool {
        let mut state = self.lock();
        state.closed |= state.bytes.len() + output.len() > BACKLOG;
        if !state.closed {
            state.bytes.extend(output);
        }
        self.changed.notify_one();
        !state.closed
    }

    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// Takes all bytes, waiting at most `timeout` for some. Empty if there are none, an error at the end.
    pub(super) fn take(&self, timeout: Duration) -> Result<Vec<u8>, Ended> {
        let waits = |state: &mut State| state.bytes.is_empty() && !state.closed;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.bytes.is_empty() && state.closed {
            return Err(Ended);
        }
        Ok(std::mem::take(&mut state.bytes).into())
    }
}

/// The output ended: the console was closed, or the subscriber fell too far behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the output of the console has ended")]
pub struct Ended;
