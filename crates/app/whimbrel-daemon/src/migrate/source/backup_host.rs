//! Backup host (`--backup-host`): a third host that has the machine as of the pause, and follows it while
//! pages are missing on the target.
//!
//! The request is checked before any byte is sent; `protect::StandbySeeding` makes the copy. A machine that
//! is protected already, is paused or runs away from its network is refused, and so is every mode but `lazy`:
//! in the others one host has the complete machine at any time, or its last rounds would be sent twice during
//! the downtime.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::record::{InheritedProtectionRecord, Record},
    protect::{SeedRounds, StandbySeeding},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{MigrateMode, MigrateRequest};
use whimbrel_core::MachineName;
use whimbrel_vm::RunningMachine;

/// How long to wait for the backup host's report when the target needs nothing more but has not ended the
/// protection.
const DECISION_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which that report is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Checks the request without the machine.
pub(super) fn check(host: &Daemon, name: &MachineName, request: &MigrateRequest) -> Result<(), DaemonError> {
    let Some(third) = &request.safe else { return Ok(()) };
    if request.mode != MigrateMode::Lazy {
        return Err(DaemonError::invalid(
            "--backup-host requires --mode postcopy: in the other modes one host always has the complete machine",
        ));
    }
    if *third == request.host || *third == host.name {
        return Err(DaemonError::invalid(format!(
            "--backup-host requires a third host, and {third} is the source or the target of {name}"
        )));
    }
    if request.network.is_some() {
        return Err(DaemonError::invalid(
            "--backup-host cannot be combined with --network: the backup host has no tunnel",
        ));
    }
    host.route(third).map(drop)
}

/// Reserves space at the backup host and starts its protection.
pub(super) fn start(
    host: &Arc<Daemon>,
    record: &Record,
    live: &RunningMachine,
    request: &MigrateRequest,
) -> Result<Option<StandbySeeding>, DaemonError> {
    let Some(third) = &request.safe else { return Ok(None) };
    if live.is_paused() {
        return Err(DaemonError::State { name: record.name.clone(), state: "paused", needed: "running" });
    }
    if live.away.is_some() || record.tunnel.is_some() {
        return Err(DaemonError::invalid(format!(
            "{} runs away from its network, where the backup host could not take it over",
            record.name
        )));
    }
    StandbySeeding::start(host, (record, live), (&request.host, third), request.rate_max).map(Some)
}

/// Copies most of the machine to the backup host.
pub(super) fn seed<'a>(
    filling: Option<&'a StandbySeeding>,
    record: &Record,
    ledgers: &mut [whimbrel_capture::DirtyLog],
    ports: &'a [whimbrel_vm::NetworkPort],
    reporter: &'a ProgressReporter,
) -> Result<Option<SeedRounds<'a>>, DaemonError> {
    let Some(filling) = filling else { return Ok(None) };
    filling.seed(record, ledgers, ports, reporter).map(Some)
}

/// The error for the caller when the backup host has taken over.
pub(super) fn taken_over_error(name: &MachineName, inherited: &InheritedProtectionRecord) -> DaemonError {
    let InheritedProtectionRecord { standby, heir, .. } = inherited.clone();
    DaemonError::RunsOnBackupHost { name: name.clone(), target: heir, third: standby }
}

impl Daemon {
    /// Checks who has the machine once the target needs nothing more: the target, because it has every page,
    /// or the backup host. The target ends the protection before it reports that it has every page.
    pub(super) fn check_not_at_backup(
        &self,
        name: &MachineName,
        inherited: Option<&InheritedProtectionRecord>,
    ) -> Result<(), DaemonError> {
        let begun = Instant::now();
        while self.protections.is_undecided(inherited) && begun.elapsed() < DECISION_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
        }
        match inherited.filter(|_| self.protections.backup_has_machine(inherited)) {
            Some(inherited) => Err(taken_over_error(name, inherited)),
            None => Ok(()),
        }
    }
}
