//! Hosted standbys: the standby side of a protection in the daemon.
//!
//! [`EpochReceiver`] stores pages; [`lease::StandbyLease`] decides who may run the machine. This module
//! passes messages to both and carries out the decisions: it asks the witness when the primary is silent,
//! records that the machine belongs to this host, and starts it. One thread for each standby watches the
//! clock and the waiting QEMU.
//!
//! Lock order: receiver, lease, committed epoch. The committed epoch is read for a decision, and cleared,
//! only with the lease locked: nobody decides to take over a machine that is about to be of no one instant.

use super::epoch_capsules::{EpochCapsuleWriter, LastEpochCapsule};
use crate::protect::standby::page_sharing::SiblingStandbys;
use crate::protect::takeover::run::{Takeover, TakeoverCause};
use crate::protect::{link::ControlLink, settings::ProtectionSettings, witness::client::WitnessClient};
use crate::{core::error::DaemonError, daemon::Daemon, migrate::target::incoming::DaemonTarget};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Mutex, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_api::{ProtectMode, ProtectRole, ProtectState, ProtectionInfo};
use whimbrel_core::{Digest, HostName, MachineName, WitnessAddress, lock};
use whimbrel_migrate::{
    compatibility::Incompatibility,
    protocol::{Accepted, BOOT_FILES_MAX, HandoverId, Offered},
    target::TargetHost,
};
use whimbrel_protect::{
    StandbyError,
    clock::BootTime,
    inherited_primary::AcceptedPrimary,
    input_replay::InputLog,
    lease::{self, StandbyLeaseAction, WitnessQuery, WitnessReply},
    protocol::{
        self, Blob, Compare, EndProtection, EpochEnd, EpochPages, HeartbeatReply, InputFrames, PagesToResend,
        ProtectionId, StandbyOutcome, StartReply, StartRequest,
    },
    standby::{CommittedEpoch, EpochReceiver},
};

/// How long the pages of an ended protection are retained for the next one, and how long seeding may be
/// silent.
const RETENTION: Duration = Duration::from_secs(600);

/// A standby of another host's machine.
pub(crate) struct HostedStandby {
    pub(in crate::protect) host: Arc<Daemon>,
    pub(in crate::protect) id: ProtectionId,
    pub(in crate::protect) name: MachineName,
    /// The primary: the host that started the protection, or the one that inherits it.
    pub(in crate::protect) primary: HostName,
    /// The host that seeds it for an inheriting primary.
    seeder: Option<HostName>,
    accepted_primary: Mutex<AcceptedPrimary>,
    term: Duration,
    witness: Option<Arc<WitnessClient>>,
    pub(in crate::protect) handover: HandoverId,
    pub(in crate::protect) lease: Mutex<lease::StandbyLease>,
    /// None once another protection has it, or once it is discarded.
    pub(in crate::protect) receiver: Mutex<Option<EpochReceiver>>,
    /// The epoch to take over from.
    pub(in crate::protect) committed: Arc<CommittedEpoch>,
    /// Inputs since that epoch, in mode replay. Locked last.
    pub(in crate::protect) inputs: Mutex<InputLog>,
    /// The next protection, after a takeover by this host.
    pub(in crate::protect) next_settings: Option<ProtectionSettings>,
    /// Present if epochs are stored as capsules.
    capsules: Option<EpochCapsuleWriter>,
    /// Why the machine could not be loaded here.
    pub(in crate::protect) failure: Mutex<Option<String>>,
    pub(in crate::protect) over: AtomicBool,
}

