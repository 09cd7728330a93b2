//! Worker pool of one connection: threads for requests that may wait.
//!
//! Bounded by requests and by bytes. The receiving thread reserves space before it receives a payload, so a
//! client that sends too many requests waits in its own socket.

use crate::execution::Work;
use crate::request::Request;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most requests that wait or are in progress.
const MAX_REQUESTS: usize = 128;
/// Most bytes of these requests. A single larger request is accepted if there is no other.
const MAX_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) work: Work,
    pub(crate) bytes: usize,
}

pub(crate) struct WorkerPool {
    max_workers: usize,
    state: Mutex<State>,
    /// Signals that a job arrived or the pool was closed.
    work: Condvar,
    space: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    workers: usize,
    idle: usize,
    requests: usize,
    bytes: usize,
    closed: bool,
}

impl WorkerPool {
    pub(crate) fn new(max_workers: usize) -> Self {
        let (work, space) = (Condvar::new(), Condvar::new());
        Self { max_workers: max_workers.max(1), state: Mutex::default(), work, space }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for space for one more job of `bytes` bytes and reserves it.
    pub(crate) fn reserve(&self, bytes: usize) {
        let full = |state: &mut State| {
            state.requests >= MAX_REQUESTS || state.bytes > 0 && state.bytes + bytes > MAX_BYTES
        };
        let mut state = self.space.wait_while(self.lock(), full).unwrap_or_else(PoisonError::into_inner);
        state.requests += 1;
        state.bytes += bytes;
    }

    /// Queues a job for which space was reserved. If it returns true, the caller must start one more worker.
    #[must_use]
    pub(crate) fn submit(&self, job: Job) -> bool {
        let mut state = self.lock();
        state.queue.push_back(job);
        let more = state.idle < state.queue.len() && state.workers < self.max_workers;
        state.workers += usize::from(more);
        drop(state);
        self.work.notify_one();
        more
    }

    /// Next job for a worker; none once the pool is closed and empty.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        state.idle += 1;
        let nothing = |state: &mut State| state.queue.is_empty() && !state.closed;
        state = self.work.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner);
        state.idle -= 1;
        state.queue.pop_front()
    }

    /// Frees the space of a job.
    pub(crate) fn ended(&self, bytes: usize) {
        let mut state = self.lock();
        state.requests -= 1;
        state.bytes -= bytes;
        drop(state);
        self.space.notify_one();
    }

    /// Lets the workers end once the queue is empty.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }
}
