//! Recovery of protections after a restart of the daemon: fences each machine until its owner is determined.
//!
//! The guest may have run without a daemon meanwhile, but had neither network nor disks: both are the
//! daemon's.

use super::ownership::{self, Ownership};
use crate::protect::{
    link::ControlLink,
    lock,
    primary::{
        handle::ProtectionHandle,
        heartbeat::{Heartbeat, Output},
    },
    records::{ProtectionRecord, ProtectionSide},
    settings::ProtectionSettings,
    witness::client::WitnessClient,
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{Phase, Record},
        restart::End,
        supervisor,
    },
};
use std::{
    sync::{Arc, Weak, mpsc},
    time::Duration,
};
use whimbrel_api::{ProtectRequest, ProtectState};
use whimbrel_core::WitnessAddress;
use whimbrel_protect::{
    lease,
    protocol::{ProtectionId, StandbyOutcome},
};
use whimbrel_vm::{RunningMachine, runtime_dir};

/// Interval at which standbys are notified of ended protections.
const NOTIFY_INTERVAL: Duration = Duration::from_secs(5);

impl Daemon {
    /// Starts to determine the owner of a machine, if it was protected. Returns whether it was.
    pub(crate) fn recover_protected(self: &Arc<Self>, record: &Record) -> bool {
        let notes = self.protections.undecided_records(&record.name);
        let Some(note) = notes.first().cloned() else { return false };
        let ProtectionSide::Primary { request, gave_up } = note.side.clone() else { return false };
        match record.phase {
            Phase::Here => {}
            // Not this host's machine yet; at the commit it inherits the protection of this record.
            Phase::Prepared { .. } => return false,
            // The machine's own record already tells the owner.
            Phase::HandedOver { .. } => {
                notes.iter().for_each(|note| self.protections.remove_record(note.id));
                return false;
            }
            // The machine does not run here, but its standby must hear of the end before it may again.
            _ => {
                notes.iter().for_each(|note| self.protections.notify_later(note.id));
                return false;
            }
        }
        let settings = match ProtectionSettings::of(&request) {
            Ok(settings) => settings,
            Err(error) => {
                tracing::error!(machine = %record.name, error = &error as &dyn std::error::Error, "the record of a protection is invalid");
                let reason = format!("the record of its protection is invalid: {error}");
                self.machines.unreadable.add(record.name.clone(), reason);
                return true;
            }
        };
        // A machine with missing pages has written pages that are no longer tracked, and may wait for a page
        // for ever.
        let lacks = record.owed.is_some();
        if let (true, Some(process)) = (lacks, &record.process) {
            runtime_dir::end(&self.directories.runtime_dir(&process.slot));
        }
        let live = record.process.as_ref().filter(|_| !lacks).and_then(|process| {
            let adopted = self.adopt_machine(record, process);
            adopted.inspect_err(|error| {
                tracing::warn!(machine = %record.name, error = error as &dyn std::error::Error, "cannot recover a protected machine");
            }).ok()
        });
        tracing::warn!(machine = %record.name, standby = %request.host, "determining the owner of a protected machine");
        let machine = self.machines.insert(Machine::new(record.clone(), live));
        let guard = Arc::new(ProtectionHandle::new(record.name.clone(), settings, note.handover));
        guard.set_state(ProtectState::Fenced { reason: format!("{} is being asked", request.host) });
        lock(&self.protections.handles).insert(record.name.clone(), guard.clone());
        let (host, (begun, has_turn)) = (self.clone(), mpsc::channel());
        let work = move || {
            let turn = machine.lock("protection");
            let _ = begun.send(());
            let unsettled =
                UndecidedMachine { host: &host, machine: &machine, handle: &guard, records: &notes };
            let goes_on = unsettled.determine_owner(turn, gave_up);
            host.protections.remove_handle(&guard);
            if goes_on {
                protect_again(&host, &machine, &request, &note);
            }
        };
        match std::thread::Builder::new().name("settle".into()).spawn(work) {
            // No other thread gets the machine lock first.
            Ok(_) => drop(has_turn.recv()),
            Err(error) => tracing::error!(%error, "no thread to determine the owner of a machine"),
        }
        true
    }

