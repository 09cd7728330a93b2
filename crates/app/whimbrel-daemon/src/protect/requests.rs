//! User requests of a protection: protect, unprotect, failover.

use super::{
    lock,
    primary::{
        handle::{self, ProtectionCommand, ProtectionEvent, ProtectionHandle},
        run,
    },
    settings::ProtectionSettings,
};
use crate::{capsule::checkpoint::report, core::error::DaemonError, daemon::Daemon, machine::entry::Machine};
use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use whimbrel_api::{FailoverRequest, MachineInfo, Operation, OperationKind, OperationResult, ProtectRequest};
use whimbrel_core::{MachineName, WitnessAddress};
use whimbrel_migrate::protocol::HandoverId;

/// How long to wait for the protection thread, which may be determining the owner with hosts that do not
/// answer.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

impl Daemon {
    /// Starts the protection of a machine by a standby on another host.
    pub(crate) fn protect(
        self: &Arc<Self>,
        name: &MachineName,
        request: ProtectRequest,
    ) -> Result<Operation, DaemonError> {
        let settings = ProtectionSettings::of(&request)?;
        let machine = self.machines.get(name)?;
        let witness = request.witness.as_ref().and_then(WitnessAddress::host);
        if request.host == self.name || witness == Some(&self.name) || request.spares.contains(&self.name) {
            return Err(DaemonError::invalid("the machine's host cannot be its standby, spare or witness"));
        }
        if witness == Some(&request.host) {
            return Err(DaemonError::invalid("the witness must be a third host, not the standby"));
        }
        std::iter::once(&request.host).chain(&request.spares).try_for_each(|to| self.route(to).map(drop))?;
        witness.iter().try_for_each(|witness| self.route(witness).map(drop))?;
        let handover = HandoverId(rand::random());
        let (guard, hears) = self.start_protection(&machine, settings, handover, false)?;
        Ok(self.operations().start(OperationKind::Protect, name.to_string(), move |reporter| {
            let begun = Instant::now();
            let (pause_ms, wire_bytes) = handle::wait_protected(&guard, &hears, |progress| {
                report(reporter, progress);
                reporter.flow().is_continue()
            })?;
            let ProtectRequest { host, witness, .. } = request;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            Ok(OperationResult::Protect { host, witness, pause_ms, total_ms, wire_bytes })
        }))
    }

    /// Starts the thread that protects a machine; `again` if it was protected before.
    pub(in crate::protect) fn start_protection(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        settings: ProtectionSettings,
        handover: HandoverId,
        again: bool,
    ) -> Result<(Arc<ProtectionHandle>, mpsc::Receiver<ProtectionEvent>), DaemonError> {
        let name = machine.name().clone();
        let guard = Arc::new(ProtectionHandle::new(name.clone(), settings, handover));
        {
            let mut guards = lock(&self.protections.handles);
            if guards.contains_key(&name) {
                return Err(DaemonError::Busy { name, with: "a protection".into() });
            }
            guards.insert(name.clone(), guard.clone());
        }
        let (told, hears) = mpsc::channel();
        let (host, machine, its) = (self.clone(), machine.clone(), guard.clone());
        let work = move || run::run(&host, &machine, &its, again, &told);
        match std::thread::Builder::new().name("protect".into()).spawn(work) {
            Ok(_) => Ok((guard, hears)),
            Err(source) => {
                self.protections.remove_handle(&guard);
                Err(DaemonError::io("start a thread for", self.directories.data(), source))
            }
        }
    }

    /// Ends the protection of a machine, which keeps running here.
    pub(crate) fn unprotect(self: &Arc<Self>, name: &MachineName) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        self.end_protection(name)?;
        Ok(machine.info())
    }

    /// Ends the protection of a machine, if it has one.
    fn end_protection(&self, name: &MachineName) -> Result<(), DaemonError> {
        let Some(guard) = self.protections.handle(name) else {
            let name = name.clone();
            return Err(DaemonError::State { name, state: "not protected", needed: "protected" });
        };
        let (answer, answered) = mpsc::channel();
        guard.command(ProtectionCommand::Unprotect(answer));
        let answered = answered.recv_timeout(COMMAND_TIMEOUT);
        answered.map_err(|_| DaemonError::Busy { name: name.clone(), with: "a protection".into() })?
    }

    /// Ends the protection before a user switches the machine off, so that the standby does not take over.
    pub(crate) fn unprotect_before_stop(&self, name: &MachineName) -> Result<(), DaemonError> {
        match self.protections.handle(name) {
            Some(_) => self.end_protection(name),
            None => Ok(()),
        }
    }

    /// Switches a machine over to its standby, on request to its host, or to the standby if that host is
    /// dead.
    pub(crate) fn failover(
        self: &Arc<Self>,
        name: &MachineName,
        request: FailoverRequest,
    ) -> Result<Operation, DaemonError> {
        let host = self.clone();
        if let Some(standing) = self.protections.standby_of_machine(name) {
            if !standing.has_witness() && !request.primary_is_dead {
                return Err(DaemonError::NoWitness { name: name.clone() });
            }
            if !standing.has_witness() && !request.force && standing.hears_primary() {
                let host = standing.primary().clone();
                return Err(DaemonError::PrimaryAnswers { name: name.clone(), host });
            }
            return Ok(self.operations().start(OperationKind::Failover, name.to_string(), move |_| {
                let begun = Instant::now();
                standing.failover()?;
                let downtime_ms = begun.elapsed().as_secs_f64() * 1e3;
                Ok(OperationResult::Failover { host: host.name.clone(), downtime_ms })
            }));
        }
        self.machines.get(name)?;
        let Some(guard) = self.protections.handle(name) else {
            let name = name.clone();
            return Err(DaemonError::State { name, state: "not protected", needed: "protected" });
        };
        Ok(self.operations().start(OperationKind::Failover, name.to_string(), move |_| {
            let (answer, answered) = mpsc::channel();
            guard.command(ProtectionCommand::Failover(answer));
            let busy = |_| DaemonError::Busy { name: guard.name.clone(), with: "a protection".into() };
            let downtime_ms = answered.recv_timeout(COMMAND_TIMEOUT).map_err(busy)??;
            Ok(OperationResult::Failover { host: guard.settings().request.host.clone(), downtime_ms })
        }))
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
