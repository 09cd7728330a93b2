//! `--safe`: a third host that has all of the machine as of the pause, and follows it while pages are missing
//! on the target.
//!
//! What is asked for is checked before a byte moves; the copy is `protect::Filling`. A machine that is
//! protected already, is paused or runs away from its network is refused, and so is every mode but `lazy`: in
//! the others the machine is whole on one host at any time, or its last rounds would be sent twice while it
//! stands still.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::record::{InheritedProtectionRecord, Record},
    protect::{SeedRounds, StandbySeeding},
    running::RunningMachine,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{MigrateMode, MigrateRequest};
use whimbrel_capture::Consumer;
use whimbrel_core::MachineName;

/// How long the third host's word is waited for when the target says that it needs nothing more, and has not
/// ended the protection.
const UNDECIDED: Duration = Duration::from_secs(5);
/// How often is looked.
const LOOK: Duration = Duration::from_millis(20);

/// What can be said of the request without the machine.
pub(super) fn check(host: &Daemon, name: &MachineName, request: &MigrateRequest) -> Result<(), DaemonError> {
    let Some(third) = &request.safe else { return Ok(()) };
    if request.mode != MigrateMode::Lazy {
        return Err(DaemonError::invalid(
            "--safe is for --mode lazy: in the other modes this host has all of it until the other one has",
        ));
    }
    if *third == request.host || *third == host.name {
        return Err(DaemonError::invalid(format!(
            "{third} has {name} in any case: --safe takes a third host"
        )));
    }
    if request.network.is_some() {
        return Err(DaemonError::invalid(
            "--safe takes no --network: the third host has no tunnel to go on with",
        ));
    }
    host.route(third).map(drop)
}

/// Finds room at the third host.
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
            "{} runs away from its network, and the third host could not take it over there",
            record.name
        )));
    }
    StandbySeeding::start(host, (record, live), (&request.host, third), request.rate_max).map(Some)
}

/// Copies nearly all of it there.
pub(super) fn fill<'a>(
    filling: Option<&'a StandbySeeding>,
    record: &Record,
    ledgers: &mut [whimbrel_capture::DirtyLog],
    ports: &'a [crate::running::NetworkPort],
    reporter: &'a ProgressReporter,
) -> Result<Option<SeedRounds<'a>>, DaemonError> {
    let Some(filling) = filling else { return Ok(None) };
    let filled = filling.fill(record, ledgers, ports, reporter);
    if filled.is_err() {
        ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Consumer::Standby));
    }
    filled.map(Some)
}

/// What the caller hears when the machine is on the third host.
pub(super) fn went(name: &MachineName, inherited: &InheritedProtectionRecord) -> DaemonError {
    let InheritedProtectionRecord { standby, heir, .. } = inherited.clone();
    DaemonError::WentToThird { name: name.clone(), target: heir, third: standby }
}

impl Daemon {
    /// The target needs nothing more: because it has all of it, or because the third host has. It ends the
    /// protection before it says the first.
    pub(super) fn check_not_at_third(
        &self,
        name: &MachineName,
        inherited: Option<&InheritedProtectionRecord>,
    ) -> Result<(), DaemonError> {
        let begun = Instant::now();
        while self.protecting.is_undecided(inherited) && begun.elapsed() < UNDECIDED {
            std::thread::sleep(LOOK);
        }
        match inherited.filter(|_| self.protecting.third_has(inherited)) {
            Some(inherited) => Err(went(name, inherited)),
            None => Ok(()),
        }
    }
}