    /// Yields a machine that an earlier daemon had prepared, and that is now committed, to the standby that
    /// it inherits.
    pub(crate) fn yield_to_backup(self: &Arc<Self>, machine: &Arc<Machine>) -> Result<(), DaemonError> {
        let notes = self.protections.undecided_records(machine.name());
        let Some(note) = notes.first() else { return Ok(()) };
        let ProtectionSide::Primary { request, .. } = &note.side else { return Ok(()) };
        let settings = ProtectionSettings::of(request)?;
        let guard = Arc::new(ProtectionHandle::new(machine.name().clone(), settings, note.handover));
        lock(&self.protections.handles).insert(machine.name().clone(), guard.clone());
        let (host, machine) = (self.clone(), machine.clone());
        let work = move || {
            let mut turn = machine.lock("protection");
            turn.running.take().into_iter().for_each(RunningMachine::end);
            UndecidedMachine { host: &host, machine: &machine, handle: &guard, records: &notes }
                .determine_owner(turn, true);
            host.protections.remove_handle(&guard);
        };
        let thread = std::thread::Builder::new().name("settle".into()).spawn(work);
        thread
            .map(drop)
            .map_err(|source| DaemonError::io("start a thread for", self.directories.data(), source))
    }

    /// Notifies standbys of protections that ended without their knowledge, until all know.
    pub(crate) fn notify_ended_protections(self: &Arc<Self>) {
        let host = Arc::downgrade(self);
        let tell = move || {
            while let Some(host) = Weak::upgrade(&host) {
                if !host.sleep_unless_closing(NOTIFY_INTERVAL) {
                    return;
                }
                host.notify_ended_once();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("tell-ended".into()).spawn(tell) {
            tracing::error!(%error, "cannot start the thread that notifies standbys of ended protections");
        }
    }

    fn notify_ended_once(self: &Arc<Self>) {
        let ids: Vec<ProtectionId> = lock(&self.protections.to_notify).iter().copied().collect();
        for id in ids {
            let note = lock(&self.protections.records).get(&id).cloned();
            let (name, (standby, witness, keep)) = match note {
                Some(ProtectionRecord { side: ProtectionSide::Primary { request, .. }, name, .. }) => {
                    (name, (request.host, request.witness, request.spares.is_empty()))
                }
                Some(ProtectionRecord {
                    side: ProtectionSide::Ended { standby, witness, keep },
                    name,
                    ..
                }) => (name, (standby, witness, keep)),
                _ => {
                    lock(&self.protections.to_notify).remove(&id);
                    continue;
                }
            };
            // Pages are of use only to a machine that is to be protected again.
            let keep = keep && self.protections.handle(&name).is_some();
            match ControlLink::new(self, &standby).end(id, keep, Duration::from_secs(2)) {
                Some(StandbyOutcome::Ended) => self.protection_has_ended(id, witness.as_ref()),
                Some(StandbyOutcome::TakenOver) => {
                    tracing::error!(machine = %name, host = %standby, "a person switched the machine over although it was here; if it runs here it is stopped");
                    lock(&self.protections.to_notify).remove(&id);
                    self.stop_taken_over(&name, id);
                }
                _ => {}
            }
        }
    }

    /// Forgets a protection of which the standby has said that it has ended.
    pub(super) fn protection_has_ended(self: &Arc<Self>, id: ProtectionId, witness: Option<&WitnessAddress>) {
        lock(&self.protections.to_notify).remove(&id);
        self.protections.remove_record(id);
        // The term does not matter, for nothing is taken over any more.
        let forget = |witness| WitnessClient::new(self, witness, id, Duration::MAX).forget();
        witness.iter().for_each(|witness| forget(witness));
    }

    /// Without a witness a person decides. The machine belongs to the other host, whatever it did here
    /// meanwhile.
    fn stop_taken_over(self: &Arc<Self>, name: &whimbrel_core::MachineName, id: ProtectionId) {
        let Some(note) = lock(&self.protections.records).get(&id).cloned() else { return };
        let (ProtectionSide::Primary { request, .. }, Ok(machine)) = (&note.side, self.machines.get(name))
        else {
            return;
        };
        let Ok(settings) = ProtectionSettings::of(request) else { return };
        // The machine may be protected by a spare meanwhile, which must not take it over as well.
        if let Some(guard) = self.protections.handle(name)
            && self.unprotect_before_stop(name).is_err()
        {
            guard.cancel();
        }
        let guard = Arc::new(ProtectionHandle::new(name.clone(), settings, note.handover));
        let turn = machine.lock("protection");
        if turn.record.phase == Phase::Here {
            let beats = recovered_heartbeat(self, &guard, &note);
            ownership::end_machine(self, &machine, turn, &guard, &beats);
        }
    }
}

struct UndecidedMachine<'a> {
    host: &'a Arc<Daemon>,
    machine: &'a Arc<Machine>,
    handle: &'a Arc<ProtectionHandle>,
    records: &'a [ProtectionRecord],
}

impl UndecidedMachine<'_> {
    /// Determines the owner by every record of the machine. Returns whether it runs here afterwards.
    fn determine_owner(&self, mut turn: MachineLock<'_>, gave_up: bool) -> bool {
        for note in self.records {
            let beats = recovered_heartbeat(self.host, self.handle, note);
            let alive = turn.running.as_ref().is_some_and(|live| live.qemu.process().is_alive());
            if gave_up || !alive {
                // The standby takes over if it has a complete epoch.
                beats.lease().yield_machine();
            }
            let settled =
                ownership::determine_owner(self.host, self.handle, &beats, turn.running.as_mut(), true);
            match settled {
                Ownership::Alone => drop(ownership::record_alone(self.host, self.handle, &beats, true)),
                Ownership::Gone => {
                    ownership::end_machine(self.host, self.machine, turn, self.handle, &beats);
                    return false;
                }
                Ownership::Closing => return false,
            }
        }
        self.unpause(turn)
    }

