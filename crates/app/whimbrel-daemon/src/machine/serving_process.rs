//! Serving processes: while the daemon runs, a machine of which nobody has asked anything for a while passes
//! to the process that waits for it ([`super::waiting_process`]), and the next daemon leaves it there. No
//! byte of its guest passes through a daemon then, and one that hangs does not stop it. Whoever takes the
//! machine lock takes the machine back first, and so does who opens its console or its guest agent.
//!
//! Who has a machine is decided by the swap alone (`whimbrel-vm`, `swap`). Its dirty pages pass with it, so
//! the next checkpoint reads no more than if it had stayed.
//!
//! Invariant: a machine is with the daemon, or has a serving process, never both. A process that ends without
//! having passed the machine on leaves it to be adopted, as the death of a daemon does.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineData},
        machine_process::{TAKE_UP, end},
        record::{Phase, Record},
        view::View,
        waiting_process::{Passed, RETRY},
    },
};
use std::{
    path::{Path, PathBuf},
    process::Child,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use whimbrel_api::{MachineInfo, MachineProcess};
use whimbrel_core::{MachineName, is_shortage};
use whimbrel_qemu::QemuProcess;
use whimbrel_vm::{
    Reservation, RuntimeMark, Template,
    channel::ChannelError,
    process_report::{self, ProcessReport},
    runtime_dir,
};

/// Version of the processes that this daemon starts.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Interval at which a process is asked for a report.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// Reports in a row without which a process counts as hanging. One that is only slow passes the machine on.
const SILENT_MAX: u32 = 2;

/// Process that has a machine of this daemon, and outlives this value.
pub(crate) struct ServingProcess {
    daemon: Weak<Daemon>,
    machine: Weak<Machine>,
    slot: PathBuf,
    /// None if it ended before it had the machine.
    process: Option<Holder>,
    /// When it was asked for a report last, and how often in vain since it answered.
    asked: Instant,
    silent: u32,
    /// Memory of the machine, which is promised to nobody else meanwhile.
    _memory: (Reservation, Option<Arc<Template>>),
}

/// A process that has a machine.
enum Holder {
    /// Started by this daemon.
    Own(Child),
    /// Started by an earlier one, which somebody else reaps.
    Earlier(QemuProcess),
}

impl Holder {
    fn is_alive(&mut self) -> bool {
        match self {
            Self::Own(child) => matches!(child.try_wait(), Ok(None)),
            Self::Earlier(process) => process.is_alive(),
        }
    }
}

impl ServingProcess {
    /// Whether the daemon is to take the machine back: the process has ended or hangs, or the guest requests
    /// something.
    pub(super) fn is_over(&mut self) -> bool {
        !self.process.as_mut().is_some_and(Holder::is_alive)
            || RuntimeMark::Wanted.is_on(&self.slot)
            || self.silent >= SILENT_MAX
    }

    /// Runtime directory of the machine, if it is time for a report.
    pub(super) fn due_for_report(&mut self) -> Option<PathBuf> {
        let is_due = self.asked.elapsed() >= ASK_EVERY;
        is_due.then(|| {
            self.asked = Instant::now();
            self.slot.clone()
        })
    }

    /// Notes whether the process of the machine in `slot` has answered. False if this is another one.
    pub(super) fn note_answer(&mut self, slot: &Path, answer: Result<&ProcessReport, &ChannelError>) -> bool {
        if self.slot != slot {
            return false;
        }
        match answer {
            Ok(_) => self.silent = 0,
            Err(error) => {
                // What this daemon lacks says nothing of the process.
                self.silent += u32::from(!is_shortage(error));
                let error = error as &dyn std::error::Error;
                tracing::warn!(slot = %slot.display(), error, "the process of a machine does not answer");
            }
        }
        true
    }

    /// Takes the machine back into `data`, or records why it has ended.
    ///
    /// # Errors
    /// If the process still has the machine, and goes on with it, or if this one lacks memory or descriptors.
    pub(super) fn take_back(&mut self, data: &mut MachineData) -> Result<(), DaemonError> {
        // Both are there for as long as somebody can ask for the lock.
        if let (Some(daemon), Some(machine)) = (self.daemon.upgrade(), self.machine.upgrade()) {
            daemon.return_from_process(&machine, data)?;
        }
        // The process has nothing more to do, or must not do it. One of an earlier daemon has been ended.
        if let Some(Holder::Own(child)) = &mut self.process {
            end(child);
        }
        Ok(())
    }
}

impl Daemon {
    /// Leaves a machine to the process that has had it while no daemon ran. Returns the record if no
    /// process has the machine, or if this daemon has to do something with it.
    pub(super) fn leave_to_earlier_process(self: &Arc<Self>, record: Record) -> Option<Record> {
        let is_here = record.phase == Phase::Here && record.leaving.is_none();
        let is_as_it_was = record.owed.is_none() && record.squeezed_from.is_none();
        let needs_no_daemon = is_as_it_was && record.self_service.is_empty();
        let may_stay = is_here && needs_no_daemon && !self.protections.may_be_elsewhere(&record.name);
        let Some(qemu) = record.process.clone().filter(|_| may_stay) else { return Some(record) };
        let slot = self.directories.runtime_dir(&qemu.slot);
        let Some((process, report)) = process_report::find(&slot, TAKE_UP) else { return Some(record) };
        if report.store_key != self.store.data_key().map(|key| key.id().to_string()) {
            // The process could not read what will be sealed.
            return Some(record);
        }
        let memory = match self.reservation_of_adopted(&record, &qemu) {
            Ok(memory) => memory,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %record.name, error, "it cannot stay with its own process");
                return Some(record);
            }
        };
        memory.0.taken_by(runtime_dir::ram_path(&slot));
        let pid = process.identity().pid;
        tracing::info!(machine = %record.name, pid, version = report.version, "its own process has it");
        let dirs = self.directories.machine_dirs(&record.name);
        let shown = MachineProcess { pid, version: report.version.clone() };
        let view = View::left(&record, (&slot, &dirs.console_log), (shown, &report));
        let machine = self.machines.insert(Machine::left(record, view));
        self.addresses.note_reported(&machine, &report);
        machine.leave_to(ServingProcess {
            daemon: Arc::downgrade(self),
            machine: Arc::downgrade(&machine),
            slot,
            process: Some(Holder::Earlier(process)),
            asked: Instant::now(),
            silent: 0,
            _memory: memory,
        });
        None
    }

    /// Takes a running machine from its own process, whatever version that is of. One of this daemon's
    /// version gets it when it has been at rest.
    pub(crate) fn upgrade(&self, name: &MachineName) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        machine.try_lock("upgrade", None)?.running()?;
        Ok(machine.info())
    }

    /// Passes a machine to the process that waits for it, unless somebody uses it without the lock.
    pub(super) fn pass_to_process(self: &Arc<Self>, machine: &Arc<Machine>, data: &mut MachineData) {
        let Some(process) = data.record.process.clone() else { return };
        if data.running.as_ref().is_none_or(|live| live.unpassable().is_some()) || !machine.begin_passing() {
            return;
        }
        let memory = match self.reservation_of_adopted(&data.record, &process) {
            Ok(memory) => memory,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %machine.name(), error, "it stays with the daemon");
                machine.end_passing();
                return machine.rest_later(RETRY);
            }
        };
        // Both are there: a process waits only for a machine that runs.
        let (Some(waiting), Some(live)) = (data.waiting.take(), data.running.take()) else { return };
        let (name, slot) = (machine.name(), live.runtime_path().to_owned());
        memory.0.taken_by(runtime_dir::ram_path(&slot));
        let serving = |child: Option<Child>| ServingProcess {
            daemon: Arc::downgrade(self),
            machine: Arc::downgrade(machine),
            slot: slot.clone(),
            process: child.map(Holder::Own),
            asked: Instant::now(),
            silent: 0,
            _memory: memory,
        };
        match waiting.pass(live) {
            Ok(Passed::Gone { child, stopped }) => {
                let pid = child.id();
                tracing::info!(machine = %name, pid, ?stopped, "at rest: its own process has it");
                data.serving = Some(serving(Some(child)));
                machine.show_passed(&slot, MachineProcess { pid, version: VERSION.to_owned() });
            }
            Ok(Passed::Kept { machine: kept, reason }) => {
                let error = &reason as &dyn std::error::Error;
                tracing::warn!(machine = %name, error, "its own process did not get it");
                data.running = Some(*kept);
                machine.end_passing();
                machine.rest_later(RETRY);
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %name, error, "neither its own process nor the daemon has it");
                data.serving = Some(serving(None));
            }
        }
    }
}
