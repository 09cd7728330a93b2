//! Protection of machines by hot standbys, on this host: as the primary, as the standby, as the witness.
//!
//! The rules are those of `whimbrel-protect`. Here is who works on what: `guard` is a machine of this host that is protected, `attempt` and `epochs` protect it,
//! `group` cuts several at one instant, `inputs` lets output go before an epoch is whole, `beats` keeps its lease, `settle` finds out whose it is when hosts lose each other, `standing` keeps machines of others, `keeping` stores epochs of them,
//! `filling` and `heir` protect a machine that moves while pages of it are missing,
//! `witness` decides between two others, `arbiter` asks whoever decides, which may be an `etcd`; `notes` is what outlives the daemon, `recover` what a daemon does with it.

mod arbiter;
mod attempt;
mod beats;
mod epochs;
mod etcd;
mod filling;
mod group;
mod guard;
mod heir;
mod inputs;
mod keeping;
mod link;
mod notes;
mod offer;
mod recover;
mod requests;
mod settings;
mod settle;
mod standing;
mod witness;

use crate::{
    error::HostError,
    layout::Layout,
    record::{Phase, Record},
};
pub(crate) use filling::{Copying, Filling};
use group::Groups;
use guard::Guard;
pub(crate) use heir::Heir;
use notes::{Note, Notes, Side};
use standing::Standing;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_api::{MachineInfo, MachineState, TakenOver};
use whimbrel_core::{HostName, MachineName};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    code::known::Known,
    protocol::{Fate, ProtectionId},
};
use witness::Leases;

/// Kinds of messages of a protection.
pub(crate) const RANGE: u16 = whimbrel_wire::range::PROTECT;

/// Everything about protections that a host knows.
pub(crate) struct Protecting {
    leases: Leases,
    groups: Groups,
    notes: Notes,
    /// Notes of this host as a primary, by machine.
    noted: Mutex<HashMap<ProtectionId, Note>>,
    guards: Mutex<BTreeMap<MachineName, Arc<Guard>>>,
    standings: Mutex<HashMap<ProtectionId, Arc<Standing>>>,
    /// What each standby host has of the machines that are protected there.
    known: Mutex<HashMap<HostName, Known>>,
    /// Protections that ended here without the standby's knowledge: it is told when it can be.
    to_tell: Mutex<BTreeSet<ProtectionId>>,
}

impl Protecting {
    /// What earlier daemons left.
    pub(crate) fn open(layout: &Layout) -> Result<Self, HostError> {
        let notes = Notes::open(layout.protections())?;
        let noted: HashMap<_, _> = notes.all()?.into_iter().map(|note| (note.id, note)).collect();
        let untold = noted.values().filter(|note| matches!(note.side, Side::Ended { .. }));
        let to_tell = untold.map(|note| note.id).collect();
        Ok(Self {
            leases: Leases::open(layout.leases())?,
            groups: Groups::default(),
            notes,
            noted: Mutex::new(noted),
            guards: Mutex::default(),
            standings: Mutex::default(),
            known: Mutex::default(),
            to_tell: Mutex::new(to_tell),
        })
    }

    /// What a standby host has of all machines that this host protects there.
    fn known_at(&self, standby: &HostName) -> Known {
        let mut known = lock(&self.known);
        known.entry(standby.clone()).or_insert_with(|| Known::new(rand::random())).clone()
    }

    fn standing(&self, id: ProtectionId) -> Option<Arc<Standing>> {
        lock(&self.standings).get(&id).cloned()
    }

    /// What stands by here for a machine of `from` that is known by this handover.
    fn standing_by(&self, from: &HostName, handover: HandoverId) -> Option<Arc<Standing>> {
        let standings = lock(&self.standings);
        standings.values().find(|one| one.is_of(from, handover)).cloned()
    }

    fn enter(&self, standing: Arc<Standing>) {
        lock(&self.standings).insert(standing.id(), standing);
    }

    fn leave(&self, id: ProtectionId) {
        lock(&self.standings).remove(&id);
    }

    /// What has become of a protection that nobody stands by for here.
    fn fate(&self, id: ProtectionId) -> Fate {
        match lock(&self.noted).get(&id) {
            Some(Note { side: Side::TookOver { .. }, .. }) => Fate::TakenOver,
            // What a daemon did not note it cannot take over: its memory of the epochs is gone.
            _ => Fate::Ended,
        }
    }

    fn put_note(&self, note: Note) -> Result<(), HostError> {
        self.notes.put(&note)?;
        lock(&self.noted).insert(note.id, note);
        Ok(())
    }

    /// A takeover's note is known as soon as it is tried: after a failed write nobody is told that it did not happen.
    fn take_note(&self, note: Note) -> Result<(), HostError> {
        lock(&self.noted).insert(note.id, note.clone());
        self.notes.put(&note)
    }

    fn remove_note(&self, id: ProtectionId) {
        lock(&self.noted).remove(&id);
        self.notes.remove(id);
    }

    /// Whether an earlier daemon ended while it loaded this machine, which its host had given to it and has again now. It is of
    /// no more use here.
    pub(crate) fn was_loading(&self, record: &Record) -> bool {
        let Phase::Prepared { handover, .. } = record.phase else { return false };
        let is_it = |note: &&Note| note.handover == handover && matches!(note.side, Side::Loading { .. });
        lock(&self.noted).values().any(|note| is_it(&note))
    }

    /// Nothing that was being loaded is left.
    pub(crate) fn nothing_is_loading(&self) {
        let loading = |note: &&Note| matches!(note.side, Side::Loading { .. });
        let ids: Vec<ProtectionId> = lock(&self.noted).values().filter(loading).map(|note| note.id).collect();
        ids.into_iter().for_each(|id| self.remove_note(id));
    }

    /// The protections of machine `name` that this host must settle before it runs it.
    fn unsettled(&self, name: &MachineName) -> Vec<Note> {
        let noted = lock(&self.noted);
        let ours = |note: &&Note| note.name == *name && matches!(note.side, Side::Primary { .. });
        noted.values().filter(ours).cloned().collect()
    }

    fn tell_ended(&self, id: ProtectionId) {
        lock(&self.to_tell).insert(id);
    }

    /// The guard is none any more. Another one of the same machine stays.
    fn leave_guard(&self, guard: &Arc<Guard>) {
        let mut guards = lock(&self.guards);
        if guards.get(&guard.name).is_some_and(|now| Arc::ptr_eq(now, guard)) {
            guards.remove(&guard.name);
        }
    }

    fn guard(&self, name: &MachineName) -> Option<Arc<Guard>> {
        lock(&self.guards).get(name).cloned()
    }

    fn standing_of(&self, name: &MachineName) -> Option<Arc<Standing>> {
        lock(&self.standings).values().find(|standing| standing.name() == name).cloned()
    }

    /// Adds what is known of protections to what is told of machines.
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

    /// The last time that this host took the machine over.
    fn taken_over(&self, name: &MachineName) -> Option<TakenOver> {
        let noted = lock(&self.noted);
        let found = noted.values().filter(|note| note.name == *name).filter_map(|note| match &note.side {
            Side::TookOver { from, at_ms } => Some(TakenOver { from: from.clone(), at_ms: *at_ms }),
            Side::Primary { .. } | Side::Ended { .. } | Side::Loading { .. } => None,
        });
        found.max_by_key(|taken| taken.at_ms)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
