//! Start of a machine that was switched off or whose QEMU died: a boot from its own disks.
//!
//! The content of its memory is lost; configuration, name and identity stay. The machine becomes a new entry
//! of the registry, so that the supervisor of its last QEMU cannot take the new one for it. A start that
//! fails leaves it as it was. A machine that was protected is started once its standby has heard of the end
//! of that, or on the word of a user (`resolve`).

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        hotplug::bridge_of,
        record::{Phase, Record},
        self_start::StartedBySelf,
    },
};
use std::sync::Arc;
use whimbrel_api::MachineInfo;
use whimbrel_core::{MachineName, error_chain};

impl Daemon {
    /// Runs a stopped or crashed machine again.
    pub(crate) fn start(self: &Arc<Self>, name: &MachineName) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        let mut turn = self.lock_to_start(&machine)?;
        self.end_at_standbys(name)?;
        let info = self.start_again(&mut turn)?;
        self.self_starts.forget(name);
        Ok(info)
    }

    fn lock_to_start<'m>(&self, machine: &'m Arc<Machine>) -> Result<MachineLock<'m>, DaemonError> {
        let turn = machine.try_lock_in_any_phase("start", None)?;
        self.machines.check_current(machine)?;
        match turn.record.phase {
            Phase::Stopped | Phase::Crashed { .. } => Ok(turn),
            _ => {
                let (name, state) = (machine.name().clone(), turn.record.phase.name());
                Err(DaemonError::State { name, state, needed: "stopped or crashed" })
            }
        }
    }

    /// Starts a stopped or crashed machine that no other host has.
    pub(crate) fn start_again(
        self: &Arc<Self>,
        turn: &mut MachineLock<'_>,
    ) -> Result<MachineInfo, DaemonError> {
        let record = started(&turn.record);
        let name = &record.name;
        self.clear_console_log(name)?;
        let vmgenid = record.vmgenid.as_ref().and_then(|guid| guid.parse().ok());
        let live = self.boot_again(&record, vmgenid)?;
        let info = self.register_restarted(record.clone(), live, &turn.record)?.info();
        turn.record = record;
        Ok(info)
    }

    /// Starts a machine without a user's request. One that another host may have is never started so.
    pub(crate) fn start_by_itself(self: &Arc<Self>, name: &MachineName) -> StartedBySelf {
        if self.protections.may_be_elsewhere(name) {
            return StartedBySelf::NotYet;
        }
        let started = self.machines.get(name).and_then(|machine| {
            let mut turn = self.lock_to_start(&machine)?;
            self.start_again(&mut turn)
        });
        match started {
            Ok(_) => StartedBySelf::Started,
            // A user was faster, or it belongs to another host.
            Err(DaemonError::State { .. } | DaemonError::NotFound { .. }) => StartedBySelf::NotWanted,
            Err(DaemonError::Busy { .. }) => StartedBySelf::NotYet,
            Err(error) => StartedBySelf::Failed(error_chain(&error)),
        }
    }

    /// Removes the console log, which holds the output since the last start.
    fn clear_console_log(&self, name: &MachineName) -> Result<(), DaemonError> {
        let path = self.directories.console_log(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(DaemonError::io("remove", &path, error))
            }
            _ => Ok(()),
        }
    }
}

/// The record of a machine that runs again.
fn started(before: &Record) -> Record {
    let mut record = before.clone();
    record.phase = Phase::Here;
    record.process = None;
    record.since_ms = crate::now_ms();
    // The machine boots, so no state was saved without the port or the bridge.
    record.config.agent_port = true;
    record.config.hotplug = record.config.hotplug.or_else(|| bridge_of(&record.config.firmware));
    record
}
