//! The source's part of a move with a third host behind it: fills the standby that the target inherits, and
//! is its witness from the commit on.
//!
//! The rules are those of `whimbrel_protect::inherited_primary`. A note that the third host is to be told of
//! the end is durable before that hears anything, and struck out by the commit: whatever ends the move before
//! that, it is told. A failure here fails the migration, and the machine goes on where it is, whole.

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
    running::{NetworkPort, RunningMachine},
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
    source::{self, BoxError},
};
use whimbrel_protect::{
    inherited_primary,
    primary::EpochSender,
    protocol::{self, HeartbeatReply, ProtectionId, StandbyOutcome, StartRequest},
};

/// How long a lease lasts: a host that is busy with a move answers late.
const TERM_MS: u64 = 2000;
/// Rounds before the target is asked for room, and what may be left after them.
const ROUNDS_MAX: usize = 8;
const PAGES_LEFT_MAX: u64 = 1024;
/// How often the standby hears of who fills it, and how long its answer is waited for.
const BEAT_EVERY: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);

/// A standby that is being filled for a target.
pub(crate) struct StandbySeeding {
    host: Arc<Daemon>,
    name: MachineName,
    id: ProtectionId,
    handover: HandoverId,
    settings: ProtectionSettings,
    link: PageLink,
    line: ControlLink,
    target: HostName,
    committed: bool,
}

impl StandbySeeding {
    /// Up to where the third host has room for the machine. With `rate_max` no more goes there from the
    /// target once the machine is there; the copy before that is this host's and has no limit.
    pub(crate) fn start(
        host: &Arc<Daemon>,
        (record, live): (&Record, &RunningMachine),
        (target, standby): (&HostName, &HostName),
        rate_max: Option<ByteSize>,
    ) -> Result<Self, DaemonError> {
        let settings = ProtectionSettings::of(&request(standby, &host.name, rate_max))?;
        let (id, handover) = (ProtectionId(rand::random()), HandoverId(rand::random()));
        let offer = super::offer::of(host, record, live, handover)?;
        let (link, line) = (PageLink::connect(host, standby, None)?, ControlLink::new(host, standby));
        let side = ProtectionSide::Ended { standby: standby.clone(), witness: None, keep: false };
        host.protecting.put_note(ProtectionRecord::new(id, &record.name, handover, side))?;
        // From here on its drop tells the third host that nothing came of it.
        let (host, name, target) = (host.clone(), record.name.clone(), target.clone());
        let filling = Self { host, name, id, handover, settings, link, line, target, committed: false };
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
        let layout = &filling.host.layout;
        let read = |digest| std::fs::read(layout.boot_file(&digest)).map_err(BoxError::from);
        filling.sender(record)?.start(&begin, &read).map_err(epochs::failed)?;
        Ok(filling)
    }

    fn sender(&self, record: &Record) -> Result<EpochSender<'_>, DaemonError> {
        epochs::sender(&self.link, self.id, &self.settings, record.config.memory.0)
    }

    /// What the target is told of it.
    pub(crate) fn third(&self) -> Result<BackupHost, DaemonError> {
        let request = serde_json::to_string(&self.settings.request);
        let request = request.map_err(|error| DaemonError::invalid(error.to_string()))?;
        Ok(BackupHost { protection: self.id.0, handover: self.handover, request })
    }

    /// What this host's record says of it from before the commit on.
    pub(crate) fn inherited(&self) -> InheritedProtectionRecord {
        let (id, standby) = (self.id, self.settings.request.host.clone());
        InheritedProtectionRecord { id, standby, heir: self.target.clone(), term_ms: TERM_MS as u32 }
    }

    /// Copies nearly all of the machine, which runs.
    pub(crate) fn fill<'a>(
        &'a self,
        record: &Record,
        ledgers: &mut [DirtyLog],
        ports: &'a [NetworkPort],
        reporter: &'a ProgressReporter,
    ) -> Result<SeedRounds<'a>, DaemonError> {
        let sending = self.sender(record)?;
        sending.attach_consumer(ledgers, false).map_err(epochs::failed)?;
        let mut copying = SeedRounds { filling: self, sending, ports, reporter, beaten: Instant::now() };
        for _ in 0..ROUNDS_MAX {
            if copying.round(ledgers)? <= PAGES_LEFT_MAX {
                break;
            }
        }
        Ok(copying)
    }

    fn send_heartbeat(&self) -> bool {
        let heard: Option<HeartbeatReply> = self.line.ask(protocol::HEARTBEAT, &self.id, PATIENCE);
        heard == Some(HeartbeatReply::Promise)
    }

    /// The machine is the target's: this host decides between it and the third one from now on.
    pub(crate) fn committed(mut self) {
        self.committed = true;
        self.host.protecting.hand_on(SourceRecord::HandedOver, &self.name, &self.inherited());
    }
}

