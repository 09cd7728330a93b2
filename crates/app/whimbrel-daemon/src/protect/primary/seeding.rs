//! Seeding for inherited protection: the source's part of a migration with a backup host.
//!
//! It seeds the standby that the target inherits, and is its witness from the commit on, by the rules of
//! `whimbrel_protect::inherited_primary`. A record that the backup host must be notified of the end is
//! durable before that host hears anything, and the commit removes it: if the migration ends before, the
//! backup host is notified. A failure here fails the migration, and the machine keeps running here, complete.

use super::epochs;
use crate::protect::{
    link::{ControlLink, PageLink},
    records::{ProtectionRecord, ProtectionSide},
    settings::ProtectionSettings,
};
use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::record::{InheritedProtectionRecord, Record},
    migrate::newer_parts,
    network::offloads,
};
use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{ProtectMode, ProtectRequest, Unit};
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::{ByteSize, HostName, MachineName, WitnessAddress};
use whimbrel_migrate::{
    handover::SourceRecord,
    protocol::{BackupHost, HandoverId},
    source::{BackupSink, BoxError},
};
use whimbrel_protect::{
    inherited_primary,
    primary::EpochSender,
    protocol::{self, HeartbeatReply, ProtectionId, StandbyOutcome, StartRequest},
};
use whimbrel_vm::{NetworkPort, RunningMachine};

/// Term of the lease: a host that is busy with a migration answers late.
const TERM_MS: u64 = 2000;
/// Most rounds before the target is contacted, and the number of pages at which they end.
const ROUNDS_MAX: usize = 8;
const PAGES_LEFT_MAX: u64 = 1024;
/// Interval of heartbeats during seeding, and the timeout of their reply.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A standby that is being seeded for a target.
pub(crate) struct StandbySeeding {
    host: Arc<Daemon>,
    name: MachineName,
    id: ProtectionId,
    handover: HandoverId,
    settings: ProtectionSettings,
    link: PageLink,
    control_link: ControlLink,
    target: HostName,
    committed: bool,
}

impl StandbySeeding {
    /// Starts the protection at the backup host. `rate_max` limits the epochs that the target sends later;
    /// seeding by this host has no limit.
    pub(crate) fn start(
        host: &Arc<Daemon>,
        (record, live): (&Record, &RunningMachine),
        (target, standby): (&HostName, &HostName),
        rate_max: Option<ByteSize>,
    ) -> Result<Self, DaemonError> {
        let settings = ProtectionSettings::of(&request(standby, &host.name, rate_max))?;
        let (id, handover) = (ProtectionId(rand::random()), HandoverId(rand::random()));
        let offer = super::offer::of(host, record, live, handover, settings.replay)?;
        let (link, line) = (PageLink::connect(host, standby, None)?, ControlLink::new(host, standby));
        offloads::check(link.connection(), standby, live)?;
        newer_parts::check(link.connection(), standby, &record.config)?;
        let side = ProtectionSide::Ended { standby: standby.clone(), witness: None, keep: false };
        host.protections.put_record(ProtectionRecord::new(id, &record.name, handover, side))?;
        // From here on, dropping it notifies the backup host.
        let (host, name, target) = (host.clone(), record.name.clone(), target.clone());
        let filling =
            Self { host, name, id, handover, settings, link, control_link: line, target, committed: false };
        let begin = StartRequest {
            id,
            offer,
            coding: filling.settings.coding,
            lease_ms: TERM_MS as u32,
            witness: filling.settings.request.witness.clone(),
            then: None,
            keep: None,
            heir: Some(filling.target.clone()),
        };
        let layout = &filling.host.directories;
        let read = |digest| std::fs::read(layout.boot_file(&digest)).map_err(BoxError::from);
        filling.sender(record)?.start(&begin, &read).map_err(epochs::failed)?;
        Ok(filling)
    }

    fn sender(&self, record: &Record) -> Result<EpochSender<'_>, DaemonError> {
        epochs::sender(&self.link, self.id, &self.settings, record.config.memory.0)
    }

    /// What the target must know of the protection.
    pub(crate) fn backup_host(&self) -> Result<BackupHost, DaemonError> {
        let request = serde_json::to_string(&self.settings.request);
        let request = request.map_err(|error| DaemonError::invalid(error.to_string()))?;
        Ok(BackupHost { protection: self.id.0, handover: self.handover, request })
    }

    /// The part of this host's record, written before the commit.
    pub(crate) fn inherited_record(&self) -> InheritedProtectionRecord {
        let (id, standby) = (self.id, self.settings.request.host.clone());
        InheritedProtectionRecord { id, standby, heir: self.target.clone(), term_ms: TERM_MS as u32 }
    }

    /// Copies most of the running machine.
    pub(crate) fn seed<'a>(
        &'a self,
        record: &Record,
        ledgers: &mut [DirtyLog],
        ports: &'a [NetworkPort],
        reporter: &'a ProgressReporter,
    ) -> Result<SeedRounds<'a>, DaemonError> {
        let sending = self.sender(record)?;
        sending.attach_consumer(ledgers, false).map_err(epochs::failed)?;
        let mut copying =
            SeedRounds { seeding: self, sender: sending, ports, reporter, last_heartbeat: Instant::now() };
        let mut rounds = || -> Result<(), DaemonError> {
            for _ in 0..ROUNDS_MAX {
                if copying.round(ledgers)? <= PAGES_LEFT_MAX {
                    break;
                }
            }
            Ok(())
        };
        let copied = rounds();
        copied.inspect_err(|_| copying.give_up(ledgers)).map(|()| copying)
    }

    fn send_heartbeat(&self) -> bool {
        let heard: Option<HeartbeatReply> =
            self.control_link.ask(protocol::HEARTBEAT, &self.id, REPLY_TIMEOUT);
        heard == Some(HeartbeatReply::Promise)
    }

    /// Handles the commit: the target has the machine, and this host is the witness from now on.
    pub(crate) fn committed(mut self) {
        self.committed = true;
        self.host.protections.become_witness(SourceRecord::HandedOver, &self.name, &self.inherited_record());
    }
}