impl Daemon {
    /// Handles a message of a protection.
    pub(crate) fn answer_protection(
        self: &Arc<Self>,
        asker: &HostName,
        kind: u16,
        header: &[u8],
        payload: Bytes,
    ) -> Result<Vec<u8>, DaemonError> {
        match kind {
            protocol::WITNESS => Ok(encoded(&self.protections.witness_table.answer(asker, &parse(header)?)?)),
            protocol::START => Ok(encoded(&self.start_standby(asker, parse(header)?)?)),
            protocol::BLOB => {
                let blob: Blob = parse(header)?;
                self.with_receiver(asker, blob.id, |receiver, _| {
                    receiver.store_boot_file_range(&blob.piece, &payload)
                })?;
                Ok(Vec::new())
            }
            protocol::COMPARE_DIGESTS => {
                let asked: Compare = parse(header)?;
                let compared =
                    self.with_receiver(asker, asked.id, |receiver, _| receiver.compare(&asked, &payload));
                Ok(encoded(&compared?))
            }
            protocol::EPOCH_PAGES => {
                let piece: EpochPages = parse(header)?;
                let again: PagesToResend = self.with_receiver(asker, piece.id, |receiver, standing| {
                    if piece.epoch.is_none() {
                        standing.seeding_restarts()?;
                    }
                    receiver.store_pages_among(&piece, &payload, &SiblingStandbys::new(self, asker))
                })?;
                Ok(encoded(&again))
            }
            protocol::EPOCH_END => {
                let seal: EpochEnd = parse(header)?;
                self.with_receiver(asker, seal.id, |receiver, standing| {
                    receiver.end_epoch(seal, payload.to_vec())?;
                    standing.capsules.iter().for_each(|keeping| keeping.epoch_committed(receiver));
                    Ok(())
                })?;
                Ok(Vec::new())
            }
            protocol::INPUTS => {
                let inputs: InputFrames = parse(header)?;
                let standing = self.standby_of(asker, inputs.id).ok_or_else(|| unknown(inputs.id))?;
                Ok(encoded(&standing.store_inputs(&inputs, &payload).map_err(standby_error)?))
            }
            protocol::HEARTBEAT => Ok(encoded(&self.answer_heartbeat(asker, parse(header)?)?)),
            protocol::END => Ok(encoded(&self.end_standby(asker, &parse(header)?)?)),
            protocol::YIELD => Ok(encoded(&self.answer_yield(asker, parse(header)?)?)),
            kind => Err(DaemonError::invalid(format!("message kind {kind:#06x} is not one of a protection"))),
        }
    }

    fn start_standby(
        self: &Arc<Self>,
        from: &HostName,
        begin: StartRequest,
    ) -> Result<StartReply, DaemonError> {
        let arrays = begin.offer.arrays.iter().map(|array| array.pages).collect::<Vec<_>>();
        let used = self.protections.standby(begin.id).is_some();
        let keeps_too_much = begin.keep.is_some_and(|keep| keep.every_ms < 100 || keep.count > 100_000);
        let too_many = begin.offer.blobs.len() > BOOT_FILES_MAX;
        if too_many || arrays.len() > 64 || begin.lease_ms < 50 || used || keeps_too_much {
            return Err(DaemonError::invalid("the request to start a protection is out of bounds"));
        }
        if let (Some(_), Some(source)) = (&begin.heir, begin.witness.as_ref().and_then(WitnessAddress::host))
        {
            // The witness after the migration: a missing route would be noticed too late, when the witness is
            // needed.
            self.route(source)?;
        }
        let then = begin.then.as_deref().map(|text| self.next_settings(text)).transpose()?;
        // Pages of the same handover are older pages of the same machine, whatever came in between.
        let old = self.protections.standby_by_handover(from, begin.offer.handover);
        let left = old.and_then(|old| old.release(&arrays, &begin));
        let has_pages = left.is_some();
        let (mut receiver, blobs_missing, last) = match left {
            Some((mut receiver, last)) => {
                receiver.restart();
                (receiver, Vec::new(), last)
            }
            None => {
                let (receiver, missing) = match self.reserve_standby(&begin, from, arrays)? {
                    Ok(reserved) => reserved,
                    Err(misfit) => return Ok(StartReply { offered: Offered::Misfit(misfit), has_pages }),
                };
                (receiver, missing, None)
            }
        };
        let first = receiver.wants_snapshot(begin.keep.is_some(), !has_pages);
        let keeping =
            begin.keep.map(|rule| EpochCapsuleWriter::new(rule, &begin.offer, last.filter(|_| !first)));
        let (term, current) = (Duration::from_millis(begin.lease_ms.into()), receiver.committed_epoch());
        let primary = begin.heir.clone().unwrap_or_else(|| from.clone());
        self.protections.put_standby_record(&begin, &primary).inspect_err(|_| receiver.discard())?;
        let arbiter = |witness| Arc::new(WitnessClient::new(self, witness, begin.id, term));
        let standing = Arc::new(HostedStandby {
            host: self.clone(),
            id: begin.id,
            name: begin.offer.name.clone(),
            primary,
            seeder: begin.heir.is_some().then(|| from.clone()),
            accepted_primary: Mutex::new(AcceptedPrimary::Source),
            term,
            witness: begin.witness.as_ref().map(arbiter),
            handover: begin.offer.handover,
            lease: Mutex::new(lease::StandbyLease::initial(begin.witness.is_some(), term, BootTime::now())),
            receiver: Mutex::new(Some(receiver)),
            committed: current,
            inputs: Mutex::default(),
            next_settings: then,
            capsules: keeping,
            failure: Mutex::default(),
            over: AtomicBool::new(false),
        });
        self.protections.insert_standby(standing.clone());
        self.start_threads(&standing)?;
        Ok(StartReply {
            offered: Offered::Accepted(Accepted { blobs_missing, begun_as: Vec::new() }),
            has_pages,
        })
    }

