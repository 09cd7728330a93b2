//! Protection service: this host as the primary, the standby or the witness of protected machines.
//!
//! The rules are those of `whimbrel-protect`. `primary` protects machines of this host, `standby` hosts
//! standbys of other hosts' machines, `takeover` determines who owns a machine and takes it over, and
//! `witness` asks a witness or is one. `records` holds what survives a restart of the daemon.

pub(crate) mod link;
pub(crate) mod primary;
pub(crate) mod records;
pub(crate) mod requests;
pub(crate) mod sample;
pub(crate) mod settings;
pub(crate) mod standby;
pub(crate) mod takeover;
pub(crate) mod unreadable;
pub(crate) mod witness;
pub(crate) mod work;

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::record::{Phase, Record},
};
use primary::group::Groups;
use primary::handle::ProtectionHandle;
pub(crate) use primary::inherited::InheritedProtection;
pub(crate) use primary::seeding::{SeedRounds, StandbySeeding};
use records::{ProtectionRecord, ProtectionRecords, ProtectionSide};
use standby::hosted::HostedStandby;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
};
use unreadable::UnreadableRecords;
use whimbrel_api::{MachineInfo, MachineState, TakeoverInfo};
use whimbrel_core::{HostName, MachineName, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    codec::shared_pages::SharedPages,
    protocol::{ProtectionId, StandbyOutcome, StartRequest},
};
use witness::service::WitnessTable;

/// State of all protections on this host.
pub(crate) struct Protections {
    witness_table: WitnessTable,
    groups: Groups,
    record_files: ProtectionRecords,
    unreadable: UnreadableRecords,
    /// Records in memory, by protection.
    records: Mutex<HashMap<ProtectionId, ProtectionRecord>>,
    handles: Mutex<BTreeMap<MachineName, Arc<ProtectionHandle>>>,
    standbys: Mutex<HashMap<ProtectionId, Arc<HostedStandby>>>,
    /// Pages that each standby host has of the machines protected there.
    shared_pages: Mutex<HashMap<HostName, SharedPages>>,
    /// Protections that ended here while the standby could not be reached; it is notified later.
    to_notify: Mutex<BTreeSet<ProtectionId>>,
}

impl Protections {
    /// Loads the records of earlier daemons.
    pub(crate) fn open(layout: &Directories) -> Result<Self, DaemonError> {
        let notes = ProtectionRecords::open(layout.protections())?;
        let (found, unreadable) = notes.all()?;
        let noted: HashMap<_, _> = found.into_iter().map(|note| (note.id, note)).collect();
        let untold = noted.values().filter(|note| matches!(note.side, ProtectionSide::Ended { .. }));
        let to_tell = untold.map(|note| note.id).collect();
        Ok(Self {
            witness_table: WitnessTable::open(layout.leases())?,
            groups: Groups::default(),
            record_files: notes,
            unreadable: UnreadableRecords(unreadable),
            records: Mutex::new(noted),
            handles: Mutex::default(),
            standbys: Mutex::default(),
            shared_pages: Mutex::default(),
            to_notify: Mutex::new(to_tell),
        })
    }

    /// Takes those of `records` out whose machines may be elsewhere by a record that cannot be read, and adds
    /// why to `unreadable`.
    pub(crate) fn hold(
        &self,
        records: Vec<Record>,
        unreadable: &mut BTreeMap<MachineName, String>,
    ) -> Vec<Record> {
        self.unreadable.hold(records, unreadable)
    }

    /// Pages that a standby host has of all machines protected there.
    fn shared_pages_at(&self, standby: &HostName) -> SharedPages {
        let mut known = lock(&self.shared_pages);
        known.entry(standby.clone()).or_insert_with(|| SharedPages::new(rand::random())).clone()
    }

    fn standby(&self, id: ProtectionId) -> Option<Arc<HostedStandby>> {
        lock(&self.standbys).get(&id).cloned()
    }

