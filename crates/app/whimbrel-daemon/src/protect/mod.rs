//! Protection service: this host as the primary, the standby or the witness of protected machines.
//!
//! The rules are those of `whimbrel-protect`. `primary` protects machines of this host, `standby` hosts
//! standbys of other hosts' machines, `takeover` determines who owns a machine and takes it over, and
//! `witness` asks a witness or is one. `records` holds what survives a restart of the daemon.

pub(crate) mod link;
pub(crate) mod primary;
pub(crate) mod records;
pub(crate) mod requests;
pub(crate) mod settings;
pub(crate) mod standby;
pub(crate) mod takeover;
pub(crate) mod witness;

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
use whimbrel_api::{MachineInfo, MachineState, TakeoverInfo};
use whimbrel_core::{HostName, MachineName, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    codec::shared_pages::SharedPages,
    protocol::{ProtectionId, StandbyOutcome},
};
use witness::service::WitnessTable;

/// Message kinds of a protection.
pub(crate) const RANGE: u16 = whimbrel_wire::range::PROTECT;

/// State of all protections on this host.
pub(crate) struct Protections {
    leases: WitnessTable,
    groups: Groups,
    notes: ProtectionRecords,
    /// Records in memory, by protection.
    noted: Mutex<HashMap<ProtectionId, ProtectionRecord>>,
    guards: Mutex<BTreeMap<MachineName, Arc<ProtectionHandle>>>,
    standings: Mutex<HashMap<ProtectionId, Arc<HostedStandby>>>,
    /// Pages that each standby host has of the machines protected there.
    known: Mutex<HashMap<HostName, SharedPages>>,
    /// Protections that ended here while the standby could not be reached; it is notified later.
    to_tell: Mutex<BTreeSet<ProtectionId>>,
}

impl Protections {
    /// Loads the records of earlier daemons.
    pub(crate) fn open(layout: &Directories) -> Result<Self, DaemonError> {
        let notes = ProtectionRecords::open(layout.protections())?;
        let noted: HashMap<_, _> = notes.all()?.into_iter().map(|note| (note.id, note)).collect();
        let untold = noted.values().filter(|note| matches!(note.side, ProtectionSide::Ended { .. }));
        let to_tell = untold.map(|note| note.id).collect();
        Ok(Self {
            leases: WitnessTable::open(layout.leases())?,
            groups: Groups::default(),
            notes,
            noted: Mutex::new(noted),
            guards: Mutex::default(),
            standings: Mutex::default(),
            known: Mutex::default(),
            to_tell: Mutex::new(to_tell),
        })
    }

    /// Pages that a standby host has of all machines protected there.
    fn known_at(&self, standby: &HostName) -> SharedPages {
        let mut known = lock(&self.known);
        known.entry(standby.clone()).or_insert_with(|| SharedPages::new(rand::random())).clone()
    }

    fn standing(&self, id: ProtectionId) -> Option<Arc<HostedStandby>> {
        lock(&self.standings).get(&id).cloned()
    }

    /// Finds the hosted standby of a machine of `from` by its handover.
    fn standing_by(&self, from: &HostName, handover: HandoverId) -> Option<Arc<HostedStandby>> {
        let standings = lock(&self.standings);
        standings.values().find(|one| one.is_of(from, handover)).cloned()
    }

    fn insert(&self, standing: Arc<HostedStandby>) {
        lock(&self.standings).insert(standing.id(), standing);
    }

    fn leave(&self, id: ProtectionId) {
        lock(&self.standings).remove(&id);
    }

    /// Outcome of a protection without a hosted standby here.
    fn fate(&self, id: ProtectionId) -> StandbyOutcome {
        match lock(&self.noted).get(&id) {
            Some(ProtectionRecord { side: ProtectionSide::TookOver { .. }, .. }) => StandbyOutcome::TakenOver,
            // Without a record no takeover is possible: the epochs in memory are lost.
            _ => StandbyOutcome::Ended,
        }
    }

    fn put_note(&self, note: ProtectionRecord) -> Result<(), DaemonError> {
        self.notes.put(&note)?;
        lock(&self.noted).insert(note.id, note);
        Ok(())
    }

    /// Records a takeover in memory before the write: after a failed write, nobody may be told that it did
    /// not happen.
    fn take_note(&self, note: ProtectionRecord) -> Result<(), DaemonError> {
        lock(&self.noted).insert(note.id, note.clone());
        self.notes.put(&note)
    }

    fn remove_note(&self, id: ProtectionId) {
        lock(&self.noted).remove(&id);
        self.notes.remove(id);
    }

    /// Whether an earlier daemon ended while it loaded this machine, which the primary had yielded and owns
    /// again. It is of no more use here.
    pub(crate) fn was_loading(&self, record: &Record) -> bool {
        let Phase::Prepared { handover, .. } = record.phase else { return false };
        let is_it = |note: &&ProtectionRecord| {
            note.handover == handover && matches!(note.side, ProtectionSide::Loading { .. })
        };
        lock(&self.noted).values().any(|note| is_it(&note))
    }

    /// Removes the records of interrupted loads.
    pub(crate) fn nothing_is_loading(&self) {
        let loading = |note: &&ProtectionRecord| matches!(note.side, ProtectionSide::Loading { .. });
        let ids: Vec<ProtectionId> = lock(&self.noted).values().filter(loading).map(|note| note.id).collect();
        ids.into_iter().for_each(|id| self.remove_note(id));
    }

    /// Protections of machine `name` whose ownership must be determined before it may run here.
    fn unsettled(&self, name: &MachineName) -> Vec<ProtectionRecord> {
        let noted = lock(&self.noted);
        let ours = |note: &&ProtectionRecord| {
            note.name == *name && matches!(note.side, ProtectionSide::Primary { .. })
        };
        noted.values().filter(ours).cloned().collect()
    }

    fn tell_ended(&self, id: ProtectionId) {
        lock(&self.to_tell).insert(id);
    }

    /// Removes the handle, unless the machine has another one by now.
    fn leave_guard(&self, guard: &Arc<ProtectionHandle>) {
        let mut guards = lock(&self.guards);
        if guards.get(&guard.name).is_some_and(|now| Arc::ptr_eq(now, guard)) {
            guards.remove(&guard.name);
        }
    }

    fn guard(&self, name: &MachineName) -> Option<Arc<ProtectionHandle>> {
        lock(&self.guards).get(name).cloned()
    }

    fn standing_of(&self, name: &MachineName) -> Option<Arc<HostedStandby>> {
        lock(&self.standings).values().find(|standing| standing.name() == name).cloned()
    }

    /// Adds protections to the information about machines.
    pub(crate) fn add_to(&self, machines: &mut [MachineInfo]) {
        for machine in machines {
            machine.protection = match (self.guard(&machine.name), self.standing_of(&machine.name)) {
                (Some(guard), _) => Some(guard.info()),
                (None, Some(standing)) if machine.state == MachineState::Migrating => Some(standing.info()),
                (None, _) => None,
            };
            machine.taken_over = self.taken_over(&machine.name);
        }
    }

    /// The last takeover of the machine by this host.
    fn taken_over(&self, name: &MachineName) -> Option<TakeoverInfo> {
        let noted = lock(&self.noted);
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