impl Drop for StandbySeeding {
    fn drop(&mut self) {
        self.link.cut();
        if self.committed {
            return;
        }
        match self.line.end(self.id, false, PATIENCE) {
            Some(StandbyOutcome::Ended) => self.host.protecting.remove_note(self.id),
            _ => self.host.protecting.tell_ended(self.id),
        }
    }
}

/// What the target is to ask of the standby.
fn request(standby: &HostName, source: &HostName, rate_max: Option<ByteSize>) -> ProtectRequest {
    ProtectRequest {
        host: standby.clone(),
        witness: Some(WitnessAddress::Host(source.clone())),
        mode: ProtectMode::Epoch,
        epoch_ms: None,
        stretch: None,
        block: None,
        lease_ms: Some(TERM_MS),
        without: Vec::new(),
        codec: Default::default(),
        then: None,
        keep: None,
        group: None,
        rate_max,
    }
}

/// The copy that goes to the third host.
pub(crate) struct SeedRounds<'a> {
    filling: &'a StandbySeeding,
    sending: EpochSender<'a>,
    ports: &'a [NetworkPort],
    reporter: &'a ProgressReporter,
    beaten: Instant,
}

impl SeedRounds<'_> {
    fn round(&mut self, ledgers: &mut [DirtyLog]) -> Result<u64, DaemonError> {
        let Self { filling, sending, reporter, beaten, .. } = self;
        let stage = format!("copying to {}", filling.line.to());
        let sent = sending.copy_round(ledgers, &mut |done, total| {
            reporter.progress(&stage, Unit::Pages, done, Some(total));
            if beaten.elapsed() > BEAT_EVERY {
                filling.send_heartbeat();
                *beaten = Instant::now();
            }
            if reporter.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        sent.map_err(epochs::failed)
    }
}

impl source::BackupSink for SeedRounds<'_> {
    fn ahead(&mut self, ledgers: &mut [DirtyLog]) -> Result<(), BoxError> {
        self.round(ledgers)?;
        // It is about to be whole: that it hears nobody for the length of the pause is no reason to ask who
        // is alive.
        match self.filling.send_heartbeat() {
            true => Ok(()),
            false => Err(format!("{} does not answer", self.filling.line.to()).into()),
        }
    }

    fn at_pause(&mut self, ledgers: &mut [DirtyLog], device_state: &[u8]) -> Result<(), BoxError> {
        let ports = self.ports.iter().map(NetworkPort::addresses).collect();
        self.sending.copy_last(ledgers, device_state, ports)?;
        ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Consumer::Standby));
        Ok(())
    }
}

impl crate::protect::Protections {
    /// If a machine was handed over, says its record, whose protection another host inherits: its standby
    /// must not be told that it has ended, and this host is its witness. Found by a later daemon, it is the
    /// same again.
    pub(crate) fn hand_on(
        &self,
        record: SourceRecord,
        name: &MachineName,
        inherited: &InheritedProtectionRecord,
    ) {
        if !inherited_primary::is_witness(record) {
            return;
        }
        self.remove_note(inherited.id);
        crate::protect::lock(&self.to_tell).remove(&inherited.id);
        let InheritedProtectionRecord { id, standby, heir, term_ms } = inherited;
        if let Err(error) = self.leases.recover(*id, heir, standby, *term_ms) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(machine = %name, %standby, error, "nobody decides whether the third host may take the machine over");
        }
    }

    /// Whether it is open between an heir and the third host who has the machine.
    pub(crate) fn is_undecided(&self, inherited: Option<&InheritedProtectionRecord>) -> bool {
        inherited.is_some_and(|inherited| self.leases.is_open(inherited.id))
    }

    /// Whether the third host has taken over a machine that was handed over here.
    pub(crate) fn third_has(&self, inherited: Option<&InheritedProtectionRecord>) -> bool {
        inherited.is_some_and(|inherited| self.leases.was_taken(inherited.id))
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
