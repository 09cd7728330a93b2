//! The sending side: offer, rounds, handover.
//!
//! The order of things is that of [`crate::handover::Source`]; this file does what its actions say. A failure
//! before the commit point returns a [`MigrateError`] with the machine running here and nothing
//! forgotten. After the commit point there is no failure: [`confirm`] repeats the commit until the target
//! answers, over new connections where needed, or until it is told to stop and leave that to a later call.

use crate::{
    codec::Encoder,
    fit::Misfit,
    handover::{Source, SourceAction, SourceEvent},
    link::{self, Answer, Link, LinkError},
    protocol::{self, BlobPiece, Finish, HandoverId, Offer, Offered, Pages},
    sent::Sent,
};
use bytes::Bytes;
use std::{
    collections::VecDeque,
    error::Error,
    ops::ControlFlow,
    time::{Duration, Instant},
};
use whimbrel_capture::{
    Batch, CaptureError, Captured, Finish as CaptureFinish, Follower, Policy, Progress, RoundStats, Sink,
    SinkError, StopReason, Subject, capture,
};
use whimbrel_core::{Digest, PAGE_SIZE};

/// Most page messages that wait for an answer: with 256 pages each, 64 MiB of RAM at most.
const UNANSWERED_MAX: usize = 64;
/// Room for the versions that the target holds of hot pages.
const SENT_BYTES_MAX: usize = 96 << 20;
/// zstd's fast levels keep up with several Gbit/s on one core; see docs/benchmarks.md.
const ZSTD_LEVEL: i32 = 1;

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
    /// Addresses seen on each port, asked for at the pause.
    pub ports: &'a dyn Fn() -> Vec<Vec<u8>>,
    /// Writes down, durably, that the machine was handed over: the commit point.
    pub record_handover: &'a mut dyn FnMut() -> Result<(), BoxError>,
    /// How fast rounds go and when to stop.
    pub policy: &'a dyn Policy,
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
    for digest in accepted.blobs_missing {
        send_blob(job, digest)?;
    }
    let pages = |error| MigrateError::Capture(CaptureError::Pages(error));
    for ledger in job.subject.ledgers.iter_mut() {
        ledger.follow_all(Follower::Migration).map_err(pages)?;
    }
    job.subject.follower = Follower::Migration;
    let mut sink =
        PageSender::new(job.link, handover).map_err(|error| MigrateError::Capture(error.into()))?;
    let captured = capture(job.subject, &mut sink, job.policy, CaptureFinish::StayPaused, job.observe)
        .map_err(MigrateError::Capture)?;
    *state = state.step(SourceEvent::RoundsOver).0;
    let finish = Finish { handover, ports: (job.ports)() };
    link::call(job.link, protocol::FINISH, &finish, captured.device_state.clone().into())
        .map_err(MigrateError::Load)?;
    (job.record_handover)().map_err(MigrateError::Record)?;
    *state = state.step(SourceEvent::TargetReady).0;
    Ok(captured)
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

/// The sink of a migration: encodes batches and keeps a bounded number of them under way.
struct PageSender<'a> {
    link: &'a dyn Link,
    handover: HandoverId,
    encoder: Encoder,
    sent: Sent,
    unanswered: VecDeque<Box<dyn Answer>>,
    bytes_before: u64,
}

impl<'a> PageSender<'a> {
    fn new(link: &'a dyn Link, handover: HandoverId) -> Result<Self, SinkError> {
        let encoder = Encoder::new(ZSTD_LEVEL).map_err(undelivered)?;
        let (sent, unanswered) = (Sent::new(SENT_BYTES_MAX), VecDeque::new());
        Ok(Self { link, handover, encoder, sent, unanswered, bytes_before: link.bytes_sent() })
    }

    fn wait_for_answers(&mut self, unanswered_max: usize) -> Result<(), SinkError> {
        while self.unanswered.len() > unanswered_max {
            let oldest = self.unanswered.pop_front().expect("longer than a number");
            oldest.wait().map_err(undelivered)?;
        }
        Ok(())
    }
}

impl Sink for PageSender<'_> {
    fn pages(&mut self, batch: Batch<'_>) -> Result<(), SinkError> {
        let array = batch.array as u32;
        let older = |page| self.sent.get(array, page);
        let (header, payload) =
            self.encoder.encode(array, batch.run, batch.data, older).map_err(undelivered)?;
        for (page, content) in batch.run.pages().zip(batch.data.chunks_exact(PAGE_SIZE)) {
            self.sent.record(array, page, content, batch.hot.is_some_and(|hot| hot.contains(page)));
        }
        let message = Pages { handover: self.handover, batch: header };
        let header = postcard::to_stdvec(&message).expect("a header is always encodable");
        let answer = self.link.send(protocol::PAGES, header, payload.into()).map_err(undelivered)?;
        self.unanswered.push_back(answer);
        self.wait_for_answers(UNANSWERED_MAX)
    }

    fn limit_rate(&mut self, rate: Option<u64>) {
        self.link.limit_rate(rate);
    }

    /// The next version of a page travels as its difference to the last one: while there is room to remember that one,
    /// even the hottest page is sent once ahead of the pause.
    fn wants_first_versions(&self) -> bool {
        self.sent.has_room()
    }

    fn end_round(&mut self) -> Result<(), SinkError> {
        self.wait_for_answers(0)
    }

    fn bytes_out(&self) -> u64 {
        self.link.bytes_sent() - self.bytes_before
    }
}

fn undelivered(source: impl Into<BoxError>) -> SinkError {
    SinkError { destination: "the target".to_owned(), source: source.into() }
}
