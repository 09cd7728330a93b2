//! Squeezing a guest before its state is kept, and giving back what was taken.
//!
//! [`BalloonPlan`] decides, and is pure: looks at the guest in, sizes of the balloon out. It takes half of
//! what the guest can spare, looks again, and ends when little is left, when the guest begins to swap (the
//! paper's rule, SOSP 2002 section 4.1: a MiB of it), to fetch again what it was made to drop, or when no
//! more comes. The guest's allocator decides what goes first: free pages, then caches.
//!
//! What holds: before anything is taken, the record says what the guest had, and it says so until it was
//! given back. So whatever happens, the guest is whole again when the operation has ended, after a restart of
//! the daemon, or where its capsule is resumed.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::record::Record,
    running::RunningMachine,
};
use std::time::{Duration, Instant};
use whimbrel_api::{BalloonTarget, Unit};
use whimbrel_core::ByteSize;
use whimbrel_qemu::BalloonStats;

const MIB: u64 = 1 << 20;
/// What a guest keeps beyond what it needs, so that it can still work: this part of its memory, and some MiB.
const KEPT_PART: u64 = 32;
const KEPT_LEAST: u64 = 8 * MIB;
/// A step that gains less is not worth its time.
const GAIN_LEAST: u64 = 4 * MIB;
/// Swapped out since the beginning: then what is taken is no longer spare.
const SWAPPED_MOST: u64 = MIB;
/// Pages that the guest had to read again in one step: then it was made to drop what it uses.
const FAULTS_MOST: u64 = 500;
/// A balloon that does not grow for so long has got what there is.
const STALLED: Duration = Duration::from_millis(1500);
/// No longer than this altogether.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a guest may take until it tells about itself.
const SILENCE: Duration = Duration::from_millis(1500);
/// From one look to the next.
const EVERY: Duration = Duration::from_millis(50);
/// Looks to wait after a step, so that the guest's report is younger than the step.
const SETTLE: u32 = 2;

/// What the guest says about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Report {
    /// What it could give to programs without swapping.
    available: u64,
    /// Bytes swapped out since it was booted.
    swapped: u64,
    /// Pages read from a disk because a program needed them, since it was booted.
    faults: u64,
}

/// One look at a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    /// Since the beginning.
    at: Duration,
    /// Memory that it has now.
    actual: u64,
    /// None if it says nothing.
    report: Option<Report>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Have the balloon leave the guest so much, and look again.
    Aim(u64),
    /// Look again.
    Look,
    /// It is done.
    Stop(Why),
    /// It is done, and the balloon is to leave the guest so much.
    StopAt(u64, Why),
}

/// Why a course ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The guest has what it was to be left with.
    Reached,
    /// It has little left to give.
    LittleLeft,
    /// It swaps, or reads again what it dropped.
    Pressed,
    /// The balloon does not grow any more.
    Stalled,
    /// Time is up.
    Late,
}

/// The way to a squeezed guest.
#[derive(Debug)]
struct BalloonPlan {
    goal: Goal,
    step: Step,
    /// The smallest size at which the guest was well.
    well: u64,
    first: Option<Report>,
    /// Its faults when the step under way began.
    faults: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Keep this much beyond what is needed.
    Spare(u64),
    To(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Not yet begun: waits for the guest's first report.
    Asking,
    /// The balloon grows; it was this size when it last did, and that was then.
    Growing { aim: u64, actual: u64, since: Duration },
    /// It has grown; so many looks until the guest's report is about that.
    Settling { looks: u32 },
}

impl BalloonPlan {
    fn new(goal: Goal, actual: u64) -> Self {
        Self { goal, step: Step::Asking, well: actual, first: None, faults: 0 }
    }

