//! Capture loop: rounds while the machine runs, and one last round while it is paused.

use crate::{
    CaptureError, Consumer, DirtyLog, PageBatch, RoundDecision, RoundStats, Scan, Sink, StopPolicy,
    StopReason,
    round::Tally,
    scan_sequence::{self, Cluster},
    staged_pages::StagedPages,
};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use whimbrel_core::{EXTENT_PAGES, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::Machine;

/// Pages read and delivered at once: an extent, which is also one leaf of an image tree.
const BATCH_PAGES: u64 = EXTENT_PAGES as u64;
/// Interval of dirty log scans if the policy sets none, for sinks that use [`PageBatch::hot`].
const SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// Scans take at most one part in this many of the round. A scan takes well under 1 ms per GiB.
const SCAN_SHARE: u32 = 50;
/// Most bytes that are set aside in the pause; with more, the pause lasts until the sink has them.
const STAGE_BYTES_MAX: usize = 256 << 20;

/// Source of a capture: a machine and its arrays, as one consumer sees them.
pub struct CaptureSource<'a> {
    /// Machine, running or paused.
    pub machine: &'a mut dyn Machine,
    /// Dirty logs of its page arrays, to which `follower` is attached.
    pub dirty_logs: &'a mut [DirtyLog],
    /// Consumer that gets the pages.
    pub consumer: Consumer,
}

/// State of the machine after the last round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterCapture {
    /// The machine runs on: the last pages are set aside during the pause and delivered afterwards.
    Unpause,
    /// The machine stays paused; the caller decides who runs next.
    StayPaused,
}

/// Phase of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Copying while the machine runs; the round's number, from 1.
    Round(u32),
    /// The machine is paused.
    Paused,
    /// The last pages are being delivered, and the machine runs again.
    Delivering,
}

/// Progress report, made after every batch.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Phase of the capture.
    pub phase: Phase,
    /// Pages delivered in this phase.
    pub done: u64,
    /// Pages to deliver in this phase.
    pub total: u64,
    /// Encoded bytes sent since the start.
    pub bytes_out: u64,
    /// Statistics of the round that has just ended, if one has.
    pub ended: Option<RoundStats>,
}

/// Result of a finished capture.
#[derive(Debug)]
pub struct Captured {
    /// Device state of the machine at the instant of the pause.
    pub device_state: Vec<u8>,
    /// Rounds, with the last one (paused) included.
    pub rounds: Vec<RoundStats>,
    /// Reason that ended the rounds before it.
    pub stop_reason: StopReason,
    /// Time that the machine was paused; zero if it was paused before or stays so.
    pub downtime: Duration,
    /// Instant of the pause.
    pub paused_at: Instant,
    /// Parts of the pause.
    pub parts: PauseParts,
}

/// Parts of the time from the pause until the sink has everything (if the machine stays paused) or everything
/// is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PauseParts {
    /// Until the machine was paused.
    pub stop: Duration,
    /// Until the pages left were known.
    pub scan: Duration,
    /// Saving the device state; pages are sent meanwhile.
    pub devices: Duration,
    /// Sending the pages, without that.
    pub pages: Duration,
}

