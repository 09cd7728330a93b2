//! Guest throttle: slows down a machine that writes faster than it can be copied. Its guest agent suspends
//! the processes that write most; without an agent its virtual CPUs run for a part of the time only.
//!
//! Called by the copying loop when rounds no longer help and the downtime would be too long. Each call does a
//! little more, until nothing is left to do. What was done ends with the pause (the CPUs), with the migration
//! however it ends, and with this process; in the guest it ends with the hello of the new host.

use super::spawn;
use crate::core::{error::DaemonError, operations::ProgressReporter};
use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    time::Duration,
};
use whimbrel_api::{MigrateMode, MigrateRequest, ThrottleReport, Unit};
use whimbrel_capture::dirty_observer::{DirtyObserver, Observation};
use whimbrel_core::PageSet;
use whimbrel_guest_protocol::{Command, Process, Report, SAMPLE_MAX, WRITES_ALLOWED};
use whimbrel_machine::{Machine, MachineError};
use whimbrel_memory::{CpuShare, Throttle};
use whimbrel_vm::{AgentCommands, AgentError, RunningMachine};

/// Predicted downtime up to which a machine is not slowed down, unless its user set another.
const BEARABLE_DOWNTIME: Duration = Duration::from_millis(100);
const OBSERVATION_TIME: Duration = Duration::from_millis(100);
/// On a busy host a guest may write little in that time: observation goes on until this many pages were
/// written, or this often.
const PAGES_ENOUGH: u64 = 16 * WRITES_ALLOWED as u64;
const OBSERVATIONS_MAX: usize = 10;
/// Time limit for the agent to find the processes that own the pages.
const STUN_TIMEOUT: Duration = Duration::from_secs(5);
/// Attempts to stun: suspended processes may have hidden others.
const STUNS_MAX: u32 = 3;
/// Time after which the guest releases its processes if the lease is not renewed.
const LEASE: Duration = Duration::from_secs(3);
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Shares of the time in percent, one after the other.
const SHARES: [u8; 3] = [60, 35, 20];

/// The throttle of one machine: what may be done, and what was done.
pub(crate) struct GuestThrottle<'a> {
    reporter: &'a ProgressReporter,
    bearable: Duration,
    guest: AgentCommands,
    tap: DirtyObserver,
    cpu_threads: Vec<u32>,
    stuns_left: u32,
    /// Shares that are left, the smallest last.
    shares_left: Vec<CpuShare>,
    throttle: Option<Throttle>,
    /// Renews the lease in the guest until it is dropped.
    lease_renewal: Option<Sender<()>>,
    slowed: ThrottleReport,
}

impl<'a> GuestThrottle<'a> {
    /// A throttle for a machine that is about to migrate.
    pub(crate) fn new(
        live: &RunningMachine,
        request: &MigrateRequest,
        reporter: &'a ProgressReporter,
    ) -> Result<Self, DaemonError> {
        // A paused machine is not slowed down, and a postcopy migration needs no throttle.
        let may = request.mode == MigrateMode::Live;
        let shares = if may { shares(request.throttle)? } else { Vec::new() };
        let cpu_threads =
            if shares.is_empty() { Vec::new() } else { live.qemu.cpu_threads().unwrap_or_default() };
        Ok(Self {
            reporter,
            bearable: request.downtime_max_ms.map_or(BEARABLE_DOWNTIME, Duration::from_millis),
            guest: live.guest.commands(),
            tap: live.dirty_observer(),
            cpu_threads,
            stuns_left: if request.no_stun || !may { 0 } else { STUNS_MAX },
            shares_left: shares,
            throttle: None,
            lease_renewal: None,
            slowed: ThrottleReport::default(),
        })
    }

    /// Refuses settings that make no sense before anything starts.
    pub(crate) fn check(request: &MigrateRequest) -> Result<(), DaemonError> {
        shares(request.throttle).map(drop)
    }

    /// Does a little more. Returns whether there was anything to do.
    fn slow_down(&mut self, predicted: Duration) -> bool {
        predicted > self.bearable && (self.stun(predicted) || self.throttle())
    }

    fn stun(&mut self, predicted: Duration) -> bool {
        if self.stuns_left == 0 || !self.guest.is_present() {
            return false;
        }
        self.stuns_left -= 1;
        self.reporter.progress("finding the processes that write most", Unit::Items, 0, None);
        let stunned = self.tap.observe().map_err(|_| AgentError::Absent).and_then(|watch| {
            let written = observe(watch).ok_or(AgentError::Absent)?;
            self.guest.ask(&self.stun_command(&written, predicted), STUN_TIMEOUT)
        });
        match stunned {
            Ok(Report::Stunned { held, spared }) => self.record_stunned(&held, &spared),
            Ok(_) => tracing::info!(error = %AgentError::UnexpectedReport, "no process was suspended"),
            Err(error) => tracing::info!(%error, "no process was suspended"),
        }
        if self.slowed.stunned.is_empty() {
            self.stuns_left = 0
        }
        self.lease_renewal.is_some() && self.stuns_left > 0
    }

    fn stun_command(&self, written: &PageSet, predicted: Duration) -> Command {
        let count = written.count();
        // Allows the writes that would bring the downtime to half of what is bearable.
        let part = self.bearable.as_secs_f64() / 2.0 / predicted.as_secs_f64().max(1e-3);
        let each = count.div_ceil(SAMPLE_MAX as u64).max(1);
        let places = written.runs().flat_map(|run| run.pages()).step_by(each as usize);
        Command::Stun {
            lease_ms: LEASE.as_millis() as u32,
            limit: WRITES_ALLOWED,
            spare: (count as f64 * part.min(1.0)) as u32,
            each: u32::try_from(each).unwrap_or(u32::MAX),
            sample: places.filter_map(|page| u32::try_from(page).ok()).take(SAMPLE_MAX).collect(),
        }
    }

