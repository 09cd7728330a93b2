//! Balloon: takes memory from a guest before its state is saved, and gives it back afterwards.
//!
//! [`BalloonPlan`] decides and is pure: observations of the guest in, sizes of the balloon out. It takes half
//! of what the guest can spare, observes again, and ends when little is left, when the guest begins to swap
//! (the paper's rule, SOSP 2002 section 4.1: a MiB of it) or to read again what it had to drop, or when no
//! more memory comes. The guest's allocator decides what goes first: free pages, then caches.

use super::{RunningError, RunningMachine};
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_qemu::BalloonStats;

const MIB: u64 = 1 << 20;
/// Memory left to a guest beyond its need, so that it can still work: this share of its memory, at least some
/// MiB.
const RESERVE_SHARE: u64 = 32;
const RESERVE_MIN: u64 = 8 * MIB;
/// A step that gains less is not worth its time.
const GAIN_MIN: u64 = 4 * MIB;
/// Bytes swapped out since the start; beyond that the guest needs what was taken.
const SWAPPED_MAX: u64 = MIB;
/// Major faults in one step; beyond that the guest had to drop what it uses.
const FAULTS_MAX: u64 = 500;
/// A balloon that does not grow for this long has what there is.
const STALLED: Duration = Duration::from_millis(1500);
/// Time limit of a plan.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait for the first report of a guest.
const REPORT_TIMEOUT: Duration = Duration::from_millis(1500);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Observations to skip after a step, so that the guest's report is newer than the step.
const SETTLE_POLLS: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Report {
    /// Bytes that it could give to programs without swapping.
    available: u64,
    /// Bytes swapped out since its boot.
    swapped: u64,
    /// Pages read from a disk because a program needed them (major faults), since its boot.
    faults: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Observation {
    /// Time since the start.
    at: Duration,
    /// Current memory size.
    actual: u64,
    /// The guest's report, if it sends any.
    report: Option<Report>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Set the balloon so that it leaves the guest this size, and observe again.
    SetSize(u64),
    Observe,
    Stop(PlanEnd),
    /// The plan has ended; set the balloon so that it leaves the guest this size.
    StopAt(u64, PlanEnd),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlanEnd {
    /// The guest has the requested size.
    Reached,
    /// The guest has little left to give.
    LittleLeft,
    /// The guest swaps, or reads again what it dropped.
    Pressed,
    /// The balloon does not grow any more.
    Stalled,
    Late,
}

#[derive(Debug)]
struct BalloonPlan {
    goal: Goal,
    step: Step,
    /// The smallest size without pressure on the guest.
    safe_size: u64,
    first: Option<Report>,
    /// Major faults before the current step.
    faults: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Leave this much beyond the guest's need.
    Spare(u64),
    To(u64),
}

/// How much memory a guest is to give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalloonGoal {
    /// What it can spare, and still work.
    Spare {
        /// Memory of the machine.
        memory: ByteSize,
    },
    /// All but this size.
    To(ByteSize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Not started: waits for the guest's first report.
    WaitingForReport,
    /// The balloon grows; it last grew to `actual` at `since`.
    Growing { aim: u64, actual: u64, since: Duration },
    /// The balloon has grown; observations to wait for a newer report.
    Settling { looks: u32 },
}

impl BalloonPlan {
    fn new(goal: Goal, actual: u64) -> Self {
        Self { goal, step: Step::WaitingForReport, safe_size: actual, first: None, faults: 0 }
    }

    /// The action after an observation.
    fn next(&mut self, look: &Observation) -> Action {
        self.first = self.first.or(look.report);
        if look.at >= PATIENCE {
            return Action::StopAt(look.actual, PlanEnd::Late);
        }
        match (self.step, self.goal) {
            (Step::WaitingForReport, Goal::To(size)) if size < look.actual => self.aim(size, look),
            (Step::WaitingForReport, Goal::To(_)) => Action::Stop(PlanEnd::Reached),
            (Step::WaitingForReport, Goal::Spare(kept)) => self.start(kept, look),
            (Step::Growing { .. } | Step::Settling { .. }, Goal::Spare(_)) if self.is_pressed(look) => {
                Action::StopAt(self.safe_size, PlanEnd::Pressed)
            }
            (Step::Growing { aim, .. }, Goal::To(_)) if look.actual <= aim => Action::Stop(PlanEnd::Reached),
            (Step::Growing { aim, .. }, Goal::Spare(_)) if look.actual <= aim => {
                self.step = Step::Settling { looks: SETTLE_POLLS };
                Action::Observe
            }
            (Step::Growing { aim, actual, since }, _) => self.watch(aim, actual, since, look),
            (Step::Settling { looks: 0 }, Goal::Spare(kept)) => {
                self.safe_size = look.actual;
                self.take_half(kept, look)
            }
            (Step::Settling { looks }, _) => {
                self.step = Step::Settling { looks: looks.saturating_sub(1) };
                Action::Observe
            }
        }
    }

    /// Starts with the first report. A guest that sends none is asked for a quarter of its memory, as any
    /// guest can be.
    fn start(&mut self, kept: u64, look: &Observation) -> Action {
        match look.report {
            Some(_) => self.take_half(kept, look),
            None if look.at < REPORT_TIMEOUT => Action::Observe,
            None => {
                let aim = look.actual - look.actual / 4;
                self.goal = Goal::To(aim);
                self.aim(aim, look)
            }
        }
    }

    fn take_half(&mut self, kept: u64, look: &Observation) -> Action {
        let available = look.report.map_or(0, |report| report.available);
        let spare = available.saturating_sub(kept).min(look.actual.saturating_sub(kept));
        match spare {
            0..GAIN_MIN => Action::Stop(PlanEnd::LittleLeft),
            _ => self.aim(look.actual - (spare / 2).max(GAIN_MIN), look),
        }
    }

    fn aim(&mut self, size: u64, look: &Observation) -> Action {
        let aim = size & !(MIB - 1);
        self.faults = look.report.map_or(0, |report| report.faults);
        self.step = Step::Growing { aim, actual: look.actual, since: look.at };
        Action::SetSize(aim)
    }

    fn watch(&mut self, aim: u64, actual: u64, since: Duration, look: &Observation) -> Action {
        if look.actual < actual {
            self.step = Step::Growing { aim, actual: look.actual, since: look.at };
        } else if look.at.saturating_sub(since) >= STALLED {
            // The guest is not asked for more than it has.
            return Action::StopAt(look.actual, PlanEnd::Stalled);
        }
        Action::Observe
    }

    fn is_pressed(&self, look: &Observation) -> bool {
        let (Some(first), Some(now)) = (self.first, look.report) else { return false };
        now.swapped.saturating_sub(first.swapped) > SWAPPED_MAX
            || now.faults.saturating_sub(self.faults) > FAULTS_MAX
    }
}

impl RunningMachine {
    /// Memory that the balloon leaves the guest.
    pub fn memory_left(&self) -> Result<ByteSize, RunningError> {
        Ok(balloon_stats(self)?.actual)
    }

    /// Sets the size that the balloon is to leave the guest.
    pub fn set_balloon(&self, size: ByteSize) -> Result<(), RunningError> {
        self.qemu.balloon(size).map_err(qemu_error)
    }

    /// Shrinks the memory of the guest. `observe` is told the size now and then, and says whether to go on.
    /// Returns the memory that the guest is left with; none if it was called off.
    pub fn shrink_memory(
        &mut self,
        goal: BalloonGoal,
        observe: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<ByteSize>, RunningError> {
        let goal = match goal {
            BalloonGoal::Spare { memory } => Goal::Spare((memory.0 / RESERVE_SHARE).max(RESERVE_MIN)),
            BalloonGoal::To(size) => Goal::To(size.0),
        };
        let actual = self.memory_left()?.0;
        let left = run(BalloonPlan::new(goal, actual), self, observe);
        // No report is needed from here on.
        let _ = self.qemu.set_balloon_reports(false);
        Ok(left?.map(ByteSize))
    }
}

/// Runs a plan to its end. Returns the memory that the guest is left with; none if it was called off.
fn run(
    mut course: BalloonPlan,
    live: &RunningMachine,
    observe: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<u64>, RunningError> {
    let begun = Instant::now();
    loop {
        live.qemu.set_balloon_reports(true).map_err(qemu_error)?;
        std::thread::sleep(POLL_INTERVAL);
        let seen = balloon_stats(live)?;
        let look = Observation { at: begun.elapsed(), actual: seen.actual.0, report: report_of(&seen) };
        if !observe(look.actual) {
            return Ok(None);
        }
        let action = course.next(&look);
        tracing::debug!(?look, ?action, "shrinking guest memory");
        if let Action::SetSize(size) | Action::StopAt(size, _) = action {
            live.qemu.balloon(ByteSize(size)).map_err(qemu_error)?;
        }
        if let Action::Stop(why) | Action::StopAt(_, why) = action {
            tracing::info!(?why, left = %seen.actual, took = ?look.at, "guest memory was shrunk");
            return Ok(Some(look.actual));
        }
    }
}

fn balloon_stats(live: &RunningMachine) -> Result<BalloonStats, RunningError> {
    live.qemu.last_balloon_stats().map_err(qemu_error)
}

/// The guest's report by QEMU's names (`docs/interop/virtio-balloon-stats.rst`).
fn report_of(stats: &BalloonStats) -> Option<Report> {
    let figure = |name: &str| stats.guest.get(name).copied();
    Some(Report {
        available: figure("stat-available-memory").or(figure("stat-free-memory"))?,
        swapped: figure("stat-swap-out").unwrap_or(0),
        faults: figure("stat-major-faults").unwrap_or(0),
    })
}

fn qemu_error(source: impl Into<super::error::Cause>) -> RunningError {
    RunningError::qemu("set the balloon", source)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that follows its balloon by `speed` bytes per observation.
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

        fn observe(&self, at: Duration) -> Observation {
            let lacks = self.needs.saturating_sub(self.actual);
            let available = if self.honest { self.actual.saturating_sub(self.needs) } else { 1 << 40 };
            let report = Report { available, swapped: lacks, faults: lacks / 4096 };
            Observation { at, actual: self.actual, report: self.talks.then_some(report) }
        }

        /// Runs a plan. Returns why it ended, and the smallest and the final size of the guest.
        fn squeeze(&mut self, goal: Goal) -> (PlanEnd, u64, u64) {
            let (mut course, mut at, mut least) =
                (BalloonPlan::new(goal, self.actual), Duration::ZERO, u64::MAX);
            loop {
                at += POLL_INTERVAL;
                self.actual = self.actual - self.speed.min(self.actual.saturating_sub(self.aim));
                least = least.min(self.actual);
                match course.next(&self.observe(at)) {
                    Action::SetSize(size) => self.aim = size,
                    Action::Observe => {}
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
            let kept = (memory * MIB / RESERVE_SHARE).max(RESERVE_MIN);
            let (why, least, after) =
                Guest { speed: 64 * MIB, ..Guest::new(memory, needs) }.squeeze(Goal::Spare(kept));
            assert_eq!(why, PlanEnd::LittleLeft, "{memory} {needs}");
            let (low, high) = (needs + kept / MIB - 1, needs + (kept + GAIN_MIN) / MIB + 1);
            assert!((low..=high).contains(&after), "{memory} {needs}: {after} is not in {low}..={high}");
            assert!(least >= needs, "it was pressed below what it needs");
        }
    }

    #[test]
    fn a_guest_that_begins_to_swap_gets_the_last_step_back() {
        let mut guest = Guest { honest: false, ..Guest::new(512, 200) };
        let (why, least, after) = guest.squeeze(Goal::Spare(16 * MIB));
        assert_eq!(why, PlanEnd::Pressed);
        assert!(least < 200 && after >= 200, "{least} {after}");
    }

    #[test]
    fn a_silent_guest_gives_a_quarter_and_one_without_a_driver_nothing() {
        let silent = Guest { talks: false, ..Guest::new(512, 100) };
        assert_eq!({ silent }.squeeze(Goal::Spare(16 * MIB)), (PlanEnd::Reached, 384, 384));
        let dead = Guest { talks: false, speed: 0, ..Guest::new(512, 100) };
        assert_eq!({ dead }.squeeze(Goal::Spare(16 * MIB)), (PlanEnd::Stalled, 512, 512));
    }

    #[test]
    fn a_size_is_reached_or_the_balloon_ends_where_it_stalls() {
        assert_eq!(Guest::new(512, 100).squeeze(Goal::To(128 * MIB)), (PlanEnd::Reached, 128, 128));
        assert_eq!(Guest::new(128, 100).squeeze(Goal::To(256 * MIB)), (PlanEnd::Reached, 128, 128));
        let mut stuck = Guest { speed: 0, ..Guest::new(512, 100) };
        assert_eq!(stuck.squeeze(Goal::To(128 * MIB)), (PlanEnd::Stalled, 512, 512));
        let mut slow = Guest { speed: 4096, ..Guest::new(512, 100) };
        let (why, least, after) = slow.squeeze(Goal::To(128 * MIB));
        assert_eq!((why, least), (PlanEnd::Late, after), "what is not taken in time is not taken");
    }
}
