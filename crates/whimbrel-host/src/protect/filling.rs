//! The source's part of a move with a third host behind it: fills the standby that the target inherits, and is its witness
//! from the commit on.
//!
//! The rules are those of `whimbrel_protect::inherit`. A note that the third host is to be told of the end is durable before that
//! hears anything, and struck out by the commit: whatever ends the move before that, it is told. A failure here fails the
//! migration, and the machine goes on where it is, whole.

use super::{
    epochs,
    link::{Line, PageLink},
    notes::{Note, Side},
    settings::Settings,
};
use crate::{
    error::HostError,
    host::Host,
    live::{Live, LivePort},
    operation::Reporter,
    record::{Inherited, Record},
};
use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{ProtectMode, ProtectRequest, Unit};
use whimbrel_capture::{Follower, Ledger};
use whimbrel_core::{ByteSize, HostName, MachineName, WitnessName};
use whimbrel_migrate::{
    handover::SourceRecord,
    protocol::{HandoverId, Third},
    source::{self, BoxError},
};
use whimbrel_protect::{
    inherit,
    primary::Sender,
    protocol::{self, Begin, Fate, Heard, ProtectionId},
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
pub(crate) struct Filling {
    host: Arc<Host>,
    name: MachineName,
    id: ProtectionId,
    handover: HandoverId,
    settings: Settings,
    link: PageLink,
    line: Line,
    target: HostName,
    committed: bool,
}

impl Filling {
    /// Up to where the third host has room for the machine. With `rate_max` no more goes there from the target once the machine is
    /// there; the copy before that is this host's and has no limit.
    pub(crate) fn begin(
        host: &Arc<Host>,
        (record, live): (&Record, &Live),
        (target, standby): (&HostName, &HostName),
        rate_max: Option<ByteSize>,
    ) -> Result<Self, HostError> {
        let settings = Settings::of(&request(standby, &host.name, rate_max))?;
        let (id, handover) = (ProtectionId(rand::random()), HandoverId(rand::random()));
        let offer = super::offer::of(host, record, live, handover)?;
        let (link, line) = (PageLink::connect(host, standby, None)?, Line::new(host, standby));
        let side = Side::Ended { standby: standby.clone(), witness: None, keep: false };
        host.protecting.put_note(Note::new(id, &record.name, handover, side))?;
        // From here on its drop tells the third host that nothing came of it.
        let (host, name, target) = (host.clone(), record.name.clone(), target.clone());
        let filling = Self { host, name, id, handover, settings, link, line, target, committed: false };
        let begin = Begin {
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
        filling.sender(record)?.begin(&begin, &read).map_err(epochs::failed)?;
        Ok(filling)
    }

    fn sender(&self, record: &Record) -> Result<Sender<'_>, HostError> {
        epochs::sender(&self.link, self.id, &self.settings, record.config.memory.0)
    }

    /// What the target is told of it.
    pub(crate) fn third(&self) -> Result<Third, HostError> {
        let request = serde_json::to_string(&self.settings.request);
        let request = request.map_err(|error| HostError::invalid(error.to_string()))?;
        Ok(Third { protection: self.id.0, handover: self.handover, request })
    }

    /// What this host's record says of it from before the commit on.
    pub(crate) fn inherited(&self) -> Inherited {
        let (id, standby) = (self.id, self.settings.request.host.clone());
        Inherited { id, standby, heir: self.target.clone(), term_ms: TERM_MS as u32 }
    }

    /// Copies nearly all of the machine, which runs.
    pub(crate) fn fill<'a>(
        &'a self,
        record: &Record,
        ledgers: &mut [Ledger],
        ports: &'a [LivePort],
        reporter: &'a Reporter,
    ) -> Result<Copying<'a>, HostError> {
        let sending = self.sender(record)?;
        sending.follow(ledgers, false).map_err(epochs::failed)?;
        let mut copying = Copying { filling: self, sending, ports, reporter, beaten: Instant::now() };
        for _ in 0..ROUNDS_MAX {
            if copying.round(ledgers)? <= PAGES_LEFT_MAX {
                break;
            }
        }
        Ok(copying)
    }

    fn beat(&self) -> bool {
        let heard: Option<Heard> = self.line.ask(protocol::HEARTBEAT, &self.id, PATIENCE);
        heard == Some(Heard::Promise)
    }

    /// The machine is the target's: this host decides between it and the third one from now on.
    pub(crate) fn committed(mut self) {
        self.committed = true;
        self.host.protecting.hand_on(SourceRecord::HandedOver, &self.name, &self.inherited());
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.link.cut();
        if self.committed {
            return;
        }
        match self.line.end(self.id, false, PATIENCE) {
            Some(Fate::Ended) => self.host.protecting.remove_note(self.id),
            _ => self.host.protecting.tell_ended(self.id),
        }
    }
}