    /// What a look means.
    fn next(&mut self, look: &Look) -> Action {
        self.first = self.first.or(look.report);
        if look.at >= PATIENCE {
            return Action::StopAt(look.actual, Why::Late);
        }
        match (self.step, self.goal) {
            (Step::Asking, Goal::To(size)) if size < look.actual => self.aim(size, look),
            (Step::Asking, Goal::To(_)) => Action::Stop(Why::Reached),
            (Step::Asking, Goal::Spare(kept)) => self.start(kept, look),
            (Step::Growing { .. } | Step::Settling { .. }, Goal::Spare(_)) if self.is_pressed(look) => {
                Action::StopAt(self.well, Why::Pressed)
            }
            (Step::Growing { aim, .. }, Goal::To(_)) if look.actual <= aim => Action::Stop(Why::Reached),
            (Step::Growing { aim, .. }, Goal::Spare(_)) if look.actual <= aim => {
                self.step = Step::Settling { looks: SETTLE };
                Action::Look
            }
            (Step::Growing { aim, actual, since }, _) => self.watch(aim, actual, since, look),
            (Step::Settling { looks: 0 }, Goal::Spare(kept)) => {
                self.well = look.actual;
                self.take_half(kept, look)
            }
            (Step::Settling { looks }, _) => {
                self.step = Step::Settling { looks: looks.saturating_sub(1) };
                Action::Look
            }
        }
    }

    /// With the first report, or without any: then a quarter of its memory is what can be asked of any guest.
    fn start(&mut self, kept: u64, look: &Look) -> Action {
        match look.report {
            Some(_) => self.take_half(kept, look),
            None if look.at < SILENCE => Action::Look,
            None => {
                let aim = look.actual - look.actual / 4;
                self.goal = Goal::To(aim);
                self.aim(aim, look)
            }
        }
    }

    fn take_half(&mut self, kept: u64, look: &Look) -> Action {
        let available = look.report.map_or(0, |report| report.available);
        let spare = available.saturating_sub(kept).min(look.actual.saturating_sub(kept));
        match spare {
            0..GAIN_LEAST => Action::Stop(Why::LittleLeft),
            _ => self.aim(look.actual - (spare / 2).max(GAIN_LEAST), look),
        }
    }

    fn aim(&mut self, size: u64, look: &Look) -> Action {
        let aim = size & !(MIB - 1);
        self.faults = look.report.map_or(0, |report| report.faults);
        self.step = Step::Growing { aim, actual: look.actual, since: look.at };
        Action::Aim(aim)
    }

    fn watch(&mut self, aim: u64, actual: u64, since: Duration, look: &Look) -> Action {
        if look.actual < actual {
            self.step = Step::Growing { aim, actual: look.actual, since: look.at };
        } else if look.at.saturating_sub(since) >= STALLED {
            // The guest is asked no more for what it does not have.
            return Action::StopAt(look.actual, Why::Stalled);
        }
        Action::Look
    }

    fn is_pressed(&self, look: &Look) -> bool {
        let (Some(first), Some(now)) = (self.first, look.report) else { return false };
        now.swapped.saturating_sub(first.swapped) > SWAPPED_MOST
            || now.faults.saturating_sub(self.faults) > FAULTS_MOST
    }
}

impl Daemon {
    /// Squeezes the guest as it is asked, and says how much it gave up. A guest that stands still can give
    /// nothing.
    pub(crate) fn squeeze(
        &self,
        record: &mut Record,
        live: &mut RunningMachine,
        how: BalloonTarget,
        reporter: &ProgressReporter,
    ) -> Result<Option<ByteSize>, DaemonError> {
        let memory = record.config.memory;
        let goal = match how {
            BalloonTarget::Off => return Ok(None),
            BalloonTarget::Auto if live.is_paused() => return Ok(None),
            BalloonTarget::To { .. } if live.is_paused() => {
                let (name, state) = (record.name.clone(), "paused");
                return Err(DaemonError::State { name, state, needed: "running" });
            }
            BalloonTarget::Auto => Goal::Spare((memory.0 / KEPT_PART).max(KEPT_LEAST)),
            BalloonTarget::To { size } => Goal::To(checked(size, memory)?.0),
        };
        // Not what QEMU's balloon holds now: a guest that was squeezed a moment ago is still taking its
        // memory back.
        let former = record.ballooned.unwrap_or(record.config.memory);
        let actual = look_at(live)?.actual;
        record.squeezed_from = Some(former);
        record.save(&self.layout)?;
        let squeezed = run(BalloonPlan::new(goal, actual.0), live, reporter);
        // The guest reports to nobody from here on.
        let _ = live.qemu.ask_balloon_stats(false);
        match squeezed {
            Ok(left) => Ok(Some(ByteSize(former.0.saturating_sub(left)))),
            Err(error) => {
                self.restore_balloon(record, live);
                Err(error)
            }
        }
    }

