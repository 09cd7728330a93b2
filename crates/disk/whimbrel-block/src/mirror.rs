//! Mirror: sends writes to a second host while a disk is copied, and orders them with the rounds of the copy.
//!
//! Three parties use it. Writers change the device ([`MirrorLayer`](crate::MirrorLayer)). The copier runs
//! rounds: it reports the pages of a round ([`Mirror::collected`]), that it is about to read some
//! ([`Mirror::about_to_read`]) and that they have arrived ([`Mirror::arrived`]). The sender of writes takes
//! them ([`Mirror::take`]) and reports their arrival in the same way.
//!
//! A page is in one of three states. *Waiting*: the copy has an old version, and a round will read the page;
//! a write is not sent. *Flying*: a version is being sent or written. A newer version has to wait, so two
//! versions of a page are never in flight at once and need no numbers. Neither: the copy has the page, and a
//! write is sent.
//!
//! So from the first [`Mirror::collected`] after [`Mirror::arm`] on, a page that a round has delivered stays
//! delivered. A round leaves only pages that were being written at the moment they were read, and ranges that
//! were zeroed.
//!
//! A write returns when it is done on this host and queued for sending; the queue is bounded in bytes.
//! Invariants: a page that was written and is neither sent nor read later is in `missed`. Nothing on the
//! other host fails a writer: after [`Mirror::end`] all writers continue without the copy.

use crate::BlockError;
use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};

const WRITE_PAGES: u64 = 64;

/// Consecutive pages with their content.
pub type MirroredWrite = (PageRun, Vec<u8>);

/// Result of a request for writes to send.
#[derive(Debug)]
pub enum NextWrites {
    /// Pages that were written, each at most once.
    Writes(Vec<MirroredWrite>),
    /// No writes at the moment.
    Nothing,
    /// The mirror has ended.
    Ended,
}

/// Cost of the mirror for writers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MirrorCost {
    /// Writes that were sent to the copy.
    pub writes: u64,
    /// Bytes of these writes.
    pub bytes: u64,
    /// Time that all of them waited, beyond the local write.
    pub waited: Duration,
    /// Longest time that one of them waited.
    pub longest: Duration,
}

/// Mirror of one disk; see the module.
pub struct Mirror {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Writes are only local, and the copier tracks them by other means.
    Off,
    /// Writes are still only local, and recorded here too.
    Armed,
    On,
    Ended,
}

struct State {
    mode: Mode,
    pending: PageSet,
    in_flight: PageSet,
    missed: PageSet,
    queue: VecDeque<MirroredWrite>,
    /// Bytes queued or sent that have not arrived yet.
    outstanding: u64,
    bound: u64,
    cost: MirrorCost,
}

