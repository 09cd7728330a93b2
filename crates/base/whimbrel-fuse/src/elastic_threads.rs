//! Threads for requests that wait: they grow with the requests, within a bound, and end when they are idle.
//!
//! The threads that read requests from the kernel are few. A request that waits for another host must not
//! hold the last of them, or nothing is answered any more, not even what needs no waiting.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Time after which an idle thread ends.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Jobs in progress.
    running: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wakes: Condvar,
    /// Told when a job has ended.
    ended: Condvar,
}

/// A pool of threads that grows on demand.
pub(crate) struct ElasticThreads {
    most: usize,
    shared: Arc<Shared>,
}

impl ElasticThreads {
    /// A pool of at most `most` threads; there are none yet.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, shared: Arc::default() }
    }

    /// Whether a further job would have to wait for another one to end.
    pub(crate) fn is_full(&self) -> bool {
        let state = self.shared.lock();
        state.threads >= self.most && state.idle <= state.queue.len()
    }

    /// Waits until all jobs are done, for so long at most.
    pub(crate) fn wait(&self, patience: Duration) {
        let state = self.shared.lock();
        let busy = |state: &mut State| state.running > 0 || !state.queue.is_empty();
        drop(self.shared.ended.wait_timeout_while(state, patience, busy));
    }

    /// Runs a job on a thread of the pool, as soon as one is free.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        state.queue.push_back(Box::new(job));
        if state.idle >= state.queue.len() {
            self.shared.wakes.notify_one();
            return;
        }
        if state.threads >= self.most {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let begun = thread::Builder::new().name("fuse-waiting".to_owned()).spawn(move || shared.work());
        if let Err(error) = begun {
            tracing::warn!(%error, "cannot start another thread for requests");
            let mut state = self.shared.lock();
            state.threads -= 1;
            if state.threads == 0 {
                // Nobody else would ever do it.
                let jobs = std::mem::take(&mut state.queue);
                drop(state);
                jobs.into_iter().for_each(|job| job());
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                state.running += 1;
                drop(state);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a request of the kernel was not answered");
                }
                state = self.lock();
                state.running -= 1;
                self.ended.notify_all();
                continue;
            }
            state.idle += 1;
            let (woken, waited) =
                self.wakes.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_pool_is_waited_for_until_each_job_has_let_go_of_what_it_had() {
        let (pool, held) = (ElasticThreads::new(1), Arc::new(()));
        for number in 0..3 {
            let held = held.clone();
            pool.run(move || {
                thread::sleep(Duration::from_millis(20));
                assert!(number != 1 && Arc::strong_count(&held) > 1, "one of them fails");
            });
        }
        pool.wait(Duration::from_secs(60));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn jobs_that_wait_do_not_hold_others_up_until_the_bound_and_none_is_forgotten_beyond_it() {
        let pool = ElasticThreads::new(4);
        let (done, results) = channel();
        let blocked: Vec<_> = (0..4)
            .map(|_| {
                let (go, waits) = channel::<()>();
                let done = done.clone();
                assert!(!pool.is_full());
                pool.run(move || {
                    waits.recv().unwrap();
                    done.send("blocked").unwrap();
                });
                go
            })
            .collect();
        assert!(pool.is_full());
        pool.run(move || done.send("late").unwrap());
        for go in &blocked[..1] {
            go.send(()).unwrap();
        }
        assert_eq!([results.recv().unwrap(), results.recv().unwrap()], ["blocked", "late"]);
        blocked[1..].iter().for_each(|go| go.send(()).unwrap());
        assert_eq!(results.iter().count(), 3);
    }
}
