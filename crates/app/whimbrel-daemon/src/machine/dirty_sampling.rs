//! Dirty sampling: the dirty trace of a machine for a client, and a short measurement of many machines.
//!
//! An observation has its own copy of the dirty set (`whimbrel-capture`, `dirty_observer`), so sampling needs
//! no machine lock and takes nothing from a checkpoint or migration under way. It ends with the machine, the
//! client or the daemon.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::entry::{Machine, Use},
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use whimbrel_api::DirtyTraceRequest;
use whimbrel_capture::{
    dirty_observer::{Observation, ObserveError},
    dirty_trace::{self, DirtyTraceHeader},
};
use whimbrel_core::MachineName;

/// Default interval (section 4.1 of Clark et al., NSDI 2005) and duration (one window of theirs).
const SAMPLE_MS: u64 = 50;
const DURATION_MS: u64 = 8_000;
/// A sample of a large dirty set costs up to 2 ms, so a shorter interval would be a load of its own.
const SAMPLE_MS_MIN: u64 = 10;
const SAMPLE_MS_MAX: u64 = 10_000;
const DURATION_MS_MAX: u64 = 24 * 3_600_000;
/// Samples that may wait for a slow client; beyond that samples become rarer.
const WAITING: usize = 64;

/// A request with defaults filled in and bounds checked.
struct Plan {
    sample: Duration,
    duration: Duration,
}

impl Plan {
    fn of(request: &DirtyTraceRequest) -> Result<Self, DaemonError> {
        let sample = request.sample_ms.unwrap_or(SAMPLE_MS);
        let duration = request.duration_ms.unwrap_or(DURATION_MS);
        if !(SAMPLE_MS_MIN..=SAMPLE_MS_MAX).contains(&sample) {
            return Err(DaemonError::invalid(format!(
                "the sample interval must be {SAMPLE_MS_MIN} ms to {SAMPLE_MS_MAX} ms"
            )));
        }
        if !(sample..=DURATION_MS_MAX).contains(&duration) {
            return Err(DaemonError::invalid("sampling must last at least one sample and at most a day"));
        }
        Ok(Self { sample: Duration::from_millis(sample), duration: Duration::from_millis(duration) })
    }
}

impl Daemon {
    /// Samples the dirty pages of a machine. The chunks form a dirty trace.
    pub(crate) fn dirty_trace(
        self: &Arc<Self>,
        name: &MachineName,
        request: &DirtyTraceRequest,
    ) -> Result<mpsc::Receiver<Bytes>, DaemonError> {
        let plan = Plan::of(request)?;
        let machine = self.machines.get(name)?;
        let used = machine.use_here()?;
        let tap = machine.dirty_observer().ok_or_else(|| not_running(name))?;
        let (pages, present) = tap.extent().map_err(|error| watch_error(name, error))?;
        let (watch, _) = machine.observe()?;
        let head =
            DirtyTraceHeader { pages, populated: present, interval: plan.sample, start_ms: crate::now_ms() };
        let (out, pieces) = mpsc::channel(WAITING);
        let (host, name) = (self.clone(), name.clone());
        let sample = move || {
            let _used = used;
            if out.blocking_send(dirty_trace::encode_header(&head).into()).is_ok() {
                host.sample(&name, watch, &plan, &out);
            }
        };
        let started = std::thread::Builder::new().name("wws".into()).spawn(sample);
        started.map_err(|source| DaemonError::Memory { source: source.into() })?;
        Ok(pieces)
    }

    fn sample(&self, name: &MachineName, mut watch: Observation, plan: &Plan, out: &mpsc::Sender<Bytes>) {
        let begun = Instant::now();
        let (mut last, mut due) = (begun, begun);
        while begun.elapsed() < plan.duration {
            due += plan.sample;
            if !self.sleep_until(due) {
                return;
            }
            let dirty = match watch.take() {
                Ok(dirty) => dirty,
                Err(error) => {
                    tracing::debug!(%name, error = &error as &dyn std::error::Error, "sampling ended");
                    return;
                }
            };
            let now = Instant::now();
            let piece = dirty_trace::encode_sample((now - last).max(Duration::from_micros(1)), dirty.runs());
            last = now;
            // Late samples are not made up for.
            due = due.max(now - plan.sample.min(now - begun));
            if out.blocking_send(piece.into()).is_err() {
                return;
            }
        }
    }

    /// Sleeps to the millisecond. Returns false as soon as the daemon closes.
    fn sleep_until(&self, due: Instant) -> bool {
        while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(Duration::from_millis(100)));
            if !self.sleep_unless_closing(Duration::ZERO) {
                return false;
            }
        }
        self.sleep_unless_closing(Duration::ZERO)
    }

    /// Pages that each of these machines dirties in `time`, or until `go_on` returns false. A machine that
    /// ends meanwhile is left out.
    pub(crate) fn measure_dirty_pages(
        &self,
        machines: &[Arc<Machine>],
        time: Duration,
        go_on: &dyn Fn() -> bool,
    ) -> BTreeMap<MachineName, u64> {
        let watch = |machine: &Arc<Machine>| Some((machine.name().clone(), machine.observe().ok()?));
        let watches: Vec<_> = machines.iter().filter_map(watch).collect();
        let until = Instant::now() + time;
        while Instant::now() < until && go_on() && self.sleep_unless_closing(Duration::from_millis(20)) {}
        let count = |(name, (mut watch, _)): (MachineName, (Observation, Use))| {
            Some((name, watch.take().ok()?.count()))
        };
        watches.into_iter().filter_map(count).collect()
    }
}

impl Machine {
    /// Starts to observe the machine's writes to its memory, which stays with the daemon meanwhile.
    pub(crate) fn observe(&self) -> Result<(Observation, Use), DaemonError> {
        let used = self.use_here()?;
        let tap = self.dirty_observer().ok_or_else(|| not_running(self.name()))?;
        let observation = tap.observe().map_err(|error| watch_error(self.name(), error))?;
        Ok((observation, used))
    }
}

fn not_running(name: &MachineName) -> DaemonError {
    DaemonError::State { name: name.clone(), state: "not running", needed: "running" }
}

fn watch_error(name: &MachineName, error: ObserveError) -> DaemonError {
    match error {
        ObserveError::Gone(_) => not_running(name),
        ObserveError::Array(source) => DaemonError::Memory { source: source.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_times_are_refused_before_anything_is_sampled() {
        let plan = |sample_ms, duration_ms| Plan::of(&DirtyTraceRequest { sample_ms, duration_ms });
        let usual = plan(None, None).unwrap();
        assert_eq!((usual.sample, usual.duration), (Duration::from_millis(50), Duration::from_secs(8)));
        for (sample, duration) in [(9, 100), (10_001, 20_000), (0, 0), (100, 99), (50, DURATION_MS_MAX + 1)] {
            assert!(plan(Some(sample), Some(duration)).is_err(), "{sample} {duration}");
        }
    }
}