impl Mirror {
    /// Mirror of a device of `pages` pages. Nothing is sent yet.
    pub fn new(pages: u64) -> Self {
        let [waiting, flying, missed] = [(); 3].map(|()| PageSet::empty(pages));
        let (queue, cost) = (VecDeque::new(), MirrorCost::default());
        let state = State {
            mode: Mode::Off,
            pending: waiting,
            in_flight: flying,
            missed,
            queue,
            outstanding: 0,
            bound: 0,
            cost,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends writes from the next [`Mirror::collected`] on. At most `bound` bytes, and one write more, are
    /// queued or in flight. The copier must know all writes before this call, or find them when it next
    /// collects.
    pub fn arm(&self, bound: u64) {
        let mut state = self.state();
        if state.mode == Mode::Off {
            (state.mode, state.bound) = (Mode::Armed, bound);
        }
    }

    /// Whether writes are sent, or will be from the next round on.
    pub fn is_armed(&self) -> bool {
        matches!(self.state().mode, Mode::Armed | Mode::On)
    }

    /// Ends the mirror; waiting writers continue.
    pub fn end(&self) {
        let mut state = self.state();
        state.mode = Mode::Ended;
        state.queue.clear();
        self.changed.notify_all();
    }

    /// Cost of the mirror so far.
    pub fn cost(&self) -> MirrorCost {
        self.state().cost
    }

    /// Starts a round with `left`, the pages found written since the last one. Removes pages that were sent,
    /// and adds those that the round must have.
    pub fn collected(&self, left: &mut PageSet) {
        let mut state = self.state();
        let missed = match state.mode {
            Mode::Off | Mode::Ended => return,
            Mode::Armed | Mode::On => state.missed.take(),
        };
        if state.mode == Mode::On {
            // Pages that the last round did not reach, and none that were sent.
            *left = state.pending.take();
        }
        left.union(&missed);
        state.pending = left.clone();
        state.mode = Mode::On;
        self.changed.notify_all();
    }

    /// Announces that the copier will read pages of a round. On return no older version of them is in flight.
    pub fn about_to_read(&self, run: PageRun) {
        let mut state = self.state();
        while state.mode == Mode::On && overlaps(&state.in_flight, run) {
            state = self.wait(state);
        }
        if state.mode == Mode::On {
            state.pending.remove_run(run);
            // Earlier writes to these pages have finished, and will be read.
            state.missed.remove_run(run);
            state.in_flight.insert_run(run);
        }
    }

    /// Reports that these pages have arrived.
    pub fn arrived(&self, runs: &[PageRun]) {
        let mut state = self.state();
        runs.iter().for_each(|run| state.in_flight.remove_run(*run));
        self.changed.notify_all();
    }

    /// Reports that `bytes` of queued writes have arrived; [`Mirror::arrived`] reports their pages.
    pub fn delivered(&self, bytes: u64) {
        let mut state = self.state();
        state.outstanding = state.outstanding.saturating_sub(bytes);
        self.changed.notify_all();
    }

    /// Takes at least one write to send, with at most `pages` pages together. Waits for one, if `wait`.
    pub fn take(&self, pages: u64, wait: bool) -> NextWrites {
        let mut state = self.state();
        loop {
            if state.mode == Mode::Ended {
                return NextWrites::Ended;
            }
            let (mut room, mut pieces) = (pages, Vec::new());
            while let Some(piece) = state.queue.pop_front_if(|(run, _)| run.len <= room) {
                room -= piece.0.len;
                pieces.push(piece);
            }
            if !pieces.is_empty() {
                return NextWrites::Writes(pieces);
            }
            if !wait {
                return NextWrites::Nothing;
            }
            state = self.wait(state);
        }
    }

    /// Waits until all queued writes have arrived, or the mirror has ended. Nothing writes any more.
    pub fn wait_until_drained(&self) {
        let mut state = self.state();
        while state.mode == Mode::On && state.outstanding > 0 {
            state = self.wait(state);
        }
    }

    /// Changes the pages of `run` by `write`, and queues their new content, which `read` returns.
    pub(crate) fn write(
        &self,
        run: PageRun,
        write: impl FnOnce() -> Result<(), BlockError>,
        read: impl Fn(PageRun, &mut [u8]) -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        let begun = Instant::now();
        let carried = self.start(run);
        let mut waited = begun.elapsed();
        let outcome = write();
        let after = Instant::now();
        let mut rest = carried.iter().flat_map(|run| run.chunks(WRITE_PAGES)).collect::<VecDeque<_>>();
        while let Some(piece) = rest.pop_front_if(|_| outcome.is_ok()) {
            let mut data = vec![0; piece.bytes()];
            if read(piece, &mut data).is_err() || !self.enqueue(piece, data) {
                rest.push_front(piece);
                break;
            }
        }
        waited += after.elapsed();
        let mut state = self.state();
        // Pages that are not sent: those of no sent run, or all if the write failed or the mirror has ended.
        between(run, &carried).for_each(|gap| state.missed.insert_run(gap));
        for piece in rest {
            state.in_flight.remove_run(piece);
            state.missed.insert_run(piece);
        }
        state.cost.count(&carried, waited);
        self.changed.notify_all();
        outcome
    }

    /// Waits until no page to be sent is in flight; returns the pages of `run` to be sent.
    fn start(&self, run: PageRun) -> Vec<PageRun> {
        let mut state = self.state();
        loop {
            if state.mode != Mode::On {
                return Vec::new();
            }
            let there = run.pages().filter(|page| !state.pending.contains(*page));
            let runs = runs_of(there);
            if !runs.iter().any(|run| overlaps(&state.in_flight, *run)) {
                runs.iter().for_each(|run| state.in_flight.insert_run(*run));
                return runs;
            }
            state = self.wait(state);
        }
    }

    /// Queues a write once there is space; false if the mirror has ended.
    fn enqueue(&self, run: PageRun, data: Vec<u8>) -> bool {
        let mut state = self.state();
        while state.mode == Mode::On && state.outstanding >= state.bound {
            state = self.wait(state);
        }
        if state.mode != Mode::On {
            return false;
        }
        state.outstanding += data.len() as u64;
        state.queue.push_back((run, data));
        self.changed.notify_all();
        true
    }

    /// Records that the pages of `run` were changed only on this host.
    pub(crate) fn record_missed(&self, run: PageRun) {
        self.state().missed.insert_run(run);
    }
}

impl MirrorCost {
    fn count(&mut self, carried: &[PageRun], waited: Duration) {
        if !carried.is_empty() {
            self.writes += 1;
            self.bytes += carried.iter().map(|run| run.bytes() as u64).sum::<u64>();
            self.waited += waited;
            self.longest = self.longest.max(waited);
        }
    }
}

/// Pages of `run` that are in none of `parts`, which are ascending parts of it.
fn between(run: PageRun, parts: &[PageRun]) -> impl Iterator<Item = PageRun> {
    let starts = std::iter::once(run.start).chain(parts.iter().map(PageRun::end));
    let ends = parts.iter().map(|part| part.start).chain([run.end()]);
    starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| PageRun::new(start, end - start))
}

fn overlaps(set: &PageSet, run: PageRun) -> bool {
    run.pages().any(|page| set.contains(page))
}

fn runs_of(pages: impl Iterator<Item = u64>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(last) if last.end() == page => last.len += 1,
            _ => runs.push(PageRun::new(page, 1)),
        }
    }
    runs
}

#[cfg(test)]
#[path = "mirror_tests.rs"]
mod tests;
