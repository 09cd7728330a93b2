//! Recovery after a restart of the daemon: adopts running machines, removes unused runtime directories and
//! finishes pending handovers.

use crate::{
    capsule::disk_image::ScratchDir,
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineData},
        folder::{self, FoundMachines},
        record::{Phase, Record},
        restart::End,
        supervisor,
    },
    migrate::target::{incoming, left_over},
};
use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};
use whimbrel_core::{MachineName, is_shortage};
use whimbrel_migrate::handover::{PausedIncoming, SourceRecord};
use whimbrel_qemu::ProcessIdentity;
use whimbrel_vm::{RunningMachine, RuntimeMark, StoppedDisk, TPM_DISK, runtime_dir};

/// Attempts to take a machine back whose QEMU lives, and the pause before each.
const RETURN_ATTEMPTS: u32 = 20;
const RETURN_RETRY: Duration = Duration::from_millis(500);
/// Pause after an attempt to adopt a machine with missing pages, for which this process lacked something.
const SHORTAGE_RETRY: Duration = Duration::from_secs(5);
/// When a machine was found gone.
const AT_START: &str = "when the daemon restarted";

impl Daemon {
    /// Adopts every machine that has a record; with `machine_processes`, all but those that a process has. A
    /// machine that cannot be adopted is shown as crashed, with the reason, and does not keep the others from
    /// being found; neither does one whose record cannot be read.
    ///
    /// # Errors
    /// If the folders of machines cannot be listed: then no machine is known, and no name is free. Or if this
    /// process lacks memory or descriptors for a machine, which stays as it was.
    pub(crate) fn recover_machines(self: &Arc<Self>, machine_processes: bool) -> Result<(), DaemonError> {
        let FoundMachines { records, mut unreadable } = folder::load_all(&self.directories)?;
        let records = self.protections.hold(records, &mut unreadable);
        for (name, reason) in &unreadable {
            tracing::error!(machine = %name, reason, "cannot read the record of a machine; nothing of it is touched");
        }
        // Runtime directory, handovers and missing pages of a machine without a readable record are unknown.
        let mut all_known = unreadable.is_empty();
        self.machines.unreadable.set(unreadable);
        if all_known {
            self.sweep_runtime_dirs(&records);
        }
        all_known &= self.empty_trash();
        for record in &records {
            crate::migrate::target::missing_pages::restore(self, record);
            if let Phase::HandedOver { handover, .. } = record.phase {
                self.handovers.mark_committed(handover);
                let hand_on = |inherited| {
                    self.protections.become_witness(SourceRecord::HandedOver, &record.name, inherited);
                };
                record.inherited.iter().for_each(hand_on);
            }
            if let (Some(handover), false) =
                (record.arrived_by, matches!(record.phase, Phase::Prepared { .. }))
            {
                self.arrivals().adopt_arrived(handover);
            }
        }
        if all_known {
            self.fetchers.mark_loaded();
        } else {
            self.handovers.hold();
        }
        self.notify_homes();
        for record in records {
            if record.phase == Phase::Here {
                self.tunnels.end_unused(&record.name, &record.config);
            }
            self.recover(record, machine_processes)?;
        }
        if all_known {
            self.protections.remove_loading_records();
        }
        self.notify_aborted();
        self.notify_ended_protections();
        Ok(())
    }

    fn sweep_runtime_dirs(&self, records: &[Record]) {
        let owned: BTreeSet<_> =
            records.iter().filter_map(|r| Some(r.process.as_ref()?.slot.clone())).collect();
        if let Err(error) = runtime_dir::sweep(&self.directories.runtime_dirs(), |id| owned.contains(id)) {
            tracing::warn!(error = &error as &dyn std::error::Error, "could not sweep runtime directories");
        }
        ScratchDir::sweep(&self.directories);
    }