    /// Reserves memory and disks for a standby; or why the machine does not fit.
    fn reserve_standby(
        self: &Arc<Self>,
        begin: &StartRequest,
        from: &HostName,
        arrays: Vec<u64>,
    ) -> Result<Result<(EpochReceiver, Vec<Digest>), Incompatibility>, DaemonError> {
        let reserved = DaemonTarget::for_standby(self).reserve(&begin.offer, from);
        let arrival = match reserved.map_err(|error| error.downcast::<Incompatibility>()) {
            Ok(arrival) => arrival,
            Err(Ok(misfit)) => return Ok(Err(*misfit)),
            Err(Err(source)) => {
                return Err(DaemonError::Qemu { action: "reserve space for a standby", source });
            }
        };
        let missing = arrival.boot_files_missing();
        let (files, handover) = (begin.offer.blobs.clone(), begin.offer.handover);
        let receiver = EpochReceiver::new(arrival, arrays, files, handover);
        Ok(Ok((receiver, missing)))
    }

    fn start_threads(&self, standing: &Arc<HostedStandby>) -> Result<(), DaemonError> {
        let its = || standing.clone();
        let (watched, line, kept) = (its(), its(), its());
        self.start_thread("standby", move || watched.watch())?;
        self.start_thread("witness-line", move || line.keep_connected())?;
        if standing.capsules.is_some() {
            let keep = move || kept.capsules.iter().for_each(|keeping| keeping.run(&kept));
            self.start_thread("keep-epochs", keep)?;
        }
        Ok(())
    }