    /// Runs the machine, which belongs to this host.
    fn unpause(&self, mut turn: MachineLock<'_>) -> bool {
        let alive = turn.running.as_ref().is_some_and(|live| live.qemu.process().is_alive());
        if !alive {
            if let Some(process) = &turn.record.process {
                runtime_dir::end(&self.host.directories.runtime_dir(&process.slot));
            }
            turn.running.take().into_iter().for_each(RunningMachine::end);
            let reason =
                "it had ended when the daemon restarted, and its standby had no complete epoch".to_owned();
            turn.record.phase = Phase::Crashed { reason };
            turn.record.process = None;
            turn.record.since_ms = crate::now_ms();
            match turn.record.save(&self.host.directories) {
                Ok(()) => {
                    let rule = turn.record.settings.restart;
                    self.host.self_starts.ended(self.machine.name(), rule, End::Failure);
                }
                Err(error) => {
                    tracing::error!(error = &error as &dyn std::error::Error, "cannot record a crash");
                }
            }
            return false;
        }
        let Ok((record, live)) = turn.parts() else { return false };
        live.open_ports();
        live.unpause();
        self.host.restore_balloon(record, live);
        let events = live.events();
        drop(turn);
        supervisor::watch(self.host, self.machine, events);
        true
    }
}

/// The lease of a protection of which only a record is left.
fn recovered_heartbeat(
    host: &Arc<Daemon>,
    guard: &Arc<ProtectionHandle>,
    note: &ProtectionRecord,
) -> Heartbeat {
    let settings = guard.settings();
    let witness = settings.request.witness.as_ref();
    let witness = witness.map(|witness| WitnessClient::new(host, witness, note.id, settings.term));
    let rules = lease::PrimaryLease::recovered(witness.is_some(), settings.term);
    let standby = Arc::new(ControlLink::new(host, &settings.request.host));
    let nothing = (Output::default(), Weak::new());
    Heartbeat::new(note.id, rules, settings.term, (standby, witness), nothing, Arc::downgrade(guard))
}

/// Protects the machine again.
fn protect_again(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    request: &ProtectRequest,
    note: &ProtectionRecord,
) {
    let started: Result<(), DaemonError> = ProtectionSettings::of(request)
        .and_then(|settings| host.start_protection(machine, settings, note.handover, true).map(drop));
    if let Err(error) = started {
        tracing::error!(machine = %note.name, error = &error as &dyn std::error::Error, "the machine runs unprotected");
    }
}

#[cfg(test)]
#[path = "recovery_tests.rs"]
mod tests;
