//! Writing to a device and to its copy elsewhere: which pages of the copy are as here, and what has to wait
//! for what.
//!
//! Three parties meet here. Writers change the device ([`Mirrored`](crate::Mirrored)). Whoever copies it
//! round after round says which pages a round has ([`Mirror::collected`]), that it is about to read some
//! ([`Mirror::about_to_read`]) and that they have arrived ([`Mirror::arrived`]). Whoever carries written
//! pages takes them ([`Mirror::take`]) and says the same of them.
//!
//! A page is in one of three states. *Waiting*: the copy has an old version, and a round will read the page;
//! a write stays here alone. *Flying*: a version is under way, or is being written; whoever has a newer one
//! waits, so two versions of a page never travel at once and their order needs no numbers. Neither: the copy
//! has the page, and a write is carried there.
//!
//! So from the first [`Mirror::collected`] after [`Mirror::arm`] on, a page that a round has delivered stays
//! delivered. What a round leaves is what was being written in the very moment when it was read, and ranges
//! that were zeroed.
//!
//! A write returns when it is done here and set aside for the way, of which there are at most so many bytes.
//! Invariants: a page that was written and is neither carried nor read later is in `missed`; a writer is
//! failed by nothing that happens elsewhere: once [`Mirror::end`] was called all of them go on, here alone.

use crate::BlockError;
use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};

/// Pages that are set aside as one piece.
const PIECE_PAGES: u64 = 64;

/// Neighbouring pages with their content.
pub type MirroredWrite = (PageRun, Vec<u8>);

/// What there is to carry.
#[derive(Debug)]
pub enum NextWrites {
    /// Pages that were written, each at most once.
    Pieces(Vec<MirroredWrite>),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Ended,
}

/// What the mirror has cost those who write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MirrorCost {
    /// Writes that were carried to the copy.
    pub writes: u64,
    /// Bytes of theirs.
    pub bytes: u64,
    /// How long all of them waited, beside being written here.
    pub waited: Duration,
    /// How long one of them did at most.
    pub longest: Duration,
}

/// See the module.
pub struct Mirror {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Writes stay here, and whoever copies follows them by other means.
    Off,
    /// They still do, and are noted here too.
    Armed,
    /// They are carried.
    On,
    /// It is over for good.
    Ended,
}

struct State {
    mode: Mode,
    waiting: PageSet,
    flying: PageSet,
    missed: PageSet,
    queue: VecDeque<MirroredWrite>,
    /// Bytes set aside and not yet known to have arrived.
    outstanding: u64,
    bound: u64,
    cost: MirrorCost,
}

