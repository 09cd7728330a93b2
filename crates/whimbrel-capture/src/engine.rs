//! The loop: rounds while the machine runs, one last round while it is paused.

use crate::{Batch, CaptureError, Follower, Ledger, Pace, RoundStats, Sink, Verdict};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use whimbrel_core::{EXTENT_PAGES, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine, PageError};

/// Pages read and handed over at once: an extent, which is also one leaf of an image tree.
const BATCH_PAGES: u64 = EXTENT_PAGES as u64;
/// How many pages go out between two looks at what was dirtied meanwhile (16 MiB; a look costs well under 1 ms).
const LOOK_PAGES: u64 = 16 * BATCH_PAGES;
/// At most this much is set aside while the machine is paused; beyond it the pause lasts until the sink has it.
const STAGE_BYTES_MAX: usize = 256 << 20;

/// What is captured: a machine and its arrays, as one party follows them.
pub struct Subject<'a> {
    /// The machine, running or paused.
    pub machine: &'a mut dyn Machine,
    /// Its page arrays, each followed by `follower`.
    pub ledgers: &'a mut [Ledger],
    /// For whom.
    pub follower: Follower,
}

/// What happens to the machine after the last round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It goes on: the last pages are set aside during the pause and delivered afterwards.
    GoOn,
    /// It stays paused; the caller decides who runs next.
    StayPaused,
}

/// Where a capture stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Copying while the machine runs; the round's number, from 1.
    Round(u32),
    /// The machine is paused.
    Paused,
    /// The last pages are on their way, the machine runs again.
    Delivering,
}

/// Told to the observer after every batch.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Where the capture stands.
    pub phase: Phase,
    /// Pages delivered in this phase.
    pub done: u64,
    /// Pages to deliver in this phase.
    pub total: u64,
    /// Encoded bytes out since the beginning.
    pub bytes_out: u64,
}

/// A finished capture.
#[derive(Debug)]
pub struct Captured {
    /// The machine's device state at the instant of the pause.
    pub device_state: Vec<u8>,
    /// The rounds, the last one (paused) included.
    pub rounds: Vec<RoundStats>,
    /// How long the machine stood still; zero if it was found paused or stays so.
    pub pause: Duration,
    /// When it was paused.
    pub paused_at: Instant,
}