    fn record_stunned(&mut self, held: &[Process], spared: &[Process]) {
        let named = |process: &Process| format!("{} ({})", process.name, process.pid);
        tracing::info!(?held, ?spared, "a guest suspended processes that write too fast");
        self.slowed.spared = spared.iter().map(named).collect();
        if held.is_empty() {
            // All processes that are left may write: another observation would find the same.
            self.stuns_left = 0;
            return;
        }
        self.slowed.stunned.extend(held.iter().map(named));
        let words = format!("the guest suspended {}", self.slowed.stunned.join(", "));
        self.reporter.progress(&words, Unit::Items, held.len() as u64, None);
        let guest = self.guest.clone();
        self.lease_renewal.get_or_insert_with(|| renew(guest));
    }

    fn throttle(&mut self) -> bool {
        if self.cpu_threads.is_empty() || self.shares_left.is_empty() {
            return false;
        }
        let share = self.shares_left.remove(0);
        match &self.throttle {
            Some(throttle) => throttle.set(share),
            None => match Throttle::start(&self.cpu_threads, share) {
                Ok(throttle) => self.throttle = Some(throttle),
                Err(error) => {
                    tracing::warn!(%error, "cannot throttle virtual CPUs");
                    self.shares_left.clear();
                    return false;
                }
            },
        }
        let percent = share.as_percent();
        tracing::info!(percent, "virtual CPUs run for a part of the time, so that copying can catch up");
        self.slowed.cpu_percent = Some(percent);
        self.reporter.progress(&format!("CPUs run {percent} % of the time"), Unit::Items, 0, None);
        true
    }
}

impl Drop for GuestThrottle<'_> {
    fn drop(&mut self) {
        self.throttle = None;
        if self.lease_renewal.take().is_some() {
            // A guest that was handed over is released by its new host; here it is paused and reads nothing.
            self.guest.send(&Command::Release);
        }
    }
}

/// Shares to go through, down to the smallest that is allowed.
fn shares(least: Option<u8>) -> Result<Vec<CpuShare>, DaemonError> {
    let least = match least {
        None => CpuShare::MIN,
        Some(percent) => CpuShare::percent(percent).ok_or_else(|| {
            DaemonError::invalid(format!(
                "a throttle must leave {} to {} percent of the time",
                CpuShare::MIN.as_percent(),
                CpuShare::FULL.as_percent()
            ))
        })?,
    };
    if least == CpuShare::FULL {
        return Ok(Vec::new());
    }
    let mut shares: Vec<CpuShare> =
        SHARES.into_iter().filter_map(CpuShare::percent).filter(|share| *share > least).collect();
    shares.push(least);
    Ok(shares)
}

/// Pages that a machine writes in one observation, or in several until there are enough.
fn observe(mut watch: Observation) -> Option<PageSet> {
    // Discards writes from before the observation.
    watch.take().ok()?;
    let mut written: Option<PageSet> = None;
    for _ in 0..OBSERVATIONS_MAX {
        std::thread::sleep(OBSERVATION_TIME);
        let more = watch.take().ok()?;
        match &mut written {
            Some(written) => written.union(&more),
            None => written = Some(more),
        }
        if written.as_ref().is_some_and(|written| written.count() >= PAGES_ENOUGH) {
            break;
        }
    }
    written
}

/// Renews the lease until the returned sender is dropped.
fn renew(guest: AgentCommands) -> Sender<()> {
    let (until, end) = mpsc::channel::<()>();
    spawn("guest-lease", move || {
        while end.recv_timeout(RENEW_EVERY) == Err(RecvTimeoutError::Timeout) {
            guest.send(&Command::ExtendStun { lease_ms: LEASE.as_millis() as u32 });
        }
    });
    until
}

pub(crate) struct ThrottledMachine<'a, 'b> {
    machine: &'a mut dyn Machine,
    throttle: GuestThrottle<'b>,
}

impl<'a, 'b> ThrottledMachine<'a, 'b> {
    pub(crate) fn new(machine: &'a mut dyn Machine, throttle: GuestThrottle<'b>) -> Self {
        Self { machine, throttle }
    }

    /// Releases the machine and returns what was done to it.
    pub(crate) fn release(mut self) -> ThrottleReport {
        std::mem::take(&mut self.throttle.slowed)
    }
}

impl Machine for ThrottledMachine<'_, '_> {
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        self.machine.early_device_state()
    }

    fn about_to_pause(&mut self) {
        self.machine.about_to_pause();
    }

    fn slow_down(&mut self, predicted: Duration) -> bool {
        self.throttle.slow_down(predicted)
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        // The pause would wait for a throttled CPU.
        self.throttle.throttle = None;
        self.machine.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttle_goes_down_in_steps_and_never_below_what_is_allowed() {
        let percents =
            |least| shares(least).unwrap().into_iter().map(CpuShare::as_percent).collect::<Vec<_>>();
        assert_eq!(percents(None), [60, 35, 20]);
        assert_eq!(percents(Some(50)), [60, 50]);
        assert_eq!(percents(Some(80)), [80]);
        assert!(percents(Some(100)).is_empty(), "never slowed");
        for wrong in [0, 19, 101] {
            assert!(shares(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