/// What the target is to ask of the standby.
fn request(standby: &HostName, source: &HostName, rate_max: Option<ByteSize>) -> ProtectRequest {
    ProtectRequest {
        host: standby.clone(),
        witness: Some(WitnessName::Host(source.clone())),
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
pub(crate) struct Copying<'a> {
    filling: &'a Filling,
    sending: Sender<'a>,
    ports: &'a [LivePort],
    reporter: &'a Reporter,
    beaten: Instant,
}

impl Copying<'_> {
    fn round(&mut self, ledgers: &mut [Ledger]) -> Result<u64, HostError> {
        let Self { filling, sending, reporter, beaten, .. } = self;
        let stage = format!("copying to {}", filling.line.to());
        let sent = sending.copy_round(ledgers, &mut |done, total| {
            reporter.progress(&stage, Unit::Pages, done, Some(total));
            if beaten.elapsed() > BEAT_EVERY {
                filling.beat();
                *beaten = Instant::now();
            }
            if reporter.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        sent.map_err(epochs::failed)
    }
}

impl source::Third for Copying<'_> {
    fn ahead(&mut self, ledgers: &mut [Ledger]) -> Result<(), BoxError> {
        self.round(ledgers)?;
        // It is about to be whole: that it hears nobody for the length of the pause is no reason to ask who is alive.
        match self.filling.beat() {
            true => Ok(()),
            false => Err(format!("{} does not answer", self.filling.line.to()).into()),
        }
    }

    fn at_pause(&mut self, ledgers: &mut [Ledger], device_state: &[u8]) -> Result<(), BoxError> {
        let ports = self.ports.iter().map(LivePort::addresses).collect();
        self.sending.copy_last(ledgers, device_state, ports)?;
        ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Follower::Standby));
        Ok(())
    }
}

impl super::Protecting {
    /// If a machine was handed over, says its record, whose protection another host inherits: its standby must not be told that it
    /// has ended, and this host is its witness. Found by a later daemon, it is the same again.
    pub(crate) fn hand_on(&self, record: SourceRecord, name: &MachineName, inherited: &Inherited) {
        if !inherit::is_witness(record) {
            return;
        }
        self.remove_note(inherited.id);
        super::lock(&self.to_tell).remove(&inherited.id);
        let Inherited { id, standby, heir, term_ms } = inherited;
        if let Err(error) = self.leases.take_up(*id, heir, standby, *term_ms) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(machine = %name, %standby, error, "nobody decides whether the third host may take the machine over");
        }
    }

    /// Whether it is open between an heir and the third host who has the machine.
    pub(crate) fn is_undecided(&self, inherited: Option<&Inherited>) -> bool {
        inherited.is_some_and(|inherited| self.leases.is_open(inherited.id))
    }

    /// Whether the third host has taken over a machine that was handed over here.
    pub(crate) fn third_has(&self, inherited: Option<&Inherited>) -> bool {
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
            Settings::of(&read).unwrap().rate_max
        };
        assert_eq!((inherited(Some(300_000)), inherited(None)), (Some(300_000), None));
    }
}