impl Drop for StandbySeeding {
    fn drop(&mut self) {
        self.link.close();
        if self.committed {
            return;
        }
        match self.control_link.end(self.id, false, REPLY_TIMEOUT) {
            Some(StandbyOutcome::Ended) => self.host.protections.remove_record(self.id),
            _ => self.host.protections.notify_later(self.id),
        }
    }
}

/// The request that the target makes of the standby.
fn request(standby: &HostName, source: &HostName, rate_max: Option<ByteSize>) -> ProtectRequest {
    ProtectRequest {
        host: standby.clone(),
        witness: Some(WitnessAddress::Host(source.clone())),
        mode: ProtectMode::Epoch,
        epoch_ms: None,
        stretch: None,
        block: None,
        lease_ms: Some(TERM_MS),
        then: None,
        spares: Vec::new(),
        keep: None,
        group: None,
        rate_max,
    }
}

/// The rounds that seed the backup host.
pub(crate) struct SeedRounds<'a> {
    seeding: &'a StandbySeeding,
    sender: EpochSender<'a>,
    ports: &'a [NetworkPort],
    reporter: &'a ProgressReporter,
    last_heartbeat: Instant,
}

impl SeedRounds<'_> {
    fn round(&mut self, ledgers: &mut [DirtyLog]) -> Result<u64, DaemonError> {
        let Self { seeding: filling, sender: sending, reporter, last_heartbeat: beaten, .. } = self;
        let stage = format!("seeding {}", filling.control_link.to());
        let sent = sending.copy_round(ledgers, &mut |done, total| {
            reporter.progress(&stage, Unit::Pages, done, Some(total));
            if beaten.elapsed() > HEARTBEAT_INTERVAL {
                filling.send_heartbeat();
                *beaten = Instant::now();
            }
            if reporter.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        sent.map_err(epochs::failed)
    }
}

impl BackupSink for SeedRounds<'_> {
    fn copy_ahead(&mut self, ledgers: &mut [DirtyLog]) -> Result<(), BoxError> {
        self.round(ledgers)?;
        // The standby will be complete after the next round. A heartbeat keeps it from asking the witness
        // during the pause.
        match self.seeding.send_heartbeat() {
            true => Ok(()),
            false => {
                Err(format!("the backup host {} does not answer", self.seeding.control_link.to()).into())
            }
        }
    }

    fn copy_at_pause(&mut self, ledgers: &mut [DirtyLog], device_state: &[u8]) -> Result<(), BoxError> {
        let ports = self.ports.iter().map(NetworkPort::addresses).collect();
        self.sender.copy_last_round(ledgers, device_state, ports)?;
        self.give_up(ledgers);
        Ok(())
    }

    fn give_up(&mut self, ledgers: &mut [DirtyLog]) {
        ledgers.iter_mut().for_each(|ledger| ledger.detach(Consumer::Standby));
    }
}

impl crate::protect::Protections {
    /// If the machine's record says that it was handed over with an inherited protection, makes this host its
    /// witness; the standby must not be told that the protection has ended. A restarted daemon does so again.
    pub(crate) fn become_witness(
        &self,
        record: SourceRecord,
        name: &MachineName,
        inherited: &InheritedProtectionRecord,
    ) {
        if !inherited_primary::is_witness(record) {
            return;
        }
        self.remove_record(inherited.id);
        crate::protect::lock(&self.to_notify).remove(&inherited.id);
        let InheritedProtectionRecord { id, standby, heir, term_ms } = inherited;
        if let Err(error) = self.witness_table.register_inherited(*id, heir, standby, *term_ms) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(machine = %name, %standby, error, "cannot register a protection here: its standby cannot take over");
        }
    }

    /// Whether ownership between the target and the backup host is undecided.
    pub(crate) fn is_undecided(&self, inherited: Option<&InheritedProtectionRecord>) -> bool {
        inherited.is_some_and(|inherited| self.witness_table.is_open(inherited.id))
    }

    /// Whether the backup host has taken over a machine that was handed over here.
    pub(crate) fn backup_has_machine(&self, inherited: Option<&InheritedProtectionRecord>) -> bool {
        inherited.is_some_and(|inherited| self.witness_table.was_taken(inherited.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_target_reads_of_the_protection_has_the_limit_of_the_move() {
        let [standby, source] = ["gamma", "alpha"].map(|name| name.parse::<HostName>().unwrap());
        let inherited = |rate_max: Option<u64>| {
            let asked = request(&standby, &source, rate_max.map(ByteSize));
            let read: ProtectRequest = serde_json::from_str(&serde_json::to_string(&asked).unwrap()).unwrap();
            ProtectionSettings::of(&read).unwrap().rate_max
        };
        assert_eq!((inherited(Some(300_000)), inherited(None)), (Some(300_000), None));
    }
}
