//! The standby's side on this host: machines that wait here to be taken over.
//!
//! Pages go to a [`EpochReceiver`], who may run to a [`lease::StandbyLease`]; this file answers messages with
//! both and does what the rules say: asks the witness when the primary is silent, writes down that the
//! machine is this host's, runs it. One thread a standby watches the clock, and whether the QEMU that waits
//! is still there.
//!
//! Locks are taken in the order receiver, rules, current. Whether there is something to take over from is
//! read, and cleared, with the rules in hand: nobody decides to take over what is about to be of no one
//! instant.

use super::epoch_capsules::{EpochCapsuleWriter, LastEpochCapsule};
use crate::protect::standby::page_sharing::SiblingStandbys;
use crate::protect::takeover::run::TakeoverCause;
use crate::protect::{settings::ProtectionSettings, witness::client::WitnessClient};
use crate::{core::error::DaemonError, daemon::Daemon};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_api::{ProtectMode, ProtectRole, ProtectState, ProtectionInfo};
use whimbrel_core::{HostName, MachineName, WitnessAddress};
use whimbrel_migrate::{
    compatibility::Incompatibility,
    protocol::{Accepted, HandoverId, Offered},
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

/// How long the pages of a protection that ended wait for the next one, and how long a first copy may be
/// silent.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// A machine that waits here.
pub(crate) struct HostedStandby {
    pub(in crate::protect) host: Arc<Daemon>,
    pub(in crate::protect) id: ProtectionId,
    pub(in crate::protect) name: MachineName,
    /// The primary: who began the protection, or whoever inherits it from that.
    pub(in crate::protect) from: HostName,
    /// Who fills it for that one.
    filler: Option<HostName>,
    voice: Mutex<AcceptedPrimary>,
    term: Duration,
    witness: Option<Arc<WitnessClient>>,
    pub(in crate::protect) handover: HandoverId,
    pub(in crate::protect) rules: Mutex<lease::StandbyLease>,
    /// None once another protection has it, or once it is gone.
    pub(in crate::protect) receiver: Mutex<Option<EpochReceiver>>,
    /// What there is to take over from.
    pub(in crate::protect) current: Arc<CommittedEpoch>,
    /// What reached the machine since, if it is protected by that. Locked last.
    pub(in crate::protect) log: Mutex<InputLog>,
    /// How the machine is to be protected here, once it is this host's.
    pub(in crate::protect) then: Option<ProtectionSettings>,
    /// If epochs are to be kept.
    keeping: Option<EpochCapsuleWriter>,
    pub(in crate::protect) over: AtomicBool,
}

impl Daemon {
    /// Answers a message of the range of protections.
    pub(crate) fn answer_protection(
        self: &Arc<Self>,
        asker: &HostName,
        kind: u16,
        header: &[u8],
        payload: Bytes,
    ) -> Result<Vec<u8>, DaemonError> {
        match kind {
            protocol::WITNESS => Ok(encoded(&self.protecting.leases.answer(asker, &parse(header)?)?)),
            protocol::START => Ok(encoded(&self.start_standby(asker, parse(header)?)?)),
            protocol::BLOB => {
                let blob: Blob = parse(header)?;
                self.with_receiver(asker, blob.id, |receiver, _| receiver.blob_piece(&blob.piece, &payload))?;
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
                        standing.is_filled_anew()?;
                    }
                    receiver.piece_among(&piece, &payload, &SiblingStandbys::new(self, asker))
                })?;
                Ok(encoded(&again))
            }
            protocol::EPOCH_END => {
                let seal: EpochEnd = parse(header)?;
                self.with_receiver(asker, seal.id, |receiver, standing| {
                    receiver.seal(seal, payload.to_vec())?;
                    standing.keeping.iter().for_each(|keeping| keeping.epoch_is_whole(receiver));
                    Ok(())
                })?;
                Ok(Vec::new())
            }
            protocol::INPUTS => {
                let inputs: InputFrames = parse(header)?;
                let standing = self.standing_of_host(asker, inputs.id).ok_or_else(|| unknown(inputs.id))?;
                Ok(encoded(&standing.keep_inputs(&inputs, &payload).map_err(standby_error)?))
            }
            protocol::HEARTBEAT => Ok(encoded(&self.answer_heartbeat(asker, parse(header)?))),
            protocol::END => Ok(encoded(&self.end_standing(asker, &parse(header)?))),
            protocol::YIELD => Ok(encoded(&self.take_yielded(asker, parse(header)?)?)),
            kind => Err(DaemonError::invalid(format!("message kind {kind:#06x} is not one of a protection"))),
        }
    }

    fn start_standby(
        self: &Arc<Self>,
        from: &HostName,
        begin: StartRequest,
    ) -> Result<StartReply, DaemonError> {
        let arrays = begin.offer.arrays.iter().map(|array| array.pages).collect::<Vec<_>>();
        let used = self.protecting.standing(begin.id).is_some();
        let keeps_too_much = begin.keep.is_some_and(|keep| keep.every_ms < 100 || keep.count > 100_000);
        if begin.offer.blobs.len() > 2 || arrays.len() > 64 || begin.lease_ms < 50 || used || keeps_too_much {
            return Err(DaemonError::invalid("an offer that no sound host would make"));
        }
        if let (Some(_), Some(source)) = (&begin.heir, begin.witness.as_ref().and_then(WitnessAddress::host))
        {
            // Who decides once the machine has moved: asked when it cannot be reached any more, it would be
            // too late.
            self.route(source)?;
        }
        let then = begin.then.as_deref().map(|text| self.next_settings(text)).transpose()?;
        // Whatever came in between: what is here by the same handover is older pages of the same machine.
        let old = self.protecting.standing_by(from, begin.offer.handover);
        let left = old.and_then(|old| old.release(&arrays, &begin));
        let has_pages = left.is_some();
        let (mut receiver, blobs_missing, last) = match left {
            Some((mut receiver, last)) => {
                receiver.restart();
                (receiver, Vec::new(), last)
            }
            None => {
                let reserved =
                    crate::migrate::target::incoming::DaemonTarget::new(self).reserve(&begin.offer);
                let arrival = match reserved.map_err(|error| error.downcast::<Incompatibility>()) {
                    Ok(arrival) => arrival,
                    Err(Ok(misfit)) => {
                        return Ok(StartReply { offered: Offered::Misfit(*misfit), has_pages });
                    }
                    Err(Err(source)) => {
                        return Err(DaemonError::Qemu { action: "make room for a standby", source });
                    }
                };
                let missing = arrival.blobs_missing();
                let receiver =
                    EpochReceiver::new(arrival, arrays, begin.offer.blobs.clone(), begin.offer.handover);
                (receiver.map_err(standby_error)?, missing, None)
            }
        };
        let first = receiver.wants_snapshot(begin.keep.is_some(), !has_pages);
        let keeping =
            begin.keep.map(|rule| EpochCapsuleWriter::new(rule, &begin.offer, last.filter(|_| !first)));
        let (term, current) = (Duration::from_millis(begin.lease_ms.into()), receiver.current());
        let arbiter = |witness| Arc::new(WitnessClient::new(self, witness, begin.id, term));
        let standing = Arc::new(HostedStandby {
            host: self.clone(),
            id: begin.id,
            name: begin.offer.name.clone(),
            from: begin.heir.clone().unwrap_or_else(|| from.clone()),
            filler: begin.heir.is_some().then(|| from.clone()),
            voice: Mutex::new(AcceptedPrimary::Filler),
            term,
            witness: begin.witness.as_ref().map(arbiter),
            handover: begin.offer.handover,
            rules: Mutex::new(lease::StandbyLease::initial(begin.witness.is_some(), term, BootTime::now())),
            receiver: Mutex::new(Some(receiver)),
            current,
            log: Mutex::default(),
            then,
            keeping,
            over: AtomicBool::new(false),
        });
        self.protecting.insert(standing.clone());
        self.start_work(&standing)?;
        Ok(StartReply {
            offered: Offered::Accepted(Accepted { blobs_missing, begun_as: Vec::new() }),
            has_pages,
        })
    }

    fn start_work(&self, standing: &Arc<HostedStandby>) -> Result<(), DaemonError> {
        let its = || standing.clone();
        let (watched, line, kept) = (its(), its(), its());
        self.start_thread("standby", move || watched.watch())?;
        self.start_thread("witness-line", move || line.keep_line())?;
        if standing.keeping.is_some() {
            let keep = move || kept.keeping.iter().for_each(|keeping| keeping.work(&kept));
            self.start_thread("keep-epochs", keep)?;
        }
        Ok(())
    }

    fn start_thread(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), DaemonError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        thread.map(drop).map_err(|source| DaemonError::io("start a thread for", self.layout.data(), source))
    }

    /// How this host is to protect a machine that it has taken over. Known to be possible before there is
    /// anything to take over.
    fn next_settings(&self, text: &str) -> Result<ProtectionSettings, DaemonError> {
        let garbage =
            |error| DaemonError::invalid(format!("what comes after a takeover cannot be read: {error}"));
        let settings = ProtectionSettings::of(&serde_json::from_str(text).map_err(garbage)?)?;
        self.route(&settings.request.host)?;
        Ok(settings)
    }

    /// The protection of this id, if it is one of a machine of `asker`.
    pub(in crate::protect) fn standing_of_host(
        &self,
        asker: &HostName,
        id: ProtectionId,
    ) -> Option<Arc<HostedStandby>> {
        self.protecting.standing(id).filter(|standing| standing.accepts(asker))
    }

    fn with_receiver<T>(
        &self,
        asker: &HostName,
        id: ProtectionId,
        work: impl FnOnce(&mut EpochReceiver, &HostedStandby) -> Result<T, StandbyError>,
    ) -> Result<T, DaemonError> {
        let standing = self.standing_of_host(asker, id).ok_or_else(|| unknown(id))?;
        let mut receiver = lock(&standing.receiver);
        // Looked at with the receiver in hand: whoever takes over needs it too.
        if lock(&standing.rules).fate() != StandbyOutcome::Standing {
            return Err(standby_error(StandbyError::NotFollowing));
        }
        let receiver = receiver.as_mut().ok_or_else(|| unknown(id))?;
        work(receiver, &standing).map_err(standby_error)
    }

    fn answer_heartbeat(&self, asker: &HostName, id: ProtectionId) -> HeartbeatReply {
        match self.standing_of_host(asker, id) {
            Some(standing) => lock(&standing.rules).heartbeat(BootTime::now()),
            None => HeartbeatReply::NoPromise(self.protecting.fate(id)),
        }
    }

    fn end_standing(&self, asker: &HostName, end: &EndProtection) -> StandbyOutcome {
        let Some(standing) = self.standing_of_host(asker, end.id) else {
            return self.protecting.fate(end.id);
        };
        let action = lock(&standing.rules).end();
        let fate = lock(&standing.rules).fate();
        if action == StandbyLeaseAction::Discard || fate == StandbyOutcome::Ended {
            tracing::info!(machine = %standing.name, from = %standing.from, keep = end.keep, "a protection has ended");
            if !end.keep {
                standing.discard();
            }
        }
        fate
    }

    /// The primary never runs the machine again. Answers when it runs here, or when it has turned out that it
    /// cannot.
    fn take_yielded(&self, asker: &HostName, id: ProtectionId) -> Result<StandbyOutcome, DaemonError> {
        let Some(standing) = self.standing_of_host(asker, id) else { return Ok(self.protecting.fate(id)) };
        let action = {
            let mut rules = lock(&standing.rules);
            rules.yielded(standing.is_current())
        };
        if action == StandbyLeaseAction::TakeOver {
            standing.take_over(TakeoverCause::Yielded)?;
            if let Some(witness) =
                standing.witness.clone().filter(|_| standing.fate() == StandbyOutcome::TakenOver)
            {
                // It decides nothing any more; the witness only has it right.
                let tell = move || {
                    let _ = witness.ask(&WitnessQuery::TakeOver { yielded: true }, KEPT_FOR / 100);
                };
                drop(std::thread::Builder::new().name("tell-witness".into()).spawn(tell));
            }
        }
        // Not before whoever takes over is done: until then it may still turn out that it cannot.
        drop(lock(&standing.receiver));
        Ok(standing.fate())
    }
}