    fn recover(self: &Arc<Self>, mut record: Record, machine_processes: bool) -> Result<(), DaemonError> {
        if self.recover_protected(&record) {
            return Ok(());
        }
        if self.protections.was_loading(&record) {
            left_over::discard_unfinished(self, &record);
            return Ok(());
        }
        if record.changes_media {
            self.prepare_media(&record);
        }
        let waiting = left_over::waiting(self, &record);
        if record.owed.is_some() && record.process.is_some() && record.phase == Phase::Here {
            // A QEMU that waits for a page answers no command, and the host that has the page can only
            // connect once this daemon serves: it is adopted later.
            self.recover_later(record);
            return Ok(());
        }
        if machine_processes && waiting.is_none() {
            let Some(not_left) = self.leave_to_earlier_process(record) else { return Ok(()) };
            record = not_left;
        }
        let adopted = match (&record.phase, &record.process) {
            _ if waiting == Some(PausedIncoming::Unfinished) => None,
            (Phase::Here | Phase::HandedOver { .. } | Phase::Prepared { .. }, Some(process)) => {
                Some(self.adopt_machine(&record, process))
            }
            _ => None,
        };
        let mut live = match adopted {
            Some(Ok(live)) => Some(live),
            Some(Err(error)) => {
                let Some((not_left, adopted)) = self.recover_unpassed(record, error)? else { return Ok(()) };
                record = not_left;
                adopted
            }
            None => None,
        };
        match (record.phase.clone(), waiting) {
            (Phase::Prepared { handover, .. }, Some(waiting)) => {
                incoming::recover_incoming(self, record, live, (handover, waiting));
            }
            (Phase::HandedOver { handover, to, .. }, _) => {
                let machine = self.machines.insert(Machine::new(record, live));
                self.finish_handover(&machine, handover, to);
            }
            _ => {
                live.iter().for_each(RunningMachine::open_ports);
                if record.changes_media {
                    self.finish_media(&mut record, live.as_mut());
                }
                live.iter_mut().for_each(RunningMachine::unpause_after_restart);
                live.iter().for_each(|live| self.restore_balloon(&mut record, live));
                let events = live.as_ref().map(RunningMachine::events);
                let machine = self.machines.insert(Machine::new(record, live));
                events.into_iter().for_each(|events| supervisor::watch(self, &machine, events));
            }
        }
        Ok(())
    }

    /// Leaves a machine that cannot be adopted for now to its process, or ends that and adopts the machine,
    /// or records its crash. None if the process has it.
    ///
    /// # Errors
    /// If this process lacks memory or descriptors. The machine stays as it was.
    fn recover_unpassed(
        self: &Arc<Self>,
        record: Record,
        mut error: DaemonError,
    ) -> Result<Option<(Record, Option<RunningMachine>)>, DaemonError> {
        let log = |error: &DaemonError, name: &MachineName| {
            tracing::warn!(%name, error = error as &dyn std::error::Error, "cannot adopt it");
        };
        log(&error, &record.name);
        let mut record = match error {
            DaemonError::Pass { .. } => match self.leave_to_earlier_process(record) {
                Some(not_left) => not_left,
                None => return Ok(None),
            },
            _ => record,
        };
        if let (DaemonError::Pass { .. }, Some(process)) = (&error, record.process.clone()) {
            // The daemon has something to do with the machine, which its process does not give away.
            runtime_dir::end_machine_process(&self.directories.runtime_dir(&process.slot));
            match self.adopt_machine(&record, &process) {
                Ok(live) => return Ok(Some((record, Some(live)))),
                Err(again) => error = again,
            }
            log(&error, &record.name);
        }
        if is_shortage(&error) {
            return Err(error);
        }
        self.record_crash(&mut record, (AT_START, &error));
        Ok(Some((record, None)))
    }

    /// Adopts a machine with missing pages, on a thread of its own.
    fn recover_later(self: &Arc<Self>, record: Record) {
        let (host, machine) = (self.clone(), self.machines.insert(Machine::new(record, None)));
        let (taken, has_turn) = std::sync::mpsc::channel();
        let take_up = move || {
            let mut turn = machine.lock("start of the daemon");
            let _ = taken.send(());
            host.recover_missing_pages(&machine, &mut turn);
        };
        if let Err(error) = std::thread::Builder::new().name("take-up".into()).spawn(take_up) {
            tracing::error!(%error, "could not start a thread to adopt a machine");
            return;
        }
        // No other operation may lock the machine before it is adopted.
        let _ = has_turn.recv();
    }

    fn recover_missing_pages(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        turn: &mut crate::machine::entry::MachineLock<'_>,
    ) {
        let Some(process) = turn.record.process.clone() else { return };
        let mut adopted = self.adopt_machine(&turn.record, &process);
        while let Err(error) = &adopted
            && is_shortage(error)
        {
            let (name, error) = (machine.name(), error as &dyn std::error::Error);
            tracing::warn!(%name, error, "cannot adopt it yet");
            if !self.sleep_unless_closing(SHORTAGE_RETRY) {
                return;
            }
            adopted = self.adopt_machine(&turn.record, &process);
        }
        match adopted {
            Ok(live) => {
                let mut live = self.continue_adopted(machine, &mut turn.record, live);
                self.start_fetching(machine, &mut live);
                turn.running = Some(live);
            }
            Err(error) => {
                let name = machine.name();
                tracing::warn!(%name, error = &error as &dyn std::error::Error, "cannot adopt it");
                self.record_crash(&mut turn.record, (AT_START, &error));
                self.discard_missing_memory(turn);
            }
        }
    }