    /// Finds the hosted standby of a machine of `from` by its handover.
    fn standby_by_handover(&self, from: &HostName, handover: HandoverId) -> Option<Arc<HostedStandby>> {
        let standings = lock(&self.standbys);
        standings.values().find(|one| one.is_of(from, handover)).cloned()
    }

    fn insert_standby(&self, standing: Arc<HostedStandby>) {
        lock(&self.standbys).insert(standing.id(), standing);
    }

    fn remove_standby(&self, id: ProtectionId) {
        lock(&self.standbys).remove(&id);
    }

    /// Outcome of a protection without a hosted standby here; unknown if its record cannot be read.
    fn outcome(&self, id: ProtectionId) -> Result<StandbyOutcome, DaemonError> {
        self.unreadable.check(id)?;
        Ok(match lock(&self.records).get(&id) {
            Some(ProtectionRecord { side: ProtectionSide::TookOver { .. }, .. }) => StandbyOutcome::TakenOver,
            // Without a record no takeover is possible: the epochs in memory are lost.
            _ => StandbyOutcome::Ended,
        })
    }

    fn put_record(&self, note: ProtectionRecord) -> Result<(), DaemonError> {
        self.record_files.put(&note)?;
        lock(&self.records).insert(note.id, note);
        Ok(())
    }

    /// Records a hosted standby, and reserves the space of the record of its takeover.
    fn put_standby_record(&self, begin: &StartRequest, from: &HostName) -> Result<(), DaemonError> {
        let note = |side| ProtectionRecord::new(begin.id, &begin.offer.name, begin.offer.handover, side);
        let took = ProtectionSide::TookOver { from: from.clone(), at_ms: crate::now_ms() };
        let loading = ProtectionSide::Loading { from: from.clone() };
        let prepared = self.record_files.prepare(&note(took));
        prepared.and_then(|()| self.put_record(note(loading))).inspect_err(|_| self.remove_record(begin.id))
    }

    /// Records a takeover.
    fn put_takeover_record(&self, note: ProtectionRecord) -> Result<(), DaemonError> {
        self.record_files.put_prepared(&note)?;
        lock(&self.records).insert(note.id, note);
        Ok(())
    }

    fn remove_record(&self, id: ProtectionId) {
        if let Some(note) = lock(&self.records).remove(&id) {
            self.record_files.remove(&note);
        }
    }

    /// Whether an earlier daemon ended while it was the standby of this machine and had not taken it over:
    /// its primary is told that the protection has ended. It is of no more use here.
    pub(crate) fn was_loading(&self, record: &Record) -> bool {
        let Phase::Prepared { handover, .. } = record.phase else { return false };
        let is_it = |note: &&ProtectionRecord| {
            note.handover == handover && matches!(note.side, ProtectionSide::Loading { .. })
        };
        lock(&self.records).values().any(|note| is_it(&note))
    }

    /// Removes the records of standbys that ended with an earlier daemon.
    pub(crate) fn remove_loading_records(&self) {
        let loading = |note: &&ProtectionRecord| matches!(note.side, ProtectionSide::Loading { .. });
        let ids: Vec<ProtectionId> =
            lock(&self.records).values().filter(loading).map(|note| note.id).collect();
        ids.into_iter().for_each(|id| self.remove_record(id));
    }

    /// Protections of machine `name` whose ownership must be determined before it may run here.
    fn undecided_records(&self, name: &MachineName) -> Vec<ProtectionRecord> {
        let noted = lock(&self.records);
        let ours = |note: &&ProtectionRecord| {
            note.name == *name && matches!(note.side, ProtectionSide::Primary { .. })
        };
        noted.values().filter(ours).cloned().collect()
    }

    /// Whether a standby may have taken the machine over, or may still do so.
    pub(crate) fn may_be_elsewhere(&self, name: &MachineName) -> bool {
        let here = self.handle(name).is_none() && self.standby_of_machine(name).is_none();
        !here || !self.undecided_records(name).is_empty()
    }

    fn notify_later(&self, id: ProtectionId) {
        lock(&self.to_notify).insert(id);
    }