/// Runs the loop of the crate's documentation.
///
/// On success the sink has every page that `subject.follower` had not seen, as of the instant of the pause.
/// On failure the follower's sets hold every page taken so far again, and a machine that this call paused runs.
pub fn capture(
    subject: &mut Subject<'_>,
    sink: &mut dyn Sink,
    pace: &Pace,
    finish: Finish,
    observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Captured, CaptureError> {
    let who = subject.follower;
    let taken = subject.ledgers.iter().map(|l| PageSet::empty(l.page_count_for(who))).collect();
    let mut run = Run { subject, sink, observe, taken, paused: false, buffer: Vec::new() };
    match run.all(pace, finish) {
        Ok(captured) => Ok(captured),
        Err(error) => {
            run.roll_back();
            Err(error)
        }
    }
}

struct Run<'r, 's> {
    subject: &'r mut Subject<'s>,
    sink: &'r mut dyn Sink,
    observe: &'r mut dyn FnMut(Progress) -> ControlFlow<()>,
    /// Everything taken from the ledgers since the beginning, by array: what a failure must put back.
    taken: Vec<PageSet>,
    paused: bool,
    buffer: Vec<u8>,
}

impl Run<'_, '_> {
    fn all(&mut self, pace: &Pace, finish: Finish) -> Result<Captured, CaptureError> {
        let mut rounds = Vec::new();
        let mut left = self.collect()?;
        while pace.decide(&rounds, count(&left)) == Verdict::Round {
            let phase = Phase::Round(rounds.len() as u32 + 1);
            rounds.push(self.round(&left, phase)?);
            left = self.collect()?;
        }
        self.last_round(left, rounds, finish)
    }

    fn last_round(
        &mut self,
        mut left: Vec<PageSet>,
        mut rounds: Vec<RoundStats>,
        finish: Finish,
    ) -> Result<Captured, CaptureError> {
        self.subject.machine.about_to_pause();
        let paused_at = Instant::now();
        self.subject.machine.pause()?;
        self.paused = true;
        for (left, more) in left.iter_mut().zip(self.collect()?) {
            left.union(&more);
        }
        let fits = count(&left) as usize * PAGE_SIZE <= STAGE_BYTES_MAX;
        if finish == Finish::StayPaused || !fits {
            rounds.push(self.round(&left, Phase::Paused)?);
            let device_state = self.subject.machine.device_state()?;
            let pause = self.finish(finish, paused_at)?;
            return Ok(Captured { device_state, rounds, pause, paused_at });
        }
        let (staged, device_state) = self.stage(&left)?;
        let pause = self.finish(finish, paused_at)?;
        rounds.push(self.deliver(&left, &staged)?);
        Ok(Captured { device_state, rounds, pause, paused_at })
    }

    fn finish(&mut self, finish: Finish, paused_at: Instant) -> Result<Duration, CaptureError> {
        if finish == Finish::StayPaused {
            return Ok(Duration::ZERO);
        }
        self.subject.machine.unpause()?;
        self.paused = false;
        Ok(paused_at.elapsed())
    }

    /// Takes what the follower has not seen, of every array.
    fn collect(&mut self) -> Result<Vec<PageSet>, CaptureError> {
        let follower = self.subject.follower;
        let mut sets = Vec::with_capacity(self.taken.len());
        for (ledger, taken) in self.subject.ledgers.iter_mut().zip(&mut self.taken) {
            let set = ledger.collect(follower)?;
            taken.union(&set);
            sets.push(set);
        }
        Ok(sets)
    }

    fn round(&mut self, sets: &[PageSet], phase: Phase) -> Result<RoundStats, CaptureError> {
        let mut tally = Tally::begin(phase, count(sets), self.sink.bytes_out());
        for (array, set) in sets.iter().enumerate() {
            for run in set.runs().flat_map(|run| run.chunks(BATCH_PAGES)) {
                if phase != Phase::Paused && tally.due_for_a_look() {
                    self.subject.ledgers[array].refresh()?;
                }
                self.batch(array, run)?;
                self.report(&mut tally, run.len)?;
            }
        }
        self.sink.end_round()?;
        Ok(tally.end(self.sink.bytes_out()))
    }

    fn batch(&mut self, array: usize, run: PageRun) -> Result<(), CaptureError> {
        let ledger = &self.subject.ledgers[array];
        self.buffer.resize(run.bytes(), 0);
        ledger.read_for(self.subject.follower, run, &mut self.buffer)?;
        let hot = ledger.unseen(self.subject.follower);
        Ok(self.sink.pages(Batch { array, run, data: &self.buffer, hot })?)
    }

    /// Copies the last pages aside while the device state is taken: both only read, and both are the pause.
    fn stage(&mut self, sets: &[PageSet]) -> Result<(Vec<u8>, Vec<u8>), CaptureError> {
        let machine = &mut *self.subject.machine;
        let (ledgers, who) = (&*self.subject.ledgers, self.subject.follower);
        std::thread::scope(|scope| {
            let device_state = scope.spawn(|| machine.device_state());
            let staged = copy_aside(ledgers, who, sets)?;
            let device_state =
                device_state.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((staged, device_state))
        })
    }

    fn deliver(&mut self, sets: &[PageSet], staged: &[u8]) -> Result<RoundStats, CaptureError> {
        let mut tally = Tally::begin(Phase::Delivering, count(sets), self.sink.bytes_out());
        let mut rest = staged;
        for (array, set) in sets.iter().enumerate() {
            for run in set.runs().flat_map(|run| run.chunks(BATCH_PAGES)) {
                let (data, after) = rest.split_at(run.bytes());
                self.sink.pages(Batch { array, run, data, hot: None })?;
                rest = after;
                self.report(&mut tally, run.len)?;
            }
        }
        self.sink.end_round()?;
        Ok(tally.end(self.sink.bytes_out()))
    }

    fn report(&mut self, tally: &mut Tally, pages: u64) -> Result<(), CaptureError> {
        match (self.observe)(tally.add(pages, self.sink.bytes_out())) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(CaptureError::Cancelled),
        }
    }

    /// After a failure: every page taken is unseen again, and a machine paused here runs.
    fn roll_back(&mut self) {
        for (ledger, taken) in self.subject.ledgers.iter_mut().zip(&self.taken) {
            ledger.put_back(self.subject.follower, taken);
        }
        if self.paused
            && let Err(error) = self.subject.machine.unpause()
        {
            tracing::error!(%error, "the machine stays paused after a failed capture");
        }
    }
}

/// Counts one round.
struct Tally {
    phase: Phase,
    done: u64,
    total: u64,
    bytes_before: u64,
    begun: Instant,
    next_look: u64,
}

impl Tally {
    fn begin(phase: Phase, total: u64, bytes_before: u64) -> Self {
        Self { phase, done: 0, total, bytes_before, begun: Instant::now(), next_look: 0 }
    }

    fn due_for_a_look(&mut self) -> bool {
        let due = self.done >= self.next_look;
        if due {
            self.next_look = self.done + LOOK_PAGES;
        }
        due
    }

    fn add(&mut self, pages: u64, bytes_out: u64) -> Progress {
        self.done += pages;
        Progress { phase: self.phase, done: self.done, total: self.total, bytes_out }
    }

    fn end(self, bytes_out: u64) -> RoundStats {
        RoundStats { pages: self.done, bytes: bytes_out - self.bytes_before, took: self.begun.elapsed() }
    }
}

/// The pages of `sets`, as `who` sees them, one after the other.
fn copy_aside(ledgers: &[Ledger], who: Follower, sets: &[PageSet]) -> Result<Vec<u8>, PageError> {
    let mut staged = vec![0; count(sets) as usize * PAGE_SIZE];
    let mut rest = &mut staged[..];
    for (ledger, set) in ledgers.iter().zip(sets) {
        for run in set.runs() {
            let (out, after) = rest.split_at_mut(run.bytes());
            ledger.read_for(who, run, out)?;
            rest = after;
        }
    }
    Ok(staged)
}

fn count(sets: &[PageSet]) -> u64 {
    sets.iter().map(PageSet::count).sum()
}
