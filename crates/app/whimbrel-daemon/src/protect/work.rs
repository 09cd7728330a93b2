//! Work on a machine while it is protected: checkpoints, the balloon, and a migration to its standby.
//!
//! The protection thread has the machine and its lock. It does the work between two epochs, and captures
//! epochs in the breaks of what takes long.

use super::primary::handle::{ProtectionCommand, ProtectionHandle};
use crate::{
    capsule::checkpoint::CheckpointOptions,
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::{entry::Machine, record::Record},
};
use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use whimbrel_api::{BalloonTarget, CaptureReport, FailoverRequest, Operation, ProtectState};
use whimbrel_capture::AfterCapture;
use whimbrel_core::{HostName, MachineName};
use whimbrel_vm::{CaptureBreaks, CapturedArrays, RunningMachine};

/// Interval at which a guest that switches itself off is looked at.
const OFF_POLL: Duration = Duration::from_millis(50);
/// Longest wait for qemu-ga.
const AGENT: Duration = Duration::from_secs(2);

impl Daemon {
    /// Takes a capsule of a machine that is protected now; none if it is not.
    pub(crate) fn checkpoint_protected(
        self: &Arc<Self>,
        machine: &Machine,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<Option<CaptureReport>, DaemonError> {
        let Some(handle) = self.protected_now(machine.name()) else { return Ok(None) };
        if wanted.arrays == CapturedArrays::Disks {
            return Err(refused(&handle, "a checkpoint of its disks alone would stop its epochs"));
        }
        if wanted.balloon != BalloonTarget::Off {
            return Err(refused(&handle, "a balloon for the checkpoint would stop its epochs"));
        }
        let begun = Instant::now();
        let (host, wanted, reporter) = (self.clone(), wanted.clone(), reporter.for_another_thread());
        let report = handle.work(move |record, live, breaks| {
            let mut breaks = Some(breaks);
            let run_on = AfterCapture::Unpause;
            let taken = host.take_capsule_as_is(record, live, run_on, &wanted, (&mut breaks, &reporter))?;
            record.save(&host.directories)?;
            Ok(taken)
        })?;
        Ok(Some(CaptureReport { total_ms: begun.elapsed().as_secs_f64() * 1e3, ..report }))
    }

    /// Does short work on a machine that is protected now; none if it is not.
    pub(crate) fn work_protected<T: Send + 'static>(
        &self,
        name: &MachineName,
        work: impl FnOnce(&mut Record, &mut RunningMachine) -> Result<T, DaemonError> + Send + 'static,
    ) -> Option<Result<T, DaemonError>> {
        Some(self.protected_now(name)?.work(move |record, live, _| work(record, live)))
    }

    /// Migrates a protected machine, which can only go to its standby, by a failover; none if it is not
    /// protected now.
    pub(crate) fn migrate_to_standby(
        self: &Arc<Self>,
        name: &MachineName,
        to: &HostName,
    ) -> Option<Result<Operation, DaemonError>> {
        let handle = self.protected_now(name)?;
        if handle.settings().request.host != *to {
            return Some(Err(refused(&handle, "it moves only to its standby")));
        }
        Some(self.failover(name, FailoverRequest::default()))
    }

    /// Presses the power button of a machine that is protected now; none if it is not. Its protection ends
    /// when the guest has switched itself off: one that does not stays protected.
    pub(crate) fn power_down_protected(
        &self,
        machine: &Machine,
        patience: Duration,
    ) -> Option<Result<(), DaemonError>> {
        let pressed = self.work_protected(machine.name(), |_, live| {
            let failed = |source| DaemonError::Qemu { action: "press the power button", source };
            live.qemu.powerdown().map_err(|source| failed(source.into()))
        })?;
        let is_on = || machine.info().pid.is_some();
        let begun = Instant::now();
        let mut is_asked = false;
        while pressed.is_ok() && is_on() {
            if begun.elapsed() >= patience {
                return Some(Err(DaemonError::StillRunning { seconds: patience.as_secs() }));
            }
            if begun.elapsed() >= patience / 3 && !is_asked {
                is_asked = true;
                ask_agent(machine);
            }
            std::thread::sleep(OFF_POLL);
        }
        Some(pressed)
    }

    fn protected_now(&self, name: &MachineName) -> Option<Arc<ProtectionHandle>> {
        self.protections.handle(name).filter(|handle| handle.standing().0 == ProtectState::Protected)
    }
}

/// Has qemu-ga switch the guest off, if the guest has it.
fn ask_agent(machine: &Machine) {
    let Ok(agent) = machine.qemu_ga() else { return };
    if let Err(error) = agent.session(AGENT).and_then(|mut session| session.shut_down()) {
        tracing::debug!(%error, "qemu-ga does not shut the guest down");
    }
}

fn refused(handle: &ProtectionHandle, why: &'static str) -> DaemonError {
    let standby = handle.settings().request.host.clone();
    DaemonError::Protected { name: handle.name.clone(), standby, why }
}

impl ProtectionHandle {
    /// Has the protection thread do work, and waits for it.
    fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Record, &mut RunningMachine, &mut dyn CaptureBreaks) -> Result<T, DaemonError>
        + Send
        + 'static,
    ) -> Result<T, DaemonError> {
        let (answer, answered) = mpsc::channel();
        let work = move |record: &mut Record, live: &mut RunningMachine, breaks: &mut dyn CaptureBreaks| {
            let _ = answer.send(work(record, live, breaks));
        };
        self.command(ProtectionCommand::Work(Box::new(work)));
        // Dropped without an answer if the protection ends before.
        let busy = |_| DaemonError::Busy { name: self.name.clone(), with: "a protection".into() };
        answered.recv().map_err(busy)?
    }
}
