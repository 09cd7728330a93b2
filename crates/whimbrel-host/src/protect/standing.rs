//! The standby's side on this host: machines that wait here to be taken over.
//!
//! Pages go to a [`Receiver`], who may run to a [`lease::Standby`]; this file answers messages with both and does what the rules
//! say: asks the witness when the primary is silent, writes down that the machine is this host's, runs it. One thread a
//! standby watches the clock.

use super::{
    link::Line,
    notes::{Note, Side},
};
use crate::{error::HostError, host::Host};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_api::{ProtectRole, ProtectState, ProtectionInfo};
use whimbrel_core::{HostName, MachineName};
use whimbrel_migrate::{
    fit::Misfit,
    protocol::{Accepted, HandoverId, Offered},
    target::Landing,
};
use whimbrel_protect::{
    StandbyError,
    clock::Moment,
    lease::{self, Question, StandbyAction, Verdict},
    protocol::{self, Again, Begin, Begun, Blob, Compare, End, Fate, Heard, Piece, ProtectionId, Seal},
    standby::Receiver,
};

/// How long the pages of a protection that ended wait for the next one.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// A machine that waits here.
pub(crate) struct Standing {
    host: Arc<Host>,
    id: ProtectionId,
    name: MachineName,
    from: HostName,
    term: Duration,
    witness: Option<Arc<Line>>,
    handover: HandoverId,
    rules: Mutex<lease::Standby>,
    /// None once another protection has it, or once it is gone.
    receiver: Mutex<Option<Receiver>>,
    committed: Mutex<Committed>,
    over: AtomicBool,
}

/// The last epoch, apart from the receiver, which may be at work.
#[derive(Clone, Copy)]
struct Committed {
    epoch: Option<u64>,
    at: Instant,
}

impl Host {
    /// Answers a message of the range of protections.
    pub(crate) fn answer_protection(
        self: &Arc<Self>,
        asker: &HostName,
        kind: u16,
        header: &[u8],
        payload: Bytes,
    ) -> Result<Vec<u8>, HostError> {
        match kind {
            protocol::WITNESS => Ok(encoded(&self.protecting.leases.answer(asker, &parse(header)?)?)),
            protocol::BEGIN => Ok(encoded(&self.begin_standing(asker, parse(header)?)?)),
            protocol::BLOB => {
                let blob: Blob = parse(header)?;
                self.with_receiver(blob.id, |receiver, _| receiver.blob_piece(&blob.piece, &payload))?;
                Ok(Vec::new())
            }
            protocol::COMPARE => {
                let asked: Compare = parse(header)?;
                Ok(encoded(&self.with_receiver(asked.id, |receiver, _| receiver.compare(&asked, &payload))?))
            }
            protocol::PIECE => {
                let piece: Piece = parse(header)?;
                let again: Again =
                    self.with_receiver(piece.id, |receiver, _| receiver.piece(&piece, &payload))?;
                Ok(encoded(&again))
            }
            protocol::SEAL => {
                let seal: Seal = parse(header)?;
                self.with_receiver(seal.id, |receiver, standing| {
                    receiver.seal(seal, payload.to_vec())?;
                    *lock(&standing.committed) =
                        Committed { epoch: receiver.committed(), at: Instant::now() };
                    Ok(())
                })?;
                Ok(Vec::new())
            }
            protocol::HEARTBEAT => Ok(encoded(&self.hear_beat(parse(header)?))),
            protocol::END => Ok(encoded(&self.end_standing(&parse(header)?))),
            protocol::YIELD => Ok(encoded(&self.take_yielded(parse(header)?)?)),
            kind => Err(HostError::invalid(format!("message kind {kind:#06x} is not one of a protection"))),
        }
    }