impl HostedStandby {
    /// Whether a host is listened to.
    fn accepts(&self, asker: &HostName) -> bool {
        let is_primary = self.from == *asker;
        if !is_primary && self.filler.as_ref() != Some(asker) {
            return false;
        }
        let mut voice = lock(&self.voice);
        let (next, hears) = voice.accept(is_primary);
        *voice = next;
        hears
    }

    fn is_current(&self) -> bool {
        self.current.epoch().0.is_some()
    }

    fn fate(&self) -> StandbyOutcome {
        lock(&self.rules).fate()
    }

    /// A copy that is no epoch begins. Not if somebody is about to take over what it would be written into.
    fn is_filled_anew(&self) -> Result<(), StandbyError> {
        let rules = lock(&self.rules);
        if rules.fate() != StandbyOutcome::Standing {
            return Err(StandbyError::NotFollowing);
        }
        self.current.clear();
        Ok(())
    }

    /// Whether the QEMU that waits is still there, as far as that can be told now.
    fn is_alive(&self) -> bool {
        match self.receiver.try_lock() {
            Ok(receiver) => receiver.as_ref().is_none_or(EpochReceiver::is_alive),
            Err(TryLockError::Poisoned(receiver)) => {
                receiver.get_ref().as_ref().is_none_or(EpochReceiver::is_alive)
            }
            // It is at work, and looked at again soon.
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
        &self.from
    }

    /// What it receives into; none once it is no longer this one's.
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
        self.from == *from && self.handover == handover
    }