impl Mirror {
    /// Of a device of so many pages. Nothing is carried yet.
    pub fn new(pages: u64) -> Self {
        let [waiting, flying, missed] = [(); 3].map(|()| PageSet::empty(pages));
        let (queue, cost) = (VecDeque::new(), MirrorCost::default());
        let state = State { mode: Mode::Off, waiting, flying, missed, queue, outstanding: 0, bound: 0, cost };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// From the next [`Mirror::collected`] on writes are carried, of which at most `bound` bytes are under
    /// way, and one piece more. All that was written before this call must be known to whoever copies, or
    /// come to be known by its next look.
    pub fn arm(&self, bound: u64) {
        let mut state = self.state();
        if state.mode == Mode::Off {
            (state.mode, state.bound) = (Mode::Armed, bound);
        }
    }

    /// Whether writes are carried, or soon will be.
    pub fn is_armed(&self) -> bool {
        matches!(self.state().mode, Mode::Armed | Mode::On)
    }

    /// Nobody carries any more: writers that wait go on.
    pub fn end(&self) {
        let mut state = self.state();
        state.mode = Mode::Ended;
        state.queue.clear();
        self.changed.notify_all();
    }

    /// What it has cost so far.
    pub fn cost(&self) -> MirrorCost {
        self.state().cost
    }

    /// A round is about to begin with `left`, which is what was found written since the last one. Takes out
    /// what was carried, and puts in what has to be in it.
    pub fn collected(&self, left: &mut PageSet) {
        let mut state = self.state();
        let missed = match state.mode {
            Mode::Off | Mode::Ended => return,
            Mode::Armed | Mode::On => state.missed.take(),
        };
        if state.mode == Mode::On {
            // What the last round did not come to, and nothing of what was carried.
            *left = state.waiting.take();
        }
        left.union(&missed);
        state.waiting = left.clone();
        state.mode = Mode::On;
        self.changed.notify_all();
    }

    /// Pages of a round are about to be read, for the copy: nothing older of them is under way when this
    /// returns.
    pub fn about_to_read(&self, run: PageRun) {
        let mut state = self.state();
        while state.mode == Mode::On && overlaps(&state.flying, run) {
            state = self.wait(state);
        }
        if state.mode == Mode::On {
            state.waiting.remove_run(run);
            // Whatever was written there has been written, and is read.
            state.missed.remove_run(run);
            state.flying.insert_run(run);
        }
    }

    /// These pages have arrived.
    pub fn arrived(&self, runs: &[PageRun]) {
        let mut state = self.state();
        runs.iter().for_each(|run| state.flying.remove_run(*run));
        self.changed.notify_all();
    }

    /// So many bytes of pieces have arrived; their pages are [`Mirror::arrived`].
    pub fn carried(&self, bytes: u64) {
        let mut state = self.state();
        state.outstanding = state.outstanding.saturating_sub(bytes);
        self.changed.notify_all();
    }

    /// What is to be carried: at least one piece, of at most `pages` pages together. Waits for it, if `wait`.
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
                return NextWrites::Pieces(pieces);
            }
            if !wait {
                return NextWrites::Nothing;
            }
            state = self.wait(state);
        }
    }

    /// Waits until all that was set aside has arrived, or the mirror has ended. Nobody writes any more.
    pub fn drained(&self) {
        let mut state = self.state();
        while state.mode == Mode::On && state.outstanding > 0 {
            state = self.wait(state);
        }
    }

    /// Changes the pages of `run` by `write`, and carries them as `read` finds them then.
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
        let mut rest = carried.iter().flat_map(|run| run.chunks(PIECE_PAGES)).collect::<VecDeque<_>>();
        while let Some(piece) = rest.pop_front_if(|_| outcome.is_ok()) {
            let mut data = vec![0; piece.bytes()];
            if read(piece, &mut data).is_err() || !self.set_aside(piece, data) {
                rest.push_front(piece);
                break;
            }
        }
        waited += after.elapsed();
        let mut state = self.state();
        // What is not carried stays here: some of it, or all if the write failed or the mirror has ended.
        let mut alone = PageSet::empty(state.missed.len());
        alone.insert_run(run);
        carried.iter().for_each(|run| alone.remove_run(*run));
        for piece in rest {
            state.flying.remove_run(piece);
            alone.insert_run(piece);
        }
        state.missed.union(&alone);
        state.cost.count(&carried, waited);
        self.changed.notify_all();
        outcome
    }

    /// Waits until no page that is to be carried is under way; the pages that are, of `run`.
    fn start(&self, run: PageRun) -> Vec<PageRun> {
        let mut state = self.state();
        loop {
            if state.mode != Mode::On {
                return Vec::new();
            }
            let there = run.pages().filter(|page| !state.waiting.contains(*page));
            let runs = runs_of(there);
            if !runs.iter().any(|run| overlaps(&state.flying, *run)) {
                runs.iter().for_each(|run| state.flying.insert_run(*run));
                return runs;
            }
            state = self.wait(state);
        }
    }

    /// Puts a piece on its way once there is room. False: the mirror has ended.
    fn set_aside(&self, run: PageRun, data: Vec<u8>) -> bool {
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

    /// The pages of `run` were changed here alone.
    pub(crate) fn missed(&self, run: PageRun) {
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