    fn begin_standing(self: &Arc<Self>, from: &HostName, begin: Begin) -> Result<Begun, HostError> {
        let arrays = begin.offer.arrays.iter().map(|array| array.pages).collect::<Vec<_>>();
        if begin.offer.blobs.len() > 2 || arrays.len() > 64 || begin.lease_ms < 50 {
            return Err(HostError::invalid("an offer that no sound host would make"));
        }
        let old = begin.after.and_then(|after| self.protecting.standing(after));
        let kept = old.and_then(|old| old.let_go(&arrays, &begin));
        let has_pages = kept.is_some();
        let (receiver, blobs_missing) = match kept {
            Some(mut receiver) => {
                receiver.begin_again();
                (receiver, Vec::new())
            }
            None => {
                let reserved = crate::landing::HostLanding::new(self).reserve(&begin.offer);
                let arrival = match reserved.map_err(|error| error.downcast::<Misfit>()) {
                    Ok(arrival) => arrival,
                    Err(Ok(misfit)) => return Ok(Begun { offered: Offered::Misfit(*misfit), has_pages }),
                    Err(Err(source)) => {
                        return Err(HostError::Qemu { action: "make room for a standby", source });
                    }
                };
                let missing = arrival.blobs_missing();
                let receiver =
                    Receiver::new(arrival, arrays, begin.offer.blobs.clone(), begin.offer.handover);
                (receiver.map_err(standby_error)?, missing)
            }
        };
        let term = Duration::from_millis(begin.lease_ms.into());
        let standing = Arc::new(Standing {
            host: self.clone(),
            id: begin.id,
            name: begin.offer.name.clone(),
            from: from.clone(),
            term,
            witness: begin.witness.as_ref().map(|witness| Arc::new(Line::new(self, witness))),
            handover: begin.offer.handover,
            rules: Mutex::new(lease::Standby::begin(begin.witness.is_some(), term, Moment::now())),
            receiver: Mutex::new(Some(receiver)),
            committed: Mutex::new(Committed { epoch: None, at: Instant::now() }),
            over: AtomicBool::new(false),
        });
        self.protecting.enter(standing.clone());
        let watch = move || standing.watch();
        let thread = std::thread::Builder::new().name("standby".into()).spawn(watch);
        thread.map_err(|source| HostError::io("start a thread for", self.layout.data(), source))?;
        Ok(Begun { offered: Offered::Accepted(Accepted { blobs_missing, begun_as: Vec::new() }), has_pages })
    }

    fn with_receiver<T>(
        &self,
        id: ProtectionId,
        work: impl FnOnce(&mut Receiver, &Standing) -> Result<T, StandbyError>,
    ) -> Result<T, HostError> {
        let standing = self.protecting.standing(id).ok_or_else(|| unknown(id))?;
        let mut receiver = lock(&standing.receiver);
        // Looked at with the receiver in hand: whoever takes over needs it too.
        if lock(&standing.rules).fate() != Fate::Standing {
            return Err(standby_error(StandbyError::NotFollowing));
        }
        let receiver = receiver.as_mut().ok_or_else(|| unknown(id))?;
        work(receiver, &standing).map_err(standby_error)
    }

    fn hear_beat(&self, id: ProtectionId) -> Heard {
        match self.protecting.standing(id) {
            Some(standing) => lock(&standing.rules).heartbeat(Moment::now()),
            None => Heard::NoPromise(self.protecting.fate(id)),
        }
    }

    fn end_standing(&self, end: &End) -> Fate {
        let Some(standing) = self.protecting.standing(end.id) else { return self.protecting.fate(end.id) };
        let action = lock(&standing.rules).end();
        let fate = lock(&standing.rules).fate();
        if action == StandbyAction::Discard || fate == Fate::Ended {
            tracing::info!(machine = %standing.name, from = %standing.from, keep = end.keep, "a protection has ended");
            if !end.keep {
                standing.discard();
            }
        }
        fate
    }

    /// The primary never runs the machine again. Answers when it runs here.
    fn take_yielded(&self, id: ProtectionId) -> Result<Fate, HostError> {
        let Some(standing) = self.protecting.standing(id) else { return Ok(self.protecting.fate(id)) };
        let action = lock(&standing.rules).yielded(standing.is_current());
        if action == StandbyAction::TakeOver {
            standing.take_over("its host gave it up")?;
            if let Some(witness) = standing.witness.clone() {
                // It decides nothing any more; the witness only has it right.
                let tell = move || {
                    let _ = witness.witness(id, &Question::Take { yielded: true }, KEPT_FOR / 100);
                };
                drop(std::thread::Builder::new().name("tell-witness".into()).spawn(tell));
            }
        }
        Ok(lock(&standing.rules).fate())
    }
}

impl Standing {
    fn is_current(&self) -> bool {
        lock(&self.committed).epoch.is_some()
    }

    pub(super) fn id(&self) -> ProtectionId {
        self.id
    }

    pub(super) fn name(&self) -> &MachineName {
        &self.name
    }

    /// Gives its pages to the protection that follows, if it is of the same machine and this one cannot take over any more.
    fn let_go(&self, arrays: &[u64], begin: &Begin) -> Option<Receiver> {
        let mut receiver = lock(&self.receiver);
        let mut rules = lock(&self.rules);
        rules.end();
        let fits = receiver.as_ref().is_some_and(|receiver| {
            receiver.shape() == (arrays, begin.offer.handover) && self.name == begin.offer.name
        });
        if rules.fate() != Fate::Ended || !fits {
            return None;
        }
        self.over.store(true, Ordering::SeqCst);
        self.host.protecting.leave(self.id);
        receiver.take()
    }

