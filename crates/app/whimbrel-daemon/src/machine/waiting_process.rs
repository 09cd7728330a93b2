//! Waiting processes: while the daemon runs, a process waits for each machine at rest, ready to have it. If
//! the daemon is killed, that process serves the machine, as one that was left by a daemon does, until the
//! next daemon takes it.
//!
//! It has the machine once this daemon has ended, which it sees by a pidfd, and never before. What was
//! written since the last checkpoint is not known then: the next checkpoint reads everything.
//!
//! Invariant: a machine has a waiting process only while nobody holds its lock. Whoever takes the lock ends
//! it first and waits for its end, so that no machine is taken that is being moved, protected or ended. A
//! daemon that dies in the middle of an operation leaves the machine as one without processes does.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineData},
        machine_process::{end, start_process},
    },
};
use std::{
    path::{Path, PathBuf},
    process::Child,
    sync::Arc,
    time::Duration,
};
use whimbrel_vm::{PassError, RunningMachine, channel::Channel, offer_for_later, runtime_dir};

/// Interval between looks for machines at rest.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// Time for a process to be ready, for which an operation on the machine may have to wait.
const READY: Duration = Duration::from_secs(10);
/// Pause after a machine for which no process can wait at the moment.
const RETRY: Duration = Duration::from_secs(10);

/// Process that has a machine once this daemon has ended. Dropping it ends it and waits for its end.
pub(crate) struct WaitingProcess {
    slot: PathBuf,
    child: Child,
    /// Open for as long as it waits.
    _channel: Channel,
}

impl WaitingProcess {
    /// Starts a process for a machine of this daemon, and returns when it is ready.
    fn start(live: &mut RunningMachine, slot: &Path) -> Result<Self, PassError> {
        let (child, channel) = start_process(slot)?;
        let process = Self { slot: slot.to_owned(), child, _channel: channel };
        offer_for_later(live, &process._channel, READY)?;
        Ok(process)
    }

    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for WaitingProcess {
    fn drop(&mut self) {
        end(&mut self.child);
        runtime_dir::end_machine_process(&self.slot);
    }
}

impl Daemon {
    /// Has a process wait for each machine at rest, until the daemon is told to stop.
    pub(crate) fn start_waiting_processes(self: &Arc<Self>) -> Result<(), DaemonError> {
        let host = self.clone();
        let work = move || {
            while host.sleep_unless_closing(CHECK_EVERY) {
                host.machines.all().iter().for_each(|machine| host.have_process_wait(machine));
            }
        };
        let thread = std::thread::Builder::new().name("waiting".into()).spawn(work);
        thread.map(drop).map_err(|source| DaemonError::Thread { source })
    }

    fn have_process_wait(&self, machine: &Machine) {
        let Some(mut data) = machine.data_at_rest() else { return };
        let has_one = data.waiting.as_mut().is_some_and(WaitingProcess::is_alive);
        if has_one || !data.is_here() || self.protections.may_be_elsewhere(machine.name()) {
            return;
        }
        data.waiting = None;
        let MachineData { running: Some(live), waiting, .. } = &mut *data else { return };
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
                tracing::info!(machine = %name, pid = process.child.id(), "a process waits for it");
                *waiting = Some(process);
            }
            None => machine.rest_later(RETRY),
        }
    }
}