    /// Takes a machine back from its own process, or adopts it if that has ended, or records why it has ended
    /// itself.
    ///
    /// # Errors
    /// If the process still has the machine, and goes on with it, or if this one lacks memory or descriptors.
    pub(super) fn return_from_process(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        data: &mut MachineData,
    ) -> Result<(), DaemonError> {
        let Some(process) = data.record.process.clone() else { return Ok(()) };
        let lives = || {
            let identity = ProcessIdentity { pid: process.pid, start_time: process.started };
            ProcessIdentity::of(process.pid).is_ok_and(|now| now == identity)
        };
        let mut taken = self.adopt_machine(&data.record, &process);
        // What this daemon lacks for a moment, descriptors for example, must not cost a guest that lives.
        for _ in 0..RETURN_ATTEMPTS {
            match &taken {
                Err(error) if lives() => {
                    let (name, error) = (machine.name(), error as &dyn std::error::Error);
                    tracing::warn!(%name, error, "cannot take it back yet");
                    std::thread::sleep(RETURN_RETRY);
                    taken = self.adopt_machine(&data.record, &process);
                }
                _ => break,
            }
        }
        match taken {
            Ok(live) => data.running = Some(self.continue_adopted(machine, &mut data.record, live)),
            Err(error) if lives() && (matches!(error, DaemonError::Pass { .. }) || is_shortage(&error)) => {
                return Err(error);
            }
            Err(error) => {
                let name = machine.name();
                tracing::info!(%name, error = &error as &dyn std::error::Error, "it has ended");
                self.record_crash(&mut data.record, ("while its own process had it", &error));
                if data.record.process.is_none() {
                    runtime_dir::clear(&self.directories.runtime_dir(&process.slot));
                }
            }
        }
        Ok(())
    }

    /// Has a machine that was taken go on, and watches it.
    fn continue_adopted(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        record: &mut Record,
        mut live: RunningMachine,
    ) -> RunningMachine {
        live.open_ports();
        live.unpause_after_restart();
        self.restore_balloon(record, &live);
        supervisor::watch(self, machine, live.events());
        live
    }

    /// Records the crash of a machine whose QEMU is gone or unusable, or that it has shut down while no
    /// daemon ran. A machine between two hosts stays so: its owner is not known here.
    fn record_crash(&self, record: &mut Record, (when, error): (&str, &DaemonError)) {
        if record.phase != Phase::Here {
            return;
        }
        // A crashed machine may be started again, so this QEMU must have ended.
        let slot = record.process.as_ref().map(|process| self.directories.runtime_dir(&process.slot));
        if let Some(slot) = &slot {
            runtime_dir::end(slot);
            self.save_tpm(record, slot);
        }
        let has_shut_down = slot.as_ref().is_some_and(|slot| RuntimeMark::ShutDown.is_on(slot));
        let cause = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
        let said = slot.as_deref().map(runtime_dir::last_output).unwrap_or_default();
        let said = supervisor::last_line(&said).map(|line| format!("; its QEMU wrote last: {line}"));
        let memory = slot.as_deref().and_then(supervisor::ended_for_memory);
        let memory = memory.map(|memory| format!("; {memory}")).unwrap_or_default();
        let reason = format!("it was gone {when}: {cause}{memory}{}", said.unwrap_or_default());
        let (phase, end) = match has_shut_down {
            true => (Phase::Stopped, End::Shutdown),
            false => (Phase::Crashed { reason }, End::Failure),
        };
        record.phase = phase;
        record.process = None;
        record.since_ms = crate::now_ms();
        match record.save(&self.directories) {
            Ok(()) => self.self_starts.ended(&record.name, record.settings.restart, end),
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "could not record a crash");
            }
        }
    }

    /// Saves the state that the TPM of a machine left, which has ended while nobody watched it.
    fn save_tpm(&self, record: &Record, slot: &Path) {
        let Some(index) = record.config.tpm.map(|index| index as usize) else { return };
        let Some(base) = record.bases.get(index) else { return };
        let dirs = self.directories.machine_dirs(&record.name);
        let opened = StoppedDisk::open((&dirs, &self.store), (index, TPM_DISK.0), base);
        if let Err(error) = opened.and_then(|disk| disk.save_tpm(slot)) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(name = %record.name, error, "could not save the state of a TPM");
        }
    }

    /// Detaches from the machines when the daemon ends: they keep running.
    pub(crate) fn detach_machines(&self, machine_processes: bool) {
        if machine_processes {
            self.leave_to_processes();
        }
        self.prestarted.end_all();
    }
}