    /// Gives a guest back what it had, if it was squeezed. If that fails, the next daemon tries again.
    pub(crate) fn restore_balloon(&self, record: &mut Record, live: &RunningMachine) {
        let Some(former) = record.squeezed_from else { return };
        let former = former.min(record.config.memory);
        let given = live.qemu.balloon(former).map_err(qemu_error).and_then(|()| {
            record.squeezed_from = None;
            record.save(&self.layout)
        });
        if let Err(error) = given {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(name = %record.name, error, "a guest may not have got back all of its memory");
        }
    }
}

/// A size that a guest can be left with.
pub(crate) fn checked(size: ByteSize, memory: ByteSize) -> Result<ByteSize, DaemonError> {
    match size.0 {
        MIB.. if size <= memory => Ok(size),
        _ => Err(DaemonError::invalid(format!("a balloon size lies between 1 MiB and {memory}"))),
    }
}

/// Follows a course to its end; the memory that the guest is left with.
fn run(
    mut course: BalloonPlan,
    live: &RunningMachine,
    reporter: &ProgressReporter,
) -> Result<u64, DaemonError> {
    let begun = Instant::now();
    loop {
        live.qemu.ask_balloon_stats(true).map_err(qemu_error)?;
        std::thread::sleep(EVERY);
        if reporter.is_cancelled() {
            return Err(DaemonError::Cancelled { left: "the machine runs on, nothing was stored".into() });
        }
        let seen = look_at(live)?;
        let look = Look { at: begun.elapsed(), actual: seen.actual.0, report: report_of(&seen) };
        reporter.progress("squeezing the guest", Unit::Bytes, look.actual, None);
        let action = course.next(&look);
        tracing::debug!(?look, ?action, "squeezing a guest");
        if let Action::Aim(size) | Action::StopAt(size, _) = action {
            live.qemu.balloon(ByteSize(size)).map_err(qemu_error)?;
        }
        if let Action::Stop(why) | Action::StopAt(_, why) = action {
            tracing::info!(?why, left = %seen.actual, took = ?look.at, "a guest was squeezed");
            return Ok(look.actual);
        }
    }
}

fn look_at(live: &RunningMachine) -> Result<BalloonStats, DaemonError> {
    live.qemu.balloon_now().map_err(qemu_error)
}

/// By QEMU's names (`docs/interop/virtio-balloon-stats.rst`).
fn report_of(stats: &BalloonStats) -> Option<Report> {
    let figure = |name: &str| stats.guest.get(name).copied();
    Some(Report {
        available: figure("stat-available-memory").or(figure("stat-free-memory"))?,
        swapped: figure("stat-swap-out").unwrap_or(0),
        faults: figure("stat-major-faults").unwrap_or(0),
    })
}

fn qemu_error(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> DaemonError {
    DaemonError::Qemu { action: "squeeze the guest", source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that needs so much, caches so much, and follows its balloon as fast as `speed` bytes a look.
    struct Guest {
        actual: u64,
        aim: u64,
        needs: u64,
        speed: u64,
        talks: bool,
        honest: bool,
    }

    impl Guest {
        fn new(memory: u64, needs: u64) -> Self {
            let (memory, needs) = (memory * MIB, needs * MIB);
            Self { actual: memory, aim: memory, needs, speed: 16 * MIB, talks: true, honest: true }
        }

        fn observe(&self, at: Duration) -> Look {
            let lacks = self.needs.saturating_sub(self.actual);
            let available = if self.honest { self.actual.saturating_sub(self.needs) } else { 1 << 40 };
            let report = Report { available, swapped: lacks, faults: lacks / 4096 };
            Look { at, actual: self.actual, report: self.talks.then_some(report) }
        }

        /// Runs a course and says why it ended, with what the guest had at the smallest and has after it.
        fn squeeze(&mut self, goal: Goal) -> (Why, u64, u64) {
            let (mut course, mut at, mut least) =
                (BalloonPlan::new(goal, self.actual), Duration::ZERO, u64::MAX);
            loop {
                at += EVERY;
                self.actual = self.actual - self.speed.min(self.actual.saturating_sub(self.aim));
                least = least.min(self.actual);
                match course.next(&self.observe(at)) {
                    Action::Aim(size) => self.aim = size,
                    Action::Look => {}
                    Action::Stop(why) => return (why, least / MIB, self.aim / MIB),
                    Action::StopAt(size, why) => return (why, least / MIB, size / MIB),
                }
                assert!(at < 2 * PATIENCE, "it does not end: {course:?}");
            }
        }
    }

    #[test]
    fn a_guest_is_left_with_what_it_needs_and_a_little() {
        for (memory, needs) in [(512, 100), (192, 60), (4096, 300), (64, 50)] {
            let kept = (memory * MIB / KEPT_PART).max(KEPT_LEAST);
            let (why, least, after) =
                Guest { speed: 64 * MIB, ..Guest::new(memory, needs) }.squeeze(Goal::Spare(kept));
            assert_eq!(why, Why::LittleLeft, "{memory} {needs}");
            let (low, high) = (needs + kept / MIB - 1, needs + (kept + GAIN_LEAST) / MIB + 1);
            assert!((low..=high).contains(&after), "{memory} {needs}: {after} is not in {low}..={high}");
            assert!(least >= needs, "it was pressed below what it needs");
        }
    }

    #[test]
    fn a_guest_that_begins_to_swap_gets_the_last_step_back() {
        let mut guest = Guest { honest: false, ..Guest::new(512, 200) };
        let (why, least, after) = guest.squeeze(Goal::Spare(16 * MIB));
        assert_eq!(why, Why::Pressed);
        assert!(least < 200 && after >= 200, "{least} {after}");
    }

    #[test]
    fn a_silent_guest_gives_a_quarter_and_one_without_a_driver_nothing() {
        let silent = Guest { talks: false, ..Guest::new(512, 100) };
        assert_eq!({ silent }.squeeze(Goal::Spare(16 * MIB)), (Why::Reached, 384, 384));
        let dead = Guest { talks: false, speed: 0, ..Guest::new(512, 100) };
        assert_eq!({ dead }.squeeze(Goal::Spare(16 * MIB)), (Why::Stalled, 512, 512));
    }

    #[test]
    fn a_size_is_reached_or_the_balloon_ends_where_it_stalls() {
        assert_eq!(Guest::new(512, 100).squeeze(Goal::To(128 * MIB)), (Why::Reached, 128, 128));
        assert_eq!(Guest::new(128, 100).squeeze(Goal::To(256 * MIB)), (Why::Reached, 128, 128));
        let mut stuck = Guest { speed: 0, ..Guest::new(512, 100) };
        assert_eq!(stuck.squeeze(Goal::To(128 * MIB)), (Why::Stalled, 512, 512));
        let mut slow = Guest { speed: 4096, ..Guest::new(512, 100) };
        let (why, least, after) = slow.squeeze(Goal::To(128 * MIB));
        assert_eq!((why, least), (Why::Late, after), "what is not taken in time is not taken");
    }
}