    fn start_thread(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), DaemonError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        thread
            .map(drop)
            .map_err(|source| DaemonError::io("start a thread for", self.directories.data(), source))
    }

    /// Settings of the next protection after a takeover, checked before there is anything to take over.
    fn next_settings(&self, text: &str) -> Result<ProtectionSettings, DaemonError> {
        let garbage =
            |error| DaemonError::invalid(format!("invalid settings of the next protection: {error}"));
        let mut settings = ProtectionSettings::of(&serde_json::from_str(text).map_err(garbage)?)?;
        self.route(&settings.request.host)?;
        // The old primary is among them, which may not be reachable from here.
        settings.request.spares.retain(|spare| *spare != self.name && self.route(spare).is_ok());
        Ok(settings)
    }

    /// The hosted standby of this id, if `asker` may send it messages.
    pub(in crate::protect) fn standby_of(
        &self,
        asker: &HostName,
        id: ProtectionId,
    ) -> Option<Arc<HostedStandby>> {
        self.protections.standby(id).filter(|standing| standing.accepts(asker))
    }

    fn with_receiver<T>(
        &self,
        asker: &HostName,
        id: ProtectionId,
        work: impl FnOnce(&mut EpochReceiver, &HostedStandby) -> Result<T, StandbyError>,
    ) -> Result<T, DaemonError> {
        let standing = self.standby_of(asker, id).ok_or_else(|| unknown(id))?;
        let mut receiver = lock(&standing.receiver);
        // Checked with the receiver locked, which a takeover needs too.
        if lock(&standing.lease).outcome() != StandbyOutcome::Standing {
            return Err(standby_error(StandbyError::Ended));
        }
        let receiver = receiver.as_mut().ok_or_else(|| unknown(id))?;
        work(receiver, &standing).map_err(standby_error)
    }

    fn answer_heartbeat(&self, asker: &HostName, id: ProtectionId) -> Result<HeartbeatReply, DaemonError> {
        Ok(match self.standby_of(asker, id) {
            Some(standing) => lock(&standing.lease).heartbeat(BootTime::now()),
            None => HeartbeatReply::NoPromise(self.protections.outcome(id)?),
        })
    }

    fn end_standby(&self, asker: &HostName, end: &EndProtection) -> Result<StandbyOutcome, DaemonError> {
        let Some(standing) = self.standby_of(asker, end.id) else {
            return self.protections.outcome(end.id);
        };
        let action = lock(&standing.lease).end(end.keep);
        // Neither of the two that end a protection can fail.
        drop(standing.execute(action, TakeoverCause::Yielded));
        Ok(standing.outcome())
    }

    /// Handles a yield: the primary does not run the machine unless it takes it back. Answers when the
    /// machine runs here, or when it could not be loaded.
    fn answer_yield(&self, asker: &HostName, id: ProtectionId) -> Result<StandbyOutcome, DaemonError> {
        let Some(standing) = self.standby_of(asker, id) else { return self.protections.outcome(id) };
        let action = {
            let mut rules = lock(&standing.lease);
            rules.handle_yield(standing.is_current())
        };
        standing.execute(action, TakeoverCause::Yielded)?;
        if action == StandbyLeaseAction::Load
            && standing.outcome() == StandbyOutcome::TakenOver
            && let Some(witness) = standing.witness.clone()
        {
            // Only informs the witness, which no longer decides.
            let tell = move || {
                let _ = witness.ask(&WitnessQuery::TakeOver { yielded: true }, RETENTION / 100);
            };
            drop(std::thread::Builder::new().name("tell-witness".into()).spawn(tell));
        }
        // Waits for the takeover in progress, which may still fail.
        drop(lock(&standing.receiver));
        Ok(standing.outcome())
    }
}

impl HostedStandby {
    /// Whether messages of this host are accepted.
    fn accepts(&self, asker: &HostName) -> bool {
        let is_primary = self.primary == *asker;
        if !is_primary && self.seeder.as_ref() != Some(asker) {
            return false;
        }
        let mut voice = lock(&self.accepted_primary);
        let (next, hears) = voice.accept(is_primary);
        *voice = next;
        hears
    }

    fn is_current(&self) -> bool {
        self.committed.epoch().0.is_some()
    }

    fn outcome(&self) -> StandbyOutcome {
        lock(&self.lease).outcome()
    }

    /// Clears the committed epoch before seeding starts again, unless a takeover is about to use it.
    fn seeding_restarts(&self) -> Result<(), StandbyError> {
        let rules = lock(&self.lease);
        if rules.outcome() != StandbyOutcome::Standing {
            return Err(StandbyError::Ended);
        }
        self.committed.clear();
        Ok(())
    }

    /// Whether the waiting QEMU is alive, as far as is known.
    fn is_alive(&self) -> bool {
        match self.receiver.try_lock() {
            Ok(receiver) => receiver.as_ref().is_none_or(EpochReceiver::is_alive),
            Err(TryLockError::Poisoned(receiver)) => {
                receiver.get_ref().as_ref().is_none_or(EpochReceiver::is_alive)
            }
            // In use, so it is checked again soon.
            Err(TryLockError::WouldBlock) => true,
        }
    }

    pub(in crate::protect) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(in crate::protect) fn host(&self) -> &Arc<Daemon> {
        &self.host
    }

    pub(in crate::protect) fn primary(&self) -> &HostName {
        &self.primary
    }

    /// Calls `work` with the receiver, unless another protection has it.
    pub(in crate::protect) fn with_own_receiver<T>(
        &self,
        work: impl FnOnce(&mut EpochReceiver) -> T,
    ) -> Option<T> {
        lock(&self.receiver).as_mut().map(work)
    }