    /// Gives its pages to the protection that follows, if it is of the same machine and this one cannot take
    /// over any more.
    fn release(
        &self,
        arrays: &[u64],
        begin: &StartRequest,
    ) -> Option<(EpochReceiver, Option<LastEpochCapsule>)> {
        let mut receiver = lock(&self.receiver);
        let ended = {
            let mut rules = lock(&self.rules);
            rules.end();
            rules.fate() == StandbyOutcome::Ended
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
        self.host.protecting.leave(self.id);
        let last = self.keeping.as_ref().and_then(EpochCapsuleWriter::take_last);
        receiver.take().map(|receiver| (receiver, last))
    }

    pub(in crate::protect) fn discard(&self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(mut receiver) = lock(&self.receiver).take() {
            receiver.discard();
        }
        self.host.protecting.leave(self.id);
    }

    /// Watches the clock until the protection is over.
    fn watch(&self) {
        let mut ended_at = None;
        while !self.over.load(Ordering::SeqCst) {
            let (now, alive) = (BootTime::now(), self.is_alive());
            let (action, fate, wakes) = {
                let mut rules = lock(&self.rules);
                let current = self.is_current();
                let silent = !current && now > rules.wakes().after(KEPT_FOR);
                if (silent || !alive) && rules.end() == StandbyLeaseAction::Discard {
                    tracing::error!(machine = %self.name, from = %self.from, alive, "nobody stands by for it here any more");
                }
                (rules.tick(current, now), rules.fate(), rules.wakes())
            };
            match (action, fate) {
                (StandbyLeaseAction::AskWitness, _) => self.ask_witness(),
                (_, StandbyOutcome::TakenOver) => return,
                (_, StandbyOutcome::Ended) if !alive => self.discard(),
                (_, StandbyOutcome::Ended)
                    if ended_at.get_or_insert_with(Instant::now).elapsed() > KEPT_FOR =>
                {
                    self.discard()
                }
                _ => {}
            }
            let pause = now.until(wakes).clamp(Duration::from_millis(2), self.term / 8);
            if !self.host.sleep_unless_closing(pause.min(Duration::from_millis(50))) {
                return;
            }
        }
    }

    /// Keeps the one question that is urgent from being a long one.
    fn keep_line(&self) {
        let Some(witness) = &self.witness else { return };
        while !self.over.load(Ordering::SeqCst) {
            let pause = witness.look_after();
            if !self.host.sleep_unless_closing(pause) {
                return;
            }
        }
    }

    /// Asks the witness whether the machine is this host's, and does what follows.
    fn ask_witness(&self) {
        let Some(witness) = &self.witness else { return };
        tracing::warn!(machine = %self.name, primary = %self.from, witness = %witness.name(), "the primary is silent, asking the witness");
        let patience = self.term.max(Duration::from_millis(200));
        let verdict: Option<WitnessReply> = witness.ask(&WitnessQuery::TakeOver { yielded: false }, patience);
        let action = lock(&self.rules).witness_said(verdict, BootTime::now());
        match action {
            // It has logged why it could not.
            StandbyLeaseAction::TakeOver => drop(self.take_over(TakeoverCause::Silent)),
            StandbyLeaseAction::Discard => {
                tracing::info!(machine = %self.name, "the primary goes on alone, says the witness");
            }
            StandbyLeaseAction::Nothing | StandbyLeaseAction::AskWitness => {}
        }
    }

    /// A person wants the machine here.
    pub(in crate::protect) fn by_hand(&self) -> Result<(), DaemonError> {
        let action = {
            let mut rules = lock(&self.rules);
            rules.by_hand(self.is_current(), BootTime::now())
        };
        match action {
            StandbyLeaseAction::TakeOver => self.take_over(TakeoverCause::ByHand)?,
            StandbyLeaseAction::AskWitness => self.ask_witness(),
            StandbyLeaseAction::Nothing | StandbyLeaseAction::Discard => {}
        }
        match self.fate() {
            StandbyOutcome::TakenOver => Ok(()),
            _ => Err(DaemonError::invalid(format!(
                "{} is not taken over: {} lives, or its lease still runs, or nothing of it is whole here yet",
                self.name, self.from
            ))),
        }
    }

    pub(in crate::protect) fn has_witness(&self) -> bool {
        self.witness.is_some()
    }

    /// What is told about it.
    pub(in crate::protect) fn info(&self) -> ProtectionInfo {
        let (epoch, at) = self.current.epoch();
        let state = match (self.fate(), epoch) {
            (StandbyOutcome::Ended, _) => {
                ProtectState::Unprotected { reason: "its host goes on alone".to_owned() }
            }
            (_, None) => ProtectState::Filling,
            (_, Some(_)) => ProtectState::Protected,
        };
        ProtectionInfo {
            role: ProtectRole::Standby,
            host: self.from.clone(),
            witness: self.witness.as_ref().map(|witness| witness.name().clone()),
            witness_answers: None,
            group: None,
            mode: if lock(&self.log).is_used() { ProtectMode::Replay } else { ProtectMode::Epoch },
            state,
            epoch: epoch.unwrap_or(0),
            figures: None,
            lag_ms: at.elapsed().as_millis() as u64,
        }
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, DaemonError> {
    postcard::from_bytes(header)
        .map_err(|error| DaemonError::invalid(format!("the message header cannot be read: {error}")))
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

pub(in crate::protect) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