    fn discard(&self) {
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
            let now = Moment::now();
            let current = self.is_current();
            let action = lock(&self.rules).tick(current, now);
            let (fate, wakes) = {
                let rules = lock(&self.rules);
                (rules.fate(), rules.wakes())
            };
            match (action, fate) {
                (StandbyAction::AskWitness, _) => drop(self.ask_witness()),
                (_, Fate::TakenOver) => return,
                (_, Fate::Ended) if ended_at.get_or_insert_with(Instant::now).elapsed() > KEPT_FOR => {
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

    /// Asks the witness whether the machine is this host's, and does what follows.
    fn ask_witness(&self) -> Result<(), HostError> {
        let Some(witness) = &self.witness else { return Ok(()) };
        tracing::warn!(machine = %self.name, primary = %self.from, witness = %witness.to(), "the primary is silent, asking the witness");
        let patience = self.term.max(Duration::from_millis(200));
        let verdict: Option<Verdict> = witness.witness(self.id, &Question::Take { yielded: false }, patience);
        let action = lock(&self.rules).witness_said(verdict, Moment::now());
        match action {
            StandbyAction::TakeOver => self.take_over("its host is silent and its lease has run out"),
            StandbyAction::Discard => {
                tracing::info!(machine = %self.name, "the primary goes on alone, says the witness");
                Ok(())
            }
            StandbyAction::Nothing | StandbyAction::AskWitness => Ok(()),
        }
    }

    /// A person wants the machine here.
    pub(super) fn by_hand(&self) -> Result<(), HostError> {
        let action = lock(&self.rules).by_hand(self.is_current(), Moment::now());
        match action {
            StandbyAction::TakeOver => self.take_over("a person said that its host is dead")?,
            StandbyAction::AskWitness => self.ask_witness()?,
            StandbyAction::Nothing | StandbyAction::Discard => {}
        }
        let fate = lock(&self.rules).fate();
        match fate {
            Fate::TakenOver => Ok(()),
            _ => Err(HostError::invalid(format!(
                "{} is not taken over: {} lives, or its lease still runs, or nothing of it is whole here yet",
                self.name, self.from
            ))),
        }
    }

    pub(super) fn has_witness(&self) -> bool {
        self.witness.is_some()
    }

    /// The machine is this host's. Written down first, run second.
    fn take_over(&self, why: &str) -> Result<(), HostError> {
        let begun = Instant::now();
        let mut receiver = lock(&self.receiver);
        let receiver = receiver.as_mut().ok_or_else(|| unknown(self.id))?;
        let loaded = receiver.take_over();
        let loaded_ms = begun.elapsed().as_secs_f64() * 1e3;
        let side = Side::TookOver { from: self.from.clone(), at_ms: crate::now_ms() };
        let noted = self.host.protecting.take_note(Note::new(self.id, &self.name, self.handover, side));
        self.host.arrivals().adopt_arrived(self.handover);
        let run = noted
            .and_then(|()| loaded.map_err(standby_error))
            .and_then(|()| receiver.run().map_err(standby_error));
        self.over.store(true, Ordering::SeqCst);
        self.host.protecting.leave(self.id);
        match &run {
            Ok(()) => {
                let total_ms = begun.elapsed().as_secs_f64() * 1e3;
                tracing::warn!(machine = %self.name, from = %self.from, why, loaded_ms, total_ms, "took a machine over");
            }
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::error!(machine = %self.name, from = %self.from, why, error, "a machine that is this host's does not run");
            }
        }
        run
    }

    /// What is told about it.
    pub(super) fn info(&self) -> ProtectionInfo {
        let Committed { epoch, at } = *lock(&self.committed);
        let fate = lock(&self.rules).fate();
        let state = match (fate, epoch) {
            (Fate::Ended, _) => ProtectState::Unprotected { reason: "its host goes on alone".to_owned() },
            (_, None) => ProtectState::Filling,
            (_, Some(_)) => ProtectState::Protected,
        };
        ProtectionInfo {
            role: ProtectRole::Standby,
            host: self.from.clone(),
            witness: self.witness.as_ref().map(|line| line.to().clone()),
            witness_answers: None,
            state,
            epoch: epoch.unwrap_or(0),
            figures: None,
            lag_ms: at.elapsed().as_millis() as u64,
        }
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, HostError> {
    postcard::from_bytes(header)
        .map_err(|error| HostError::invalid(format!("the message header cannot be read: {error}")))
}

fn encoded(reply: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(reply).expect("a reply is always encodable")
}

fn unknown(id: ProtectionId) -> HostError {
    HostError::NotFound { what: "protection", name: id.to_string() }
}

fn standby_error(error: StandbyError) -> HostError {
    HostError::Protect { source: error.into() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