    pub(in crate::protect) fn id(&self) -> ProtectionId {
        self.id
    }

    pub(in crate::protect) fn name(&self) -> &MachineName {
        &self.name
    }

    pub(in crate::protect) fn is_of(&self, from: &HostName, handover: HandoverId) -> bool {
        self.primary == *from && self.handover == handover
    }

    /// Releases the pages to the next protection, if it is of the same machine and this one can no longer
    /// take over.
    fn release(
        &self,
        arrays: &[u64],
        begin: &StartRequest,
    ) -> Option<(EpochReceiver, Option<LastEpochCapsule>)> {
        let mut receiver = lock(&self.receiver);
        let ended = {
            let mut rules = lock(&self.lease);
            rules.end(true);
            rules.outcome() == StandbyOutcome::Ended
        };
        let fits = receiver.as_ref().is_some_and(|receiver| {
            let same = receiver.shape() == (arrays, begin.offer.handover) && self.name == begin.offer.name;
            same && receiver.is_alive()
        });
        if !ended || !fits {
            drop(receiver);
            if ended {
                self.discard();
            }
            return None;
        }
        self.over.store(true, Ordering::SeqCst);
        self.host.protections.remove_standby(self.id);
        self.host.protections.remove_record(self.id);
        let last = self.capsules.as_ref().and_then(EpochCapsuleWriter::take_last);
        receiver.take().map(|receiver| (receiver, last))
    }

    pub(in crate::protect) fn discard(&self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(mut receiver) = lock(&self.receiver).take() {
            receiver.discard();
        }
        self.host.protections.remove_standby(self.id);
        self.host.protections.remove_record(self.id);
    }

    /// Carries out what the rules demand, and what follows from that: the only place that does.
    fn execute(&self, mut action: StandbyLeaseAction, cause: TakeoverCause) -> Result<(), DaemonError> {
        let mut takeover = Takeover::new(self, cause);
        loop {
            action = match action {
                StandbyLeaseAction::Nothing => return Ok(()),
                StandbyLeaseAction::AskWitness => self.ask_witness(),
                StandbyLeaseAction::Load => takeover.load(),
                StandbyLeaseAction::Record => takeover.record()?,
                StandbyLeaseAction::Run => return takeover.run(),
                StandbyLeaseAction::Retain => {
                    tracing::info!(machine = %self.name, from = %self.primary, "a protection has ended; its pages are retained for a while");
                    return Ok(());
                }
                StandbyLeaseAction::Discard => {
                    tracing::info!(machine = %self.name, from = %self.primary, "a protection has ended");
                    self.discard();
                    return Ok(());
                }
            }
        }
    }

    /// Watches the clock and QEMU until the protection is over.
    fn watch(&self) {
        let mut ended_at = None;
        while !self.over.load(Ordering::SeqCst) {
            let (now, alive) = (BootTime::now(), self.is_alive());
            let (action, outcome, wakes) = {
                let mut rules = lock(&self.lease);
                let current = self.is_current();
                let silent = !current && now > rules.wakes().after(RETENTION);
                let lost = if silent || !alive { rules.lose() } else { StandbyLeaseAction::Nothing };
                let action =
                    if lost == StandbyLeaseAction::Nothing { rules.tick(current, now) } else { lost };
                (action, rules.outcome(), rules.wakes())
            };
            if action == StandbyLeaseAction::Retain {
                tracing::error!(machine = %self.name, from = %self.primary, alive, "the standby of a machine has ended here");
            }
            // A takeover that failed is logged by itself.
            drop(self.execute(action, TakeoverCause::Silent));
            match outcome {
                StandbyOutcome::Ended
                    if !alive || ended_at.get_or_insert_with(Instant::now).elapsed() > RETENTION =>
                {
                    self.discard()
                }
                StandbyOutcome::Standing
                | StandbyOutcome::Asking
                | StandbyOutcome::TakenOver
                | StandbyOutcome::Ended => {}
            }
            let pause = now.until(wakes).clamp(Duration::from_millis(2), self.term / 8);
            if !self.host.sleep_unless_closing(pause.min(Duration::from_millis(50))) {
                return;
            }
        }
    }

