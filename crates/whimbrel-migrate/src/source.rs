//! The sending side: offer, rounds, handover.
//!
//! The order of things is that of [`crate::handover::Source`]; this file does what its actions say. A failure
//! before the commit point returns a [`MigrateError`] with the machine running here and nothing
//! forgotten. After the commit point there is no failure: [`confirm`] repeats the commit until the target
//! answers, over new connections where needed, or until it is told to stop and leave that to a later call.

use crate::{
    base::{ArrayBase, BegunAs, MayDiffer},
    fit::Misfit,
    handover::{Source, SourceAction, SourceEvent},
    link::{self, Link, LinkError},
    postcopy::leave::Leaving,
    protocol::{self, Accepted, BlobPiece, Finish, HandoverId, Offer, Offered},
    sender::Pipeline,
};
use bytes::Bytes;
use std::{
    error::Error,
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};
use whimbrel_capture::{
    CaptureError, Captured, Finish as CaptureFinish, Follower, Ledger, Phase, Policy, Progress, RoundStats,
    StopReason, Subject, capture,
};
use whimbrel_core::{Digest, PageSet};

/// A machine to be moved and where to.
pub struct Move<'a, 's> {
    /// The machine and its arrays; the follower is set by [`migrate`].
    pub subject: &'a mut Subject<'s>,
    /// The connection to the target.
    pub link: &'a dyn Link,
    /// What is offered.
    pub offer: &'a Offer,
    /// Reads a boot file of the offer.
    pub blob: &'a dyn Fn(Digest) -> Result<Vec<u8>, BoxError>,
    /// Opens what an array begins as on the target, which is more than zeros.
    pub base: &'a dyn Fn(&mut Ledger, &BegunAs) -> Result<ArrayBase, BoxError>,
    /// Drawn anew for each migration and told to nobody: see `sent.rs`.
    pub seed: u64,
    /// Addresses seen on each port, asked for at the pause.
    pub ports: &'a dyn Fn() -> Vec<Vec<u8>>,
    /// Writes down, durably, that the machine was handed over: the commit point.
    pub record_handover: &'a mut dyn FnMut() -> Result<(), BoxError>,
    /// How fast rounds go and when to stop.
    pub policy: &'a dyn Policy,
    /// Whether pages may stay here at the pause, for the target to fetch.
    pub leaving: Option<&'a mut Leaving>,
    /// Told after every batch; `Break` cancels.
    pub observe: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

/// Any error of the host.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A machine that now belongs to the target, committed but not yet confirmed.
#[derive(Debug)]
pub struct HandedOver {
    /// Names the handover; keep it until the target confirms.
    pub handover: HandoverId,
    /// The rounds, the last one (paused) included.
    pub rounds: Vec<RoundStats>,
    /// What ended the rounds before it.
    pub why: StopReason,
    /// When the machine was paused.
    pub paused_at: Instant,
}

/// Why a machine did not move. It runs on here, with every page accounted for.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The target did not take the offer.
    #[error("the target does not take the machine")]
    Offer(#[source] LinkError),
    /// The machine does not fit the target.
    #[error("the machine does not fit the target")]
    Misfit(#[source] Misfit),
    /// A boot file could not be read.
    #[error("cannot read the machine's boot file {digest}")]
    Blob {
        /// Which.
        digest: Digest,
        /// Why.
        #[source]
        source: BoxError,
    },
    /// A boot file could not be sent.
    #[error("cannot send the machine's boot files")]
    SendBlob(#[source] LinkError),
    /// The copy failed or was cancelled.
    #[error("the copy did not finish")]
    Capture(#[source] CaptureError),
    /// The target did not load the machine.
    #[error("the target cannot load the machine")]
    Load(#[source] LinkError),
    /// What the target has already could not be compared with.
    #[error("cannot compare the machine with what the target has of it")]
    Base(#[source] BoxError),
    /// The target did not hear which pages stay here.
    #[error("the target did not take note of the pages that stay here")]
    Owe(#[source] BoxError),
    /// The handover could not be written down.
    #[error("cannot write the handover down")]
    Record(#[source] BoxError),
    /// The target sent an answer that makes no sense.
    #[error("the target sent an answer that cannot be read")]
    Answer(#[source] postcard::Error),
}

/// Copies the machine to the target and hands it over, up to and including the commit point.
///
/// On success the machine is paused here and must never run here again: follow with [`confirm`], then free it.
/// On failure it runs here as before.
pub fn migrate(mut job: Move<'_, '_>) -> Result<HandedOver, MigrateError> {
    let handover = job.offer.handover;
    let mut state = Source::Copying;
    match attempt(&mut job, &mut state) {
        Ok(Captured { rounds, why, paused_at, .. }) => Ok(HandedOver { handover, rounds, why, paused_at }),
        Err(error) => {
            let (_, actions) = state.step(SourceEvent::Failed);
            debug_assert_eq!(actions, [SourceAction::SendAbort, SourceAction::GoOn], "{state:?}");
            // The abort is a courtesy: a target that does not hear it drops the arrival with the connection,
            // or keeps it paused until told.
            if let Err(unheard) = abort(job.link, handover) {
                tracing::debug!(%handover, %unheard, "the target did not hear that the migration was given up");
            }
            job.subject.ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Follower::Migration));
            if state == Source::Stopped
                && let Err(error) = job.subject.machine.unpause()
            {
                tracing::error!(%error, "the machine stays paused after a failed migration");
            }
            Err(error)
        }
    }
}

/// Tells the target to forget a handover that was given up. Repeating it does no harm.
pub fn abort(link: &dyn Link, handover: HandoverId) -> Result<(), LinkError> {
    link::call(link, protocol::ABORT, &handover, Bytes::new()).map(drop)
}

fn attempt(job: &mut Move<'_, '_>, state: &mut Source) -> Result<Captured, MigrateError> {
    let handover = job.offer.handover;
    let accepted =
        link::call(job.link, protocol::OFFER, job.offer, Bytes::new()).map_err(MigrateError::Offer)?;
    let accepted = match postcard::from_bytes(&accepted).map_err(MigrateError::Answer)? {
        Offered::Accepted(accepted) => accepted,
        Offered::Misfit(misfit) => return Err(MigrateError::Misfit(misfit)),
    };
    for digest in &accepted.blobs_missing {
        send_blob(job, *digest)?;
    }
    let bases = follow(job, &accepted)?;
    let captured = copy(job, &bases)?;
    *state = state.step(SourceEvent::RoundsOver).0;
    if let Some(leaving) = &job.leaving {
        leaving.tell(job.link, handover).map_err(MigrateError::Owe)?;
    }
    let finish = Finish { handover, ports: (job.ports)() };
    link::call(job.link, protocol::FINISH, &finish, captured.device_state.clone().into())
        .map_err(MigrateError::Load)?;
    (job.record_handover)().map_err(MigrateError::Record)?;
    *state = state.step(SourceEvent::TargetReady).0;
    Ok(captured)
}

/// Begins to follow every array from what the target has of it on.
fn follow(job: &mut Move<'_, '_>, accepted: &Accepted) -> Result<Vec<Option<ArrayBase>>, MigrateError> {
    let mut bases = Vec::new();
    for (index, ledger) in job.subject.ledgers.iter_mut().enumerate() {
        let begun = accepted.begun_as.get(index).unwrap_or(&BegunAs::Zeros);
        if !job.offer.names(begun) {
            return Err(MigrateError::Base("it began as something that was not offered".into()));
        }
        let base = follow_array(ledger, begun, job.base);
        bases.push(base.map_err(MigrateError::Base)?);
    }
    job.subject.follower = Follower::Migration;
    Ok(bases)
}

/// Followed first, listed second: a page that is written in between is in one of the two.
fn follow_array(
    ledger: &mut Ledger,
    begun: &BegunAs,
    open: &dyn Fn(&mut Ledger, &BegunAs) -> Result<ArrayBase, BoxError>,
) -> Result<Option<ArrayBase>, BoxError> {
    let who = Follower::Migration;
    if *begun == BegunAs::Zeros {
        ledger.follow_all(who)?;
        return Ok(None);
    }
    ledger.follow_from(who, PageSet::empty(ledger.page_count()))?;
    let base = open(ledger, begun)?;
    match &base.may_differ {
        MayDiffer::These(pages) => ledger.put_back(who, pages),
        MayDiffer::TheseOrPopulated(pages) => {
            ledger.follow_all(who)?;
            ledger.put_back(who, pages);
        }
    }
    Ok(Some(base))
}

/// The rounds.
fn copy(job: &mut Move<'_, '_>, bases: &[Option<ArrayBase>]) -> Result<Captured, MigrateError> {
    let arrays = job.subject.ledgers.iter().zip(bases);
    let arrays = arrays.map(|(ledger, base)| (ledger.page_count(), base.as_ref())).collect();
    let line = Pipeline::new(job.link, job.offer.handover, arrays, job.seed);
    let (subject, policy, observe) = (&mut *job.subject, job.policy, &mut *job.observe);
    let leaving = &mut job.leaving;
    let mut divide = |left: &mut [PageSet], fresh: &[PageSet], why| {
        leaving.iter_mut().for_each(|leaving| leaving.divide(left, fresh, why));
    };
    let captured = thread::scope(|scope| {
        let mut sink = line.start(scope);
        sink.divide = Some(&mut divide);
        capture(subject, &mut sink, policy, CaptureFinish::StayPaused, &mut |progress| {
            if progress.phase == Phase::Paused {
                line.hurry();
            }
            observe(progress)
        })
    });
    captured.map_err(MigrateError::Capture)
}

fn send_blob(job: &Move<'_, '_>, digest: Digest) -> Result<(), MigrateError> {
    let content = Bytes::from((job.blob)(digest).map_err(|source| MigrateError::Blob { digest, source })?);
    let handover = job.offer.handover;
    let mut offset = 0;
    while offset < content.len() {
        let end = content.len().min(offset + protocol::BLOB_PIECE_MAX);
        let piece = BlobPiece { handover, digest, offset: offset as u64 };
        link::call(job.link, protocol::BLOB, &piece, content.slice(offset..end))
            .map_err(MigrateError::SendBlob)?;
        offset = end;
    }
    Ok(())
}

/// Tells the target to run the machine until it says that it does. `connect` makes a new connection; `wait`
/// sleeps between attempts and answers whether to go on. Returns whether the target has confirmed.
pub fn confirm(
    handover: HandoverId,
    first: &dyn Link,
    connect: &dyn Fn() -> Result<Box<dyn Link>, BoxError>,
    wait: &dyn Fn(Duration) -> bool,
) -> bool {
    let commit = |link: &dyn Link| link::call(link, protocol::COMMIT, &handover, Bytes::new());
    let mut outcome = commit(first).map_err(BoxError::from);
    let mut pause = Duration::from_millis(50);
    while let Err(error) = outcome {
        tracing::warn!(%handover, error = &*error, "the target has not confirmed the handover yet");
        if !wait(pause) {
            return false;
        }
        pause = (pause * 2).min(Duration::from_secs(5));
        outcome = connect().and_then(|link| commit(&*link).map_err(BoxError::from));
    }
    true
}
