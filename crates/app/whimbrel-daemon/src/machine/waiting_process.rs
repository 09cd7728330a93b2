//! Waiting processes: while the daemon runs, a process waits for each machine at rest, ready to have it. If
//! the daemon is killed, that process serves the machine, as one that was left by a daemon does, until the
//! next daemon takes it.
//!
//! It has the machine once this daemon has ended, which it sees by a pidfd, and never before. What was
//! written since the last checkpoint is not known then: the next checkpoint reads everything.
//!
//! A machine of which nobody has asked anything for a while passes to the process that waits for it
//! ([`super::serving_process`]).
//!
//! Invariant: a machine has a waiting process only while nobody holds its lock. Whoever takes the lock ends
//! it first and waits for its end, so that no machine is taken that is being moved, protected or ended. A
//! daemon that dies in the middle of an operation leaves the machine as one without processes does.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineData, RETURN},
        machine_process::{LIMITS, end, start_process},
        serving_process::ServingProcess,
    },
};
use std::{
    path::{Path, PathBuf},
    process::Child,
    sync::{Arc, MutexGuard},
    time::Duration,
};
use whimbrel_vm::{
    Given, PassError, RunningMachine,
    channel::Channel,
    give_offered, offer_for_later,
    process_report::{self, Question},
    runtime_dir,
};

/// Interval between looks for machines at rest.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// Time for a process to be ready, for which an operation on the machine may have to wait.
const READY: Duration = Duration::from_secs(10);
/// Pause after a machine for which no process can wait at the moment.
pub(super) const RETRY: Duration = Duration::from_secs(10);

/// Process that has a machine once this daemon has ended. Dropping it ends it and waits for its end.
pub(crate) struct WaitingProcess {
    slot: PathBuf,
    /// None once the process has the machine.
    child: Option<Child>,
    /// Open for as long as it waits.
    channel: Channel,
}

/// What became of a machine that was passed to the process that waited for it.
pub(super) enum Passed {
    /// The process has it. The guest was stopped for `stopped`.
    Gone { child: Child, stopped: Duration },
    /// The daemon still has it, and the process has ended.
    Kept { machine: Box<RunningMachine>, reason: PassError },
}

impl WaitingProcess {
    /// Starts a process for a machine of this daemon, and returns when it is ready.
    fn start(live: &mut RunningMachine, slot: &Path) -> Result<Self, PassError> {
        let (child, channel) = start_process(slot)?;
        let process = Self { slot: slot.to_owned(), child: Some(child), channel };
        offer_for_later(live, &process.channel, READY)?;
        Ok(process)
    }

    /// Passes the machine to the process.
    ///
    /// # Errors
    /// If nobody has the machine any more: it is to be adopted.
    pub(super) fn pass(mut self, live: RunningMachine) -> Result<Passed, PassError> {
        match (give_offered(live, &self.channel, &LIMITS)?, self.child.take()) {
            (Given::Gone { stopped }, Some(child)) => Ok(Passed::Gone { child, stopped }),
            (Given::Gone { .. }, None) => Err(PassError::Unexpected { what: "a machine twice" }),
            (Given::Kept { machine, reason, .. }, child) => {
                self.child = child;
                Ok(Passed::Kept { machine, reason })
            }
        }
    }

    pub(super) fn is_alive(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }
}

/// Takes a machine back from its process, or tries again later. Who has the lock already has done so.
fn take_back(machine: &Machine) {
    if machine.try_lock_in_any_phase(RETURN, None).is_err() {
        machine.rest_later(RETRY);
    }
}

impl Drop for WaitingProcess {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            end(child);
            runtime_dir::end_machine_process(&self.slot);
        }
    }
}

impl Daemon {
    /// Has a process wait for each machine at rest, or have it, until the daemon is told to stop. Without
    /// `machine_processes`, takes the machines that one still has.
    pub(crate) fn start_machine_processes(
        self: &Arc<Self>,
        machine_processes: bool,
    ) -> Result<(), DaemonError> {
        let host = self.clone();
        let look_at = move |machine: &Arc<Machine>| match machine_processes {
            true => host.look_after_process(machine),
            false => {
                let is_with_process = |data: MutexGuard<'_, MachineData>| data.serving.is_some();
                if machine.data_at_rest().is_some_and(is_with_process) {
                    take_back(machine);
                }
            }
        };
        let host = self.clone();
        let work = move || {
            while host.sleep_unless_closing(CHECK_EVERY) {
                host.machines.all().iter().for_each(&look_at);
            }
        };
        let thread = std::thread::Builder::new().name("waiting".into()).spawn(work);
        thread.map(drop).map_err(|source| DaemonError::Thread { source })
    }

    fn look_after_process(self: &Arc<Self>, machine: &Arc<Machine>) {
        let Some(mut data) = machine.data_at_rest() else { return };
        if data.serving.is_none() {
            let has_one = data.waiting.as_mut().is_some_and(WaitingProcess::is_alive);
            if !data.is_here() || self.protections.may_be_elsewhere(machine.name()) {
                return;
            }
            if !has_one {
                return self.have_process_wait(machine, &mut data);
            }
            if machine.is_long_at_rest() && !data.needs_daemon() {
                self.pass_to_process(machine, &mut data);
            }
        }
        let due = data.serving.as_mut().and_then(ServingProcess::due_for_report);
        let is_over = data.serving.as_mut().is_some_and(ServingProcess::is_over);
        drop(data);
        if is_over {
            return take_back(machine);
        }
        due.iter().for_each(|slot| self.ask_for_report(machine, slot));
    }

    /// Asks the process that has the machine in `slot` for a report. Nobody waits for the answer.
    fn ask_for_report(&self, machine: &Machine, slot: &Path) {
        let is_guest_due = self.addresses.is_due_for_process(machine);
        let question = if is_guest_due { Question::ReportAndGuest } else { Question::Report };
        let report = process_report::ask(slot, question);
        // Somebody may have taken the machine meanwhile.
        let Some(mut data) = machine.data_at_rest() else { return };
        let is_its = |serving: &mut ServingProcess| serving.note_answer(slot, report.as_ref());
        if let (Some(true), Ok(report)) = (data.serving.as_mut().map(is_its), &report) {
            machine.show_report(report);
            if is_guest_due {
                self.addresses.note_reported(machine, report);
            }
        }
    }

    fn have_process_wait(&self, machine: &Machine, data: &mut MachineData) {
        data.waiting = None;
        let MachineData { running: Some(live), waiting, .. } = data else { return };
        let name = machine.name();
        let started = match live.unpassable() {
            Some(_) => None,
            None => {
                let slot = live.runtime_path().to_owned();
                let started = WaitingProcess::start(live, &slot);
                let warn = |error: &PassError| {
                    let error = error as &dyn std::error::Error;
                    tracing::warn!(machine = %name, error, "no process waits for it");
                };
                started.inspect_err(warn).ok()
            }
        };
        match started {
            Some(process) => {
                let pid = process.child.as_ref().map(Child::id);
                tracing::info!(machine = %name, pid, "a process waits for it");
                *waiting = Some(process);
            }
            None => machine.rest_later(RETRY),
        }
    }
}