    /// Keeps the witness's connection open, so that the urgent query is answered at once.
    fn keep_connected(&self) {
        let Some(witness) = &self.witness else { return };
        while !self.over.load(Ordering::SeqCst) {
            let pause = witness.prepare();
            if !self.host.sleep_unless_closing(pause) {
                return;
            }
        }
    }

    /// Asks the witness for the machine.
    fn ask_witness(&self) -> StandbyLeaseAction {
        let Some(witness) = &self.witness else {
            return lock(&self.lease).handle_witness_reply(None, BootTime::now());
        };
        tracing::warn!(machine = %self.name, primary = %self.primary, witness = %witness.name(), "the primary is silent, asking the witness");
        let patience = self.term.max(Duration::from_millis(200));
        let verdict: Option<WitnessReply> = witness.ask(&WitnessQuery::TakeOver { yielded: false }, patience);
        if verdict == Some(WitnessReply::Closed) {
            tracing::info!(machine = %self.name, "the witness has decided for the primary, which continues alone");
        }
        lock(&self.lease).handle_witness_reply(verdict, BootTime::now())
    }

    /// Handles a failover that a person requested here.
    pub(in crate::protect) fn failover(&self) -> Result<(), DaemonError> {
        let action = {
            let mut rules = lock(&self.lease);
            rules.failover(self.is_current(), BootTime::now())
        };
        self.execute(action, TakeoverCause::ByHand)?;
        let failure = lock(&self.failure).clone();
        match (self.outcome(), failure) {
            (StandbyOutcome::TakenOver, _) => Ok(()),
            (_, Some(failure)) => Err(DaemonError::invalid(format!(
                "{} cannot be loaded here; its copy is kept, and loaded again soon: {failure}",
                self.name
            ))),
            (_, None) => Err(DaemonError::invalid(format!(
                "{} is not taken over: {} is alive, or its lease is still valid, or no epoch is complete here yet",
                self.name, self.primary
            ))),
        }
    }

    /// Whether the primary lives: it has sent a heartbeat within the term, or its daemon answers now.
    pub(in crate::protect) fn hears_primary(&self) -> bool {
        lock(&self.lease).hears_primary(BootTime::now())
            || ControlLink::new(&self.host, &self.primary).preconnect()
    }

    pub(in crate::protect) fn has_witness(&self) -> bool {
        self.witness.is_some()
    }

    /// The information for users.
    pub(in crate::protect) fn info(&self) -> ProtectionInfo {
        let (epoch, at) = self.committed.epoch();
        let state = match (self.outcome(), lock(&self.failure).clone(), epoch) {
            (StandbyOutcome::Ended, _, _) => {
                ProtectState::Unprotected { reason: "the primary continues alone".to_owned() }
            }
            (_, Some(failure), _) => ProtectState::Fenced {
                reason: format!("it cannot be loaded here, its copy is kept: {failure}"),
            },
            (_, None, None) => ProtectState::Seeding,
            (_, None, Some(_)) => ProtectState::Protected,
        };
        ProtectionInfo {
            spares: Vec::new(),
            role: ProtectRole::Standby,
            host: self.primary.clone(),
            witness: self.witness.as_ref().map(|witness| witness.name().clone()),
            witness_answers: None,
            group: None,
            mode: if lock(&self.inputs).is_used() { ProtectMode::Replay } else { ProtectMode::Epoch },
            state,
            epoch: epoch.unwrap_or(0),
            figures: None,
            lag_ms: at.elapsed().as_millis() as u64,
        }
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, DaemonError> {
    postcard::from_bytes(header)
        .map_err(|error| DaemonError::invalid(format!("cannot decode the message header: {error}")))
}

fn encoded(reply: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(reply).expect("a reply is always encodable")
}

pub(in crate::protect) fn unknown(id: ProtectionId) -> DaemonError {
    DaemonError::NotFound { what: "protection", name: id.to_string() }
}

pub(in crate::protect) fn standby_error(error: StandbyError) -> DaemonError {
    DaemonError::Protect { source: error.into() }
}