/// Runs the loop that the documentation of the crate describes.
///
/// On success the sink has every page that was dirty for `subject.follower`, as of the instant of the pause.
/// On failure the consumer's sets hold every page collected so far again, and a machine that this call paused
/// runs again.
pub fn capture(
    subject: &mut CaptureSource<'_>,
    sink: &mut dyn Sink,
    policy: &dyn StopPolicy,
    finish: AfterCapture,
    observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Captured, CaptureError> {
    let who = subject.consumer;
    let taken = subject.dirty_logs.iter().map(|l| PageSet::empty(l.page_count_for(who))).collect();
    let delivered = match policy.scan() {
        Scan::Ascending => Vec::new(),
        Scan::DeferHot { .. } => {
            subject.dirty_logs.iter().map(|l| PageSet::empty(l.page_count_for(who))).collect()
        }
    };
    let every = match policy.scan() {
        Scan::DeferHot { scan_interval: look_every } => look_every,
        Scan::Ascending => SCAN_INTERVAL,
    };
    let (begun, looked) = (Instant::now(), LastScan { every, at: Instant::now(), cost: Duration::ZERO });
    let mut run = Run {
        subject,
        sink,
        observe,
        collected: taken,
        delivered,
        paused: false,
        buffer: Vec::new(),
        started: begun,
        last_scan: looked,
    };
    match run.run_rounds(policy, finish) {
        Ok(captured) => Ok(captured),
        Err(error) => {
            run.roll_back();
            Err(error)
        }
    }
}

struct Run<'r, 's> {
    subject: &'r mut CaptureSource<'s>,
    sink: &'r mut dyn Sink,
    observe: &'r mut dyn FnMut(Progress) -> ControlFlow<()>,
    /// Everything collected from the dirty logs, by array: what a failure must put back.
    collected: Vec<PageSet>,
    /// Everything of which the sink has some version, by array. Empty if rewritten pages do not wait.
    delivered: Vec<PageSet>,
    /// Whether the machine was paused here, or may be after a failed pause.
    paused: bool,
    buffer: Vec<u8>,
    started: Instant,
    last_scan: LastScan,
}

/// Last scan of the dirty logs.
struct LastScan {
    every: Duration,
    at: Instant,
    cost: Duration,
}

impl Run<'_, '_> {
    fn run_rounds(
        &mut self,
        policy: &dyn StopPolicy,
        finish: AfterCapture,
    ) -> Result<Captured, CaptureError> {
        let mut rounds: Vec<RoundStats> = Vec::new();
        let mut left = self.collect()?;
        // Rounds from before the machine was throttled predict nothing about those after it.
        let mut since = 0;
        loop {
            let history = &rounds[since..];
            let rate = match policy.decide(history, count(&left)) {
                RoundDecision::Round { rate } => rate,
                RoundDecision::Stop { rate, stop_reason: why }
                    if why.is_hopeless() && self.throttle(policy, history, &left) =>
                {
                    since = rounds.len();
                    rate
                }
                RoundDecision::Stop { .. } if count(&left) > policy.pause_pages_max() => {
                    return Err(CaptureError::TooMuchLeft { pages: count(&left) });
                }
                RoundDecision::Stop { rate, stop_reason: why } => {
                    self.sink.limit_rate(rate);
                    return self.last_round(left, rounds, Ending { rate, stop_reason: why, finish });
                }
            };
            self.sink.limit_rate(rate);
            let phase = Phase::Round(rounds.len() as u32 + 1);
            let mut stats = self.round(&left, phase, rate)?;
            left = self.collect()?;
            stats.left = count(&left);
            rounds.push(stats);
            let downtime = policy.downtime(&rounds[since..], stats.left);
            self.report_round(&mut rounds, phase, downtime)?;
        }
    }

    /// Throttles the machine; returns whether another round may help.
    fn throttle(&mut self, policy: &dyn StopPolicy, history: &[RoundStats], left: &[PageSet]) -> bool {
        let predicted = policy.downtime(history, count(left));
        predicted.is_some_and(|predicted| self.subject.machine.slow_down(predicted))
    }

    /// Reports the end of the last of `rounds`.
    fn report_round(
        &mut self,
        rounds: &mut [RoundStats],
        phase: Phase,
        downtime: Option<Duration>,
    ) -> Result<(), CaptureError> {
        let Some(stats) = rounds.last_mut() else { return Ok(()) };
        stats.downtime = downtime;
        let done = stats.pages + stats.skipped;
        let (total, bytes_out, ended) = (done, self.sink.bytes_out(), Some(*stats));
        self.report(Progress { phase, done, total, bytes_out, ended })
    }

    fn last_round(
        &mut self,
        mut left: Vec<PageSet>,
        rounds: Vec<RoundStats>,
        ending: Ending,
    ) -> Result<Captured, CaptureError> {
        let staged = match ending.finish {
            AfterCapture::Unpause => self.stage(&mut left)?,
            AfterCapture::StayPaused => None,
        };
        self.subject.machine.about_to_pause();
        let paused_at = Instant::now();
        // Set first: a pause that reports a failure, as after a timeout, may have stopped the machine.
        self.paused = true;
        self.subject.machine.pause()?;
        let mut parts = PauseParts { stop: paused_at.elapsed(), ..PauseParts::default() };
        let fresh = self.collect()?;
        left.iter_mut().zip(&fresh).for_each(|(left, fresh)| left.union(fresh));
        self.sink.defer_pages(&mut left, &fresh, ending.stop_reason);
        parts.scan = paused_at.elapsed() - parts.stop;
        let pause = Pause { at: paused_at, left, rounds, parts };
        match staged.filter(|_| fits(&pause.left)) {
            Some(staged) => self.end_with_staged(pause, (staged, &fresh), ending),
            None => self.end_with_sink(pause, ending),
        }
    }

    /// Sends the last pages while the machine is paused.
    fn end_with_sink(&mut self, pause: Pause, ending: Ending) -> Result<Captured, CaptureError> {
        let Pause { at: paused_at, left, mut rounds, mut parts } = pause;
        let begun = Instant::now();
        let tally = self.send(&left, Phase::Paused, ending.rate)?;
        self.sink.flush()?;
        let (device_state, devices) = self.device_state()?;
        self.sink.end_round()?;
        rounds.push(tally.end(self.sink.bytes_out()));
        (parts.devices, parts.pages) = (devices, begun.elapsed() - devices);
        let downtime = self.finish(ending.finish, paused_at)?;
        let stop_reason = ending.stop_reason;
        Ok(Captured { device_state, rounds, stop_reason, downtime, paused_at, parts })
    }

    /// Sends the last pages once the machine runs again, which had been copied aside.
    fn end_with_staged(
        &mut self,
        pause: Pause,
        (staged, fresh): (StagedPages, &[PageSet]),
        ending: Ending,
    ) -> Result<Captured, CaptureError> {
        let Pause { at: paused_at, left, mut rounds, mut parts } = pause;
        let begun = Instant::now();
        let (staged, device_state) = self.stage_again(staged, fresh)?;
        // Both run at the same time, so their parts are not known.
        parts.pages = begun.elapsed();
        let downtime = self.finish(ending.finish, paused_at)?;
        rounds.push(self.deliver(&left, &staged, ending.rate)?);
        let stop_reason = ending.stop_reason;
        Ok(Captured { device_state, rounds, stop_reason, downtime, paused_at, parts })
    }

    /// Device state, and the time that it took to save.
    fn device_state(&mut self) -> Result<(Vec<u8>, Duration), CaptureError> {
        let begun = Instant::now();
        let device_state = self.subject.machine.device_state()?;
        Ok((device_state, begun.elapsed()))
    }

    fn finish(&mut self, finish: AfterCapture, paused_at: Instant) -> Result<Duration, CaptureError> {
        if finish == AfterCapture::StayPaused {
            return Ok(Duration::ZERO);
        }
        self.subject.machine.unpause()?;
        self.paused = false;
        Ok(paused_at.elapsed())
    }

    fn collect(&mut self) -> Result<Vec<PageSet>, CaptureError> {
        let follower = self.subject.consumer;
        let mut sets = Vec::with_capacity(self.collected.len());
        for (ledger, taken) in self.subject.dirty_logs.iter_mut().zip(&mut self.collected) {
            let set = ledger.collect(follower)?;
            taken.union(&set);
            sets.push(set);
        }
        self.sink.collected(&mut sets);
        Ok(sets)
    }

    fn round(
        &mut self,
        sets: &[PageSet],
        phase: Phase,
        rate: Option<u64>,
    ) -> Result<RoundStats, CaptureError> {
        let tally = self.send(sets, phase, rate)?;
        self.sink.end_round()?;
        Ok(tally.end(self.sink.bytes_out()))
    }

    /// Delivers the pages of a round to the sink, which may still have some of them buffered when this
    /// returns.
    fn send(&mut self, sets: &[PageSet], phase: Phase, rate: Option<u64>) -> Result<Tally, CaptureError> {
        let mut tally =
            Tally::start(phase, count(sets), self.sink.bytes_out(), self.started).with_limit(rate);
        let mut clusters = scan_sequence::ascending(sets, BATCH_PAGES);
        let hot_waits = match phase {
            Phase::Round(round) if !self.delivered.is_empty() => {
                scan_sequence::shuffle(&mut clusters, round);
                true
            }
            _ => false,
        };
        for cluster in clusters {
            if phase != Phase::Paused {
                self.sink.between_batches(self.subject)?;
                self.scan_if_due()?;
            }
            let hot_waits = hot_waits && self.sink.hot_may_wait(cluster.array);
            let (runs, skipped) = self.runs_of(cluster, &sets[cluster.array], hot_waits);
            self.report(tally.add(0, skipped, self.sink.bytes_out()))?;
            for run in runs {
                self.batch(cluster.array, run)?;
                self.report(tally.add(run.len, 0, self.sink.bytes_out()))?;
            }
        }
        Ok(tally)
    }

    /// Runs of `set` in the cluster that are to be delivered now, and the number of pages that wait.
    ///
    /// A page that waits was written since the round began: it is dirty again, so a later round has it.
    fn runs_of(&self, cluster: Cluster, set: &PageSet, hot_waits: bool) -> (Vec<PageRun>, u64) {
        let unseen =
            self.subject.dirty_logs[cluster.array].dirty_pages(self.subject.consumer).filter(|_| hot_waits);
        let delivered = self.delivered.get(cluster.array);
        let wants_first = self.sink.wants_first_versions();
        let waits = |page| {
            unseen.is_some_and(|unseen| unseen.contains(page))
                && (!wants_first || delivered.is_some_and(|delivered| delivered.contains(page)))
        };
        let (mut runs, mut skipped) = (Vec::<PageRun>::new(), 0);
        for page in (cluster.start..cluster.end).filter(|page| set.contains(*page)) {
            match runs.last_mut() {
                _ if waits(page) => skipped += 1,
                Some(last) if last.end() == page => last.len += 1,
                _ => runs.push(PageRun::new(page, 1)),
            }
        }
        (runs, skipped)
    }

    /// Scans the dirty logs if the last scan was long enough ago for the cost of a scan.
    fn scan_if_due(&mut self) -> Result<(), CaptureError> {
        let every = self.last_scan.every;
        let pause = every.max(self.last_scan.cost * SCAN_SHARE);
        if !every.is_zero() && self.last_scan.at.elapsed() < pause {
            return Ok(());
        }
        let begun = Instant::now();
        self.subject.dirty_logs.iter_mut().try_for_each(DirtyLog::refresh)?;
        self.last_scan = LastScan { every, at: Instant::now(), cost: begun.elapsed() };
        Ok(())
    }

    fn batch(&mut self, array: usize, run: PageRun) -> Result<(), CaptureError> {
        self.sink.about_to_read(array, run);
        let ledger = &self.subject.dirty_logs[array];
        self.buffer.resize(run.bytes(), 0);
        ledger.read_for(self.subject.consumer, run, &mut self.buffer)?;
        let hot = ledger.dirty_pages(self.subject.consumer);
        self.sink.write(PageBatch { array, run, data: &self.buffer, hot })?;
        if let Some(delivered) = self.delivered.get_mut(array) {
            delivered.insert_run(run);
        }
        Ok(())
    }

    /// Copies the pages left aside while the machine runs, after the sink has come to rest: what it still
    /// has to do would take the processors from the pause. `None` if they are too many.
    fn stage(&mut self, left: &mut [PageSet]) -> Result<Option<StagedPages>, CaptureError> {
        if !fits(left) {
            return Ok(None);
        }
        self.sink.wait_idle()?;
        let meanwhile = self.collect()?;
        left.iter_mut().zip(&meanwhile).for_each(|(left, meanwhile)| left.union(meanwhile));
        if !fits(left) {
            return Ok(None);
        }
        Ok(Some(StagedPages::copy(self.subject.dirty_logs, self.subject.consumer, left)?))
    }

    /// Copies again what was written since, while the device state is saved: both only read, and both prolong
    /// the pause.
    fn stage_again(
        &mut self,
        staged: StagedPages,
        fresh: &[PageSet],
    ) -> Result<(StagedPages, Vec<u8>), CaptureError> {
        let machine = &mut *self.subject.machine;
        let (ledgers, who) = (&*self.subject.dirty_logs, self.subject.consumer);
        std::thread::scope(|scope| {
            let device_state = scope.spawn(|| machine.device_state());
            let staged = staged.copy_again(ledgers, who, fresh)?;
            let device_state =
                device_state.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((staged, device_state))
        })
    }

    fn deliver(
        &mut self,
        sets: &[PageSet],
        staged: &StagedPages,
        rate: Option<u64>,
    ) -> Result<RoundStats, CaptureError> {
        let phase = Phase::Delivering;
        let mut tally =
            Tally::start(phase, count(sets), self.sink.bytes_out(), self.started).with_limit(rate);
        for (array, set) in sets.iter().enumerate() {
            for run in set.runs().flat_map(|run| run.chunks(BATCH_PAGES)) {
                self.sink.between_batches(self.subject)?;
                staged.pieces(array, run, |run, data| {
                    self.sink.write(PageBatch { array, run, data, hot: None })
                })?;
                self.report(tally.add(run.len, 0, self.sink.bytes_out()))?;
            }
        }
        self.sink.end_round()?;
        Ok(tally.end(self.sink.bytes_out()))
    }

    fn report(&mut self, progress: Progress) -> Result<(), CaptureError> {
        match (self.observe)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(CaptureError::Cancelled),
        }
    }

    /// Undoes a failed capture: every page collected is dirty again, and a machine paused here runs again.
    fn roll_back(&mut self) {
        for (ledger, taken) in self.subject.dirty_logs.iter_mut().zip(&self.collected) {
            ledger.put_back(self.subject.consumer, taken);
        }
        if self.paused
            && let Err(error) = self.subject.machine.unpause()
        {
            tracing::error!(%error, "the machine stays paused after a failed capture");
        }
    }
}

#[derive(Clone, Copy)]
struct Ending {
    /// Limit of the last round.
    rate: Option<u64>,
    stop_reason: StopReason,
    finish: AfterCapture,
}

/// What is known in the pause of the last round.
struct Pause {
    at: Instant,
    left: Vec<PageSet>,
    rounds: Vec<RoundStats>,
    parts: PauseParts,
}

/// Whether copies of these pages may be set aside in memory.
fn fits(sets: &[PageSet]) -> bool {
    count(sets) as usize * PAGE_SIZE <= STAGE_BYTES_MAX
}

fn count(sets: &[PageSet]) -> u64 {
    sets.iter().map(PageSet::count).sum()
}