    /// Removes the handle, unless the machine has another one by now.
    fn remove_handle(&self, guard: &Arc<ProtectionHandle>) {
        guard.close();
        let mut guards = lock(&self.handles);
        if guards.get(&guard.name).is_some_and(|now| Arc::ptr_eq(now, guard)) {
            guards.remove(&guard.name);
        }
    }

    fn handle(&self, name: &MachineName) -> Option<Arc<ProtectionHandle>> {
        lock(&self.handles).get(name).cloned()
    }

    fn standby_of_machine(&self, name: &MachineName) -> Option<Arc<HostedStandby>> {
        lock(&self.standbys).values().find(|standing| standing.name() == name).cloned()
    }

    /// Adds protections to the information about machines.
    pub(crate) fn add_to(&self, machines: &mut [MachineInfo]) {
        for machine in machines {
            machine.protection = match (self.handle(&machine.name), self.standby_of_machine(&machine.name)) {
                (Some(guard), _) => Some(guard.info()),
                (None, Some(standing)) if machine.state == MachineState::Migrating => Some(standing.info()),
                (None, _) => None,
            };
            machine.taken_over = self.taken_over(&machine.name);
        }
    }

    /// The last takeover of the machine by this host.
    fn taken_over(&self, name: &MachineName) -> Option<TakeoverInfo> {
        let noted = lock(&self.records);
        let found = noted.values().filter(|note| note.name == *name).filter_map(|note| match &note.side {
            ProtectionSide::TookOver { from, at_ms } => {
                Some(TakeoverInfo { from: from.clone(), at_ms: *at_ms })
            }
            ProtectionSide::Primary { .. }
            | ProtectionSide::Ended { .. }
            | ProtectionSide::Loading { .. } => None,
        });
        found.max_by_key(|taken| taken.at_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        core::sample,
        machine::{entry::Machine, self_start::StartedBySelf},
    };
    use whimbrel_core::{ByteSize, CapsuleId, Digest, MachineConfig};

    const HANDOVER: HandoverId = HandoverId([2; 16]);

    fn insert(daemon: &crate::daemon::Daemon, phase: Phase) -> MachineName {
        let name: MachineName = "web".parse().unwrap();
        let mut record = Record::new(name.clone(), MachineConfig::minimal(ByteSize(1 << 20)), vec![]);
        record.phase = phase;
        daemon.machines.insert(Machine::new(record, None));
        name
    }

    #[test]
    fn a_machine_that_may_run_elsewhere_is_not_started_by_itself() {
        let (daemon, _folders) = sample::daemon();
        let to: HostName = "beta".parse().unwrap();
        let capsule = CapsuleId(Digest::of(b"web"));
        for phase in [
            Phase::HandedOver { handover: HANDOVER, to: to.clone(), keeps: false },
            Phase::Prepared { handover: HANDOVER, ahead: true, never_ran: false, handed_off: None },
            Phase::Given { to: to.clone(), capsule },
            Phase::Suspended { capsule },
            Phase::Here,
        ] {
            let name = insert(&daemon, phase.clone());
            assert_eq!(daemon.start_by_itself(&name), StartedBySelf::NotWanted, "{phase:?}");
        }

        // The record says that it crashed here, and its standby may have taken it over.
        let name = insert(&daemon, Phase::Crashed { reason: "its QEMU ended".into() });
        let request = serde_json::from_value(serde_json::json!({"host": "beta"})).unwrap();
        let side = ProtectionSide::Primary { request, gave_up: true };
        let record = ProtectionRecord::new(ProtectionId([1; 16]), &name, HANDOVER, side);
        daemon.protections.put_record(record).unwrap();
        assert_eq!(daemon.start_by_itself(&name), StartedBySelf::NotYet);
        // Nor by a user, as the standby does not answer.
        let refusal = daemon.start(&name).expect_err("its standby may have it");
        assert!(matches!(refusal, DaemonError::Unresolved { .. }), "{refusal}");
    }
}
