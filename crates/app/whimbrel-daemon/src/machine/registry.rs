//! Registry: the machines of this host by name, and names that are reserved for machines to come.

use super::{entry::Machine, unreadable::UnreadableMachines};
use crate::core::{error::DaemonError, event_log::EventLog, notifier::Notifier};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem::ManuallyDrop,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_api::{EventKind, MachineInfo};
use whimbrel_core::MachineName;

/// All machines of this host.
#[derive(Default)]
pub(crate) struct MachineRegistry {
    machines: Mutex<BTreeMap<MachineName, Arc<Machine>>>,
    /// Notified when a machine comes or goes.
    pub(crate) changed: Arc<Notifier>,
    /// Names of machines whose records cannot be read.
    pub(crate) unreadable: UnreadableMachines,
    /// Names of machines that are being created.
    reserved_names: Mutex<BTreeSet<MachineName>>,
    events: Arc<EventLog>,
}

/// A reserved name. When this is dropped its machine is in the registry, or never will be.
pub(crate) struct NameReservation<'a> {
    registry: &'a MachineRegistry,
    name: MachineName,
}

impl NameReservation<'_> {
    /// Keeps the name taken until the daemon ends.
    pub(crate) fn leak(self) {
        // A drop would free the name.
        let _kept = ManuallyDrop::new(self);
    }
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        self.registry.reserved_names.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

impl MachineRegistry {
    /// No machines yet; those to come are told as events.
    pub(crate) fn new(events: Arc<EventLog>) -> Self {
        Self { events, ..Self::default() }
    }

    pub(crate) fn get(&self, name: &MachineName) -> Result<Arc<Machine>, DaemonError> {
        let found = self.table().get(name).cloned();
        match found {
            Some(machine) => Ok(machine),
            None => self.unreadable.check(name).and(Err(DaemonError::machine_not_found(name))),
        }
    }

    /// All machines, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Machine>> {
        self.table().values().cloned().collect()
    }

    /// What `ps` shows of each machine, also of those whose records cannot be read.
    pub(crate) fn infos(&self) -> Vec<MachineInfo> {
        let known = self.all();
        known.iter().map(|machine| machine.info()).chain(self.unreadable.infos()).collect()
    }

    /// Adds a machine to the registry. Its name is free, or that of a suspended machine.
    pub(crate) fn insert(&self, machine: Machine) -> Arc<Machine> {
        let machine = Arc::new(machine);
        let before = self.table().insert(machine.name().clone(), machine.clone());
        before.iter().for_each(|before| before.tell_no_more());
        machine.tell_events(self.events.clone());
        self.changed.notify();
        machine
    }

    /// Replaces a machine by the same one under another name, whose name the caller has reserved. The former
    /// name stays reserved until the second part of the result is dropped.
    pub(crate) fn rename(
        &self,
        former: &MachineName,
        machine: Machine,
    ) -> (Arc<Machine>, NameReservation<'_>) {
        self.reserved_names.lock().unwrap_or_else(PoisonError::into_inner).insert(former.clone());
        let reservation = NameReservation { registry: self, name: former.clone() };
        let machine = Arc::new(machine);
        let mut table = self.table();
        let before = table.remove(former);
        table.insert(machine.name().clone(), machine.clone());
        drop(table);
        before.iter().for_each(|before| before.tell_no_more());
        self.events.add(EventKind::MachineRemoved, former, &format!("renamed to {}", machine.name()));
        machine.tell_events(self.events.clone());
        self.changed.notify();
        (machine, reservation)
    }

    pub(crate) fn remove(&self, name: &MachineName) {
        if let Some(machine) = self.table().remove(name) {
            machine.tell_no_more();
            self.events.add(EventKind::MachineRemoved, name, "");
        }
        self.changed.notify();
    }

    /// Reserves a name for a machine that is being created, or reports that it is in use. Only one of two
    /// concurrent callers gets it.
    pub(crate) fn reserve(
        &self,
        name: &MachineName,
        resuming: bool,
    ) -> Result<NameReservation<'_>, DaemonError> {
        self.reserve_if(name, || self.check_free(name, resuming))
    }

    /// Like [`Self::reserve`], where `check` decides whether the name is free.
    pub(crate) fn reserve_if(
        &self,
        name: &MachineName,
        check: impl FnOnce() -> Result<(), DaemonError>,
    ) -> Result<NameReservation<'_>, DaemonError> {
        let mut claimed = self.reserved_names.lock().unwrap_or_else(PoisonError::into_inner);
        check()?;
        if !claimed.insert(name.clone()) {
            return Err(DaemonError::NameTaken { name: name.clone() });
        }
        Ok(NameReservation { registry: self, name: name.clone() })
    }

    /// Refuses a name that is in use. A suspended machine's name is free for its own resume.
    pub(crate) fn check_free(&self, name: &MachineName, resuming: bool) -> Result<(), DaemonError> {
        self.unreadable.check(name)?;
        let Some(machine) = self.table().get(name).cloned() else { return Ok(()) };
        let state = machine.info().state;
        if let (true, whimbrel_api::MachineState::HandedOff { to }) = (resuming, &state) {
            return Err(DaemonError::HandedOff { name: name.clone(), to: to.clone() });
        }
        let suspended = resuming && state == whimbrel_api::MachineState::Suspended;
        if suspended { Ok(()) } else { Err(DaemonError::NameTaken { name: name.clone() }) }
    }

    /// Refuses a machine that was replaced in the registry by a resume or a start while its lock was waited
    /// for.
    pub(crate) fn check_current(&self, machine: &Arc<Machine>) -> Result<(), DaemonError> {
        let name = machine.name();
        match self.table().get(name) {
            Some(now) if Arc::ptr_eq(now, machine) => Ok(()),
            Some(_) => Err(DaemonError::Busy { name: name.clone(), with: "a start".into() }),
            None => Err(DaemonError::machine_not_found(name)),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<MachineName, Arc<Machine>>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn of_many_that_reserve_a_name_at_once_one_gets_it() {
        let registry = MachineRegistry::default();
        let name: MachineName = "web".parse().expect("a name");
        let (held, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let Ok(_reservation) = registry.reserve(&name, false) else { continue };
                        let now = held.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        held.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 1);
        assert!(registry.reserve(&name, false).is_ok(), "the last reservation has ended");
    }

    #[test]
    fn a_check_that_refuses_reserves_nothing() {
        let registry = MachineRegistry::default();
        let name: MachineName = "web".parse().expect("a name");
        let refusal = || Err(DaemonError::machine_not_found(&name));
        assert!(registry.reserve_if(&name, refusal).is_err());
        assert!(registry.reserve(&name, true).is_ok());
    }
}
