//! Handoff: moves the right to resume a suspended machine to another host.
//!
//! Two hosts have the capsule, and one of them at a time has the right to resume the machine. The host that
//! has it records durably that it gave the right away *before* the other one is told, so whatever is lost in
//! between, at most one of them may resume the machine. If the message is lost, nobody may; repeating it is
//! harmless, and the user may reclaim the machine.
//!
//! ```text
//! push    here:  PrepareHandoff ->               there: fetches the manifest and what a resume needs
//!         here:  record, durable; GrantMachine -> there: a suspended machine
//! resume  there: ClaimMachine ->                 here:  record, durable
//!         there: a suspended machine, resumed
//! ```

use crate::{
    capsule::disk_alignment::disk_bases,
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
    machine::{
        entry::Machine,
        record::{Phase, Record},
    },
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use whimbrel_core::{CapsuleId, HostName, MachineName};
use whimbrel_wire::{Call, range};

/// Announces a suspended machine: the other host fetches its manifest.
pub(crate) struct PrepareHandoff;
pub(crate) struct GrantMachine;
pub(crate) struct ClaimMachine;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HandoffSubject {
    pub(crate) machine: MachineName,
    pub(crate) capsule: CapsuleId,
}

impl Call for PrepareHandoff {
    const KIND: u16 = range::MIGRATE + 0x40;
    type Header = HandoffSubject;
    type Reply = ();
}

impl Call for GrantMachine {
    const KIND: u16 = range::MIGRATE + 0x41;
    type Header = HandoffSubject;
    type Reply = ();
}

impl Call for ClaimMachine {
    const KIND: u16 = range::MIGRATE + 0x42;
    type Header = HandoffSubject;
    type Reply = bool;
}

impl Daemon {
    /// Handles [`PrepareHandoff`]: another host is about to grant a machine to this one.
    pub(crate) fn prepare_handoff(
        self: &Arc<Self>,
        from: &HostName,
        what: &HandoffSubject,
    ) -> Result<(), DaemonError> {
        if !self.check_name_for_handoff(&what.machine, &what.capsule)? {
            return Ok(());
        }
        let (_, _pin) = self.fetch_description(&self.source(from), from, &what.capsule)?;
        // The machine's name goes with the right to run it, before its pages are here.
        self.name_partial(&what.capsule, vec![refs::machine_ref(&what.machine)])?;
        self.retain_on(from, what.capsule)
    }

    /// Handles [`GrantMachine`]: this host may resume the machine. Repeating it changes nothing.
    pub(crate) fn accept_handoff(&self, what: &HandoffSubject) -> Result<(), DaemonError> {
        let mut came = false;
        let _claim = self.machines.reserve_if(&what.machine, || {
            came = !self.check_name_for_handoff(&what.machine, &what.capsule)?;
            Ok(())
        })?;
        if came {
            return Ok(());
        }
        let manifest = self.store.manifest(&what.capsule);
        let manifest = manifest.map_err(refs::store_error("read the capsule"))?;
        let mut record = Record::new(what.machine.clone(), manifest.machine.clone(), disk_bases(&manifest));
        record.origin = Some(what.capsule);
        record.last = Some(what.capsule);
        record.phase = Phase::Suspended { capsule: what.capsule };
        record.save(&self.directories)?;
        self.machines.insert(Machine::new(record, None));
        Ok(())
    }

    /// Handles [`ClaimMachine`]: another host wants to resume a machine of this one. Returns false if this
    /// host does not have it suspended as this capsule, so the other host makes a copy.
    pub(crate) fn release_to(&self, to: &HostName, what: &HandoffSubject) -> Result<bool, DaemonError> {
        let Ok(machine) = self.machines.get(&what.machine) else { return Ok(false) };
        let mut turn = machine.try_lock("resume elsewhere", None)?;
        match &turn.record.phase {
            Phase::Suspended { capsule } if *capsule == what.capsule => {}
            Phase::Given { to: owner, capsule } if owner == to && *capsule == what.capsule => {
                return Ok(true);
            }
            Phase::Here => {
                let (name, state) = (what.machine.clone(), "running");
                return Err(DaemonError::State { name, state, needed: "suspended" });
            }
            _ => return Ok(false),
        }
        self.record_handoff(&mut turn, to, what.capsule)?;
        Ok(true)
    }

    /// Whether a machine of this name could be granted to this host; false if it was granted already. A
    /// machine of this host with that name is an error, even if it is suspended: its capsule would lose its
    /// name.
    pub(crate) fn check_name_for_handoff(
        &self,
        name: &MachineName,
        capsule: &CapsuleId,
    ) -> Result<bool, DaemonError> {
        let machine = match self.machines.get(name) {
            Err(DaemonError::NotFound { .. }) => return Ok(true),
            found => found?,
        };
        let turn = machine.try_lock("arrival", None)?;
        match &turn.record.phase {
            Phase::Given { .. } => Ok(true),
            Phase::Suspended { capsule: here } if here == capsule => Ok(false),
            Phase::Here if turn.record.origin == Some(*capsule) => Ok(false),
            _ => Err(DaemonError::NameTaken { name: name.clone() }),
        }
    }
}

impl Core {
    /// Records durably that this host does not resume the machine any more.
    pub(crate) fn record_handoff(
        &self,
        turn: &mut crate::machine::entry::MachineLock<'_>,
        to: &HostName,
        capsule: CapsuleId,
    ) -> Result<(), DaemonError> {
        let before = turn.record.clone();
        turn.record.phase = Phase::Given { to: to.clone(), capsule };
        turn.record.since_ms = crate::now_ms();
        turn.record.save(&self.directories).inspect_err(|_| turn.record = before)
    }
}
