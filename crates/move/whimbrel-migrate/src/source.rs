//! Source of a migration: offer, rounds, handover.
//!
//! The order of steps is that of [`crate::handover::Source`]; this module carries out its actions. A failure
//! before the commit point returns a [`MigrateError`] with the machine running here and all state intact.
//! After the commit point there is no failure: [`confirm`] repeats the commit until the target replies, over
//! new connections where needed, or until it is told to stop and leave that to a later call.

use crate::{
    baseline::{ArrayBaseline, Baseline, MayDiffer},
    boot_files::{BootFile, BootFiles},
    compatibility::Incompatibility,
    downtime::DowntimeParts,
    handover::{Source, SourceAction, SourceEvent},
    late_frames::{self, LateFrame},
    link::{self, Answer, Link, LinkError},
    page_sender::Pipeline,
    postcopy::deferred_pages::DeferredPages,
    protocol::{
        self, Accepted, BootFileRange, Finish, FinishHeader, HandoverId, Offer, Offered, Prepared,
        RunningSince,
    },
};
use bytes::Bytes;
use std::{
    error::Error,
    ops::ControlFlow,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use whimbrel_block::Mirror;
use whimbrel_capture::{
    AfterCapture as CaptureFinish, CaptureError, CaptureSource, Captured, Consumer, DirtyLog, Phase,
    Progress, RoundStats, StopPolicy, StopReason, capture,
};
use whimbrel_core::{Digest, PageSet};

/// Machine to migrate, and everything that the migration needs.
pub struct MigrationJob<'a, 's> {
    /// Machine and its arrays; [`migrate`] sets the consumer.
    pub source: &'a mut CaptureSource<'s>,
    /// Connection to the target.
    pub link: &'a dyn Link,
    /// Offer to the target.
    pub offer: &'a Offer,
    /// Opens a boot file of the offer.
    pub open_boot_file: &'a (dyn Fn(Digest) -> Result<Box<dyn BootFile>, BoxError> + Sync),
    /// Opens the baseline of an array, if it is more than zeros.
    pub open_baseline: &'a dyn Fn(&mut DirtyLog, &Baseline) -> Result<ArrayBaseline, BoxError>,
    /// Secret random number, new for each migration: see `sent_hashes.rs`.
    pub seed: u64,
    /// Returns the addresses seen on each port; called at the pause.
    pub ports: &'a dyn Fn() -> Vec<Vec<u8>>,
    /// Takes the frames that arrived for the machine since the pause, once it is handed over.
    pub take_late_frames: &'a mut dyn FnMut() -> Vec<LateFrame>,
    /// Records durably that the machine was handed over: the commit point.
    pub record_handover: &'a mut dyn FnMut() -> Result<(), BoxError>,
    /// Policy that sets the rates and decides when to stop.
    pub policy: &'a dyn StopPolicy,
    /// Decides which pages stay here at the pause for the target to fetch, if any may.
    pub deferred: Option<&'a mut DeferredPages>,
    /// Disks whose writes are sent to the target too once their mirror is armed, by their arrays. Each mirror
    /// has ended when [`migrate`] returns.
    pub mirrors: &'a [(usize, Arc<Mirror>)],
    /// Backup host that must have all of the machine as of the pause before it is handed over.
    pub backup: Option<&'a mut dyn BackupSink>,
    /// Called with the progress after every batch; `Break` cancels.
    pub observe: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

/// Error of the daemon.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Copy of the machine to the backup host. A failure here fails the migration.
pub trait BackupSink {
    /// Copies what the backup host lacks, while the machine runs: the target is ready for it.
    fn copy_ahead(&mut self, ledgers: &mut [DirtyLog]) -> Result<(), BoxError>;

    /// Copies the rest, with the device state, while the machine is paused; returns once the backup host has
    /// all of it.
    fn copy_at_pause(&mut self, ledgers: &mut [DirtyLog], device_state: &[u8]) -> Result<(), BoxError>;
}

/// Machine that now belongs to the target, committed but not yet confirmed.
#[derive(Debug)]
pub struct HandedOver {
    /// Id of the handover; keep it until the target confirms.
    pub handover: HandoverId,
    /// Rounds, with the last one (paused) included.
    pub rounds: Vec<RoundStats>,
    /// Reason that ended the rounds before it.
    pub stop_reason: StopReason,
    /// Instant of the pause.
    pub paused_at: Instant,
    /// Parts of the downtime up to the commit point.
    pub downtime: DowntimeParts,
    /// Commit that was sent to the target.
    pub commit: PendingCommit,
}

/// Commit that the target has not confirmed yet.
pub struct PendingCommit(Result<Box<dyn Answer>, LinkError>);

impl PendingCommit {
    /// Sends the commit.
    pub fn send(link: &dyn Link, handover: HandoverId) -> Self {
        let header = postcard::to_stdvec(&handover).expect("an id is always encodable");
        Self(link.send(protocol::COMMIT, header, Bytes::new()))
    }

    /// Commit that was not sent yet: the handover is that of an earlier daemon.
    pub fn unsent() -> Self {
        Self(Err(LinkError::Lost { source: "the commit was not sent yet".into() }))
    }
}

impl std::fmt::Debug for PendingCommit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingCommit(sent: {})", self.0.is_ok())
    }
}

/// Error of a migration before the commit. The machine runs on here, with every page accounted for.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The target refused the offer.
    #[error("the target refused the machine")]
    Offer(#[source] LinkError),
    /// The machine does not fit the target.
    #[error("the machine does not fit the target")]
    Incompatible(#[source] Incompatibility),
    /// A boot file could not be read.
    #[error("cannot read the machine's boot file {digest}")]
    BootFile {
        /// Digest of the file.
        digest: Digest,
        /// Cause reported by the daemon.
        source: BoxError,
    },
    /// A boot file could not be sent.
    #[error("cannot send the machine's boot files")]
    SendBootFile(#[source] LinkError),
    /// The early device state could not be sent.
    #[error("cannot send the early device state")]
    EarlyState(#[source] BoxError),
    /// The copy failed or was cancelled.
    #[error("the copy did not finish")]
    Capture(#[source] CaptureError),
    /// The target did not load the machine.
    #[error("the target cannot load the machine")]
    Load(#[source] LinkError),
    /// The machine could not be compared with its baselines.
    #[error("cannot compare the machine with its baselines on the target")]
    Baseline(#[source] BoxError),
    /// The target did not accept the list of missing pages.
    #[error("the target did not accept the list of missing pages")]
    MissingPages(#[source] BoxError),
    /// The backup host did not get all of the machine.
    #[error("the backup host does not have the machine")]
    BackupHost(#[source] BoxError),
    /// The handover could not be recorded.
    #[error("cannot record the handover")]
    Record(#[source] BoxError),
    /// The target's reply could not be decoded.
    #[error("cannot decode the reply of the target")]
    Answer(#[source] postcard::Error),
}

/// Copies the machine to the target and hands it over, up to and including the commit point.
///
/// On success the machine is paused here and must never run here again: call [`confirm`], then free it. On
/// failure it runs here as before.
pub fn migrate(mut job: MigrationJob<'_, '_>) -> Result<HandedOver, MigrateError> {
    let handover = job.offer.handover;
    let mut state = Source::Copying;
    match attempt(&mut job, &mut state) {
        Ok(done) => Ok(done),
        Err(error) => {
            let (_, actions) = state.step(SourceEvent::Failed);
            debug_assert_eq!(actions, [SourceAction::ResumeHere, SourceAction::SendAbort], "{state:?}");
            job.source.dirty_logs.iter_mut().for_each(|ledger| ledger.detach(Consumer::Migration));
            if state == Source::Stopped
                && let Err(error) = job.source.machine.unpause()
            {
                tracing::error!(%error, "the machine stays paused after a failed migration");
            }
            // A lost abort is harmless: a target that does not receive it discards the incoming machine when
            // the connection ends, or keeps it paused until the abort is repeated. Its reply takes as long as
            // the target needs to clean up.
            if let Err(unheard) = abort(job.link, handover) {
                tracing::debug!(%handover, %unheard, "the target did not receive the abort of the migration");
            }
            Err(error)
        }
    }
}

/// Tells the target to discard a handover that was aborted. May be repeated.
pub fn abort(link: &dyn Link, handover: HandoverId) -> Result<(), LinkError> {
    link::call(link, protocol::ABORT, &handover, Bytes::new()).map(drop)
}

fn attempt(job: &mut MigrationJob<'_, '_>, state: &mut Source) -> Result<HandedOver, MigrateError> {
    let (accepted, boot) = offer(job)?;
    let accepted = match postcard::from_bytes(&accepted).map_err(MigrateError::Answer)? {
        Offered::Accepted(accepted) => accepted,
        Offered::Misfit(misfit) => return Err(MigrateError::Incompatible(misfit)),
    };
    for (digest, size) in &job.offer.blobs {
        if accepted.blobs_missing.contains(digest) {
            send_boot_file(job, *digest, *size)?;
        }
    }
    let bases = attach_consumer(job, &accepted)?;
    let ahead = send_early_state(job).map_err(MigrateError::EarlyState)?;
    if let Some(third) = &mut job.backup {
        third.copy_ahead(job.source.dirty_logs).map_err(MigrateError::BackupHost)?;
    }
    let line = Pipeline::new(job.link, job.offer.handover, arrays(job, &bases), job.seed);
    let line = line.with_mirrors(job.mirrors).with_boot_files(boot);
    thread::scope(|scope| {
        // The threads of the pipeline end while the target works.
        let captured = copy(job, &line, scope)?;
        hand_over(job, state, captured, &ahead)
    })
}

/// Sends the offer. Indexes the boot files while the target reserves resources.
fn offer(job: &MigrationJob<'_, '_>) -> Result<(Bytes, BootFiles), MigrateError> {
    let (offer, blob) = (job.offer, job.open_boot_file);
    thread::scope(|scope| {
        let boot = scope.spawn(|| BootFiles::index(&offer.blobs, blob));
        let accepted = link::call(job.link, protocol::OFFER, offer, Bytes::new());
        // Boot files only save bytes, so a failure to index them is ignored.
        Ok((accepted.map_err(MigrateError::Offer)?, boot.join().unwrap_or_default()))
    })
}

/// Steps from the end of the copy to the commit point, and the commit itself.
fn hand_over(
    job: &mut MigrationJob<'_, '_>,
    state: &mut Source,
    captured: Captured,
    ahead: &[u8],
) -> Result<HandedOver, MigrateError> {
    let handover = job.offer.handover;
    let Captured { device_state, rounds, stop_reason: why, paused_at, parts, .. } = captured;
    *state = state.step(SourceEvent::RoundsOver).0;
    if let Some(leaving) = &job.deferred {
        leaving.announce(job.link, handover).map_err(MigrateError::MissingPages)?;
    }
    let mut pause = DowntimeParts::copied(&parts);
    if let Some(third) = &mut job.backup {
        let begun = Instant::now();
        third.copy_at_pause(job.source.dirty_logs, &device_state).map_err(MigrateError::BackupHost)?;
        pause.pages += begun.elapsed();
    }
    let prepared = finish(job, &device_state, ahead)?;
    pause.prepared(paused_at, prepared);
    (job.record_handover)().map_err(MigrateError::Record)?;
    *state = state.step(SourceEvent::TargetReady).0;
    let commit = PendingCommit::send(job.link, handover);
    pause.committed(paused_at);
    if let Err(unsent) = late_frames::send(job.link, handover, &(job.take_late_frames)()) {
        tracing::debug!(%handover, %unsent, "the frames that arrived during the downtime are lost");
    }
    Ok(HandedOver { handover, rounds, stop_reason: why, paused_at, downtime: pause, commit })
}

/// Sends the part of the device state that hardly ever changes while the machine still runs: most of it.
fn send_early_state(job: &mut MigrationJob<'_, '_>) -> Result<Vec<u8>, BoxError> {
    let Some(ahead) = job.source.machine.early_device_state() else { return Ok(Vec::new()) };
    let packed = protocol::pack_state(&ahead)?;
    link::call(job.link, protocol::EARLY_STATE, &job.offer.handover, packed.into())?;
    Ok(ahead)
}

/// Sends the end of the copy and the rest of the device state; the reply tells that the target is ready.
fn finish(job: &MigrationJob<'_, '_>, state: &[u8], ahead: &[u8]) -> Result<Prepared, MigrateError> {
    let same = match state.starts_with(ahead) {
        true => ahead.len(),
        false => state.iter().zip(ahead).take_while(|(state, ahead)| state == ahead).count(),
    };
    let rest = &state[same..];
    let finish = Finish { handover: job.offer.handover, ports: (job.ports)() };
    let word = FinishHeader { finish, ahead: same as u32, rest: rest.len() as u32 };
    let packed = protocol::pack_state(rest).map_err(|source| MigrateError::EarlyState(source.into()))?;
    let ready = link::call(job.link, protocol::FINISH, &word, packed.into()).map_err(MigrateError::Load)?;
    // The reply has figures only: one that cannot be decoded counts too.
    Ok(postcard::from_bytes(&ready).unwrap_or_default())
}

/// Attaches the migration to every dirty log, with the pages that may differ from the array's baseline.
fn attach_consumer(
    job: &mut MigrationJob<'_, '_>,
    accepted: &Accepted,
) -> Result<Vec<Option<ArrayBaseline>>, MigrateError> {
    let mut bases = Vec::new();
    for (index, ledger) in job.source.dirty_logs.iter_mut().enumerate() {
        let begun = accepted.begun_as.get(index).unwrap_or(&Baseline::Zeros);
        if !job.offer.permits(begun) {
            return Err(MigrateError::Baseline("the target chose a baseline that was not offered".into()));
        }
        let base = attach_array_consumer(ledger, begun, job.open_baseline);
        bases.push(base.map_err(MigrateError::Baseline)?);
    }
    job.source.consumer = Consumer::Migration;
    Ok(bases)
}

/// Attaches first and lists second: a page that is written in between is in one of the two.
fn attach_array_consumer(
    ledger: &mut DirtyLog,
    begun: &Baseline,
    open: &dyn Fn(&mut DirtyLog, &Baseline) -> Result<ArrayBaseline, BoxError>,
) -> Result<Option<ArrayBaseline>, BoxError> {
    let who = Consumer::Migration;
    if *begun == Baseline::Zeros {
        ledger.attach_all(who)?;
        return Ok(None);
    }
    ledger.attach_from(who, PageSet::empty(ledger.page_count()))?;
    let base = open(ledger, begun)?;
    match &base.may_differ {
        MayDiffer::These(pages) => ledger.put_back(who, pages),
        MayDiffer::TheseOrPopulated(pages) => {
            ledger.attach_all(who)?;
            ledger.put_back(who, pages);
        }
    }
    Ok(Some(base))
}

fn arrays<'b>(
    job: &MigrationJob<'_, '_>,
    bases: &'b [Option<ArrayBaseline>],
) -> Vec<(u64, Option<&'b ArrayBaseline>)> {
    let arrays = job.source.dirty_logs.iter().zip(bases);
    arrays.map(|(ledger, base)| (ledger.page_count(), base.as_ref())).collect()
}

fn copy<'scope>(
    job: &mut MigrationJob<'_, '_>,
    line: &'scope Pipeline<'_>,
    scope: &'scope thread::Scope<'scope, '_>,
) -> Result<Captured, MigrateError> {
    let (subject, policy, observe) = (&mut *job.source, job.policy, &mut *job.observe);
    let leaving = &mut job.deferred;
    let mut divide = |left: &mut [PageSet], fresh: &[PageSet], why| {
        leaving.iter_mut().for_each(|leaving| leaving.defer(left, fresh, why));
    };
    let mut sink = line.start(scope);
    sink.divide = Some(&mut divide);
    let captured = capture(subject, &mut sink, policy, CaptureFinish::StayPaused, &mut |progress| {
        if progress.phase == Phase::Paused {
            line.start_downtime();
        }
        observe(progress)
    });
    captured.map_err(MigrateError::Capture)
}

fn send_boot_file(job: &MigrationJob<'_, '_>, digest: Digest, size: u64) -> Result<(), MigrateError> {
    let unreadable = |source| MigrateError::BootFile { digest, source };
    let content = (job.open_boot_file)(digest).map_err(unreadable)?;
    let handover = job.offer.handover;
    let mut offset = 0;
    while offset < size {
        let mut data = vec![0; (size - offset).min(protocol::BOOT_FILE_RANGE_MAX as u64) as usize];
        content.read_at(offset, &mut data).map_err(unreadable)?;
        let (piece, len) = (BootFileRange { handover, digest, offset }, data.len());
        link::call(job.link, protocol::BOOT_FILE, &piece, data.into()).map_err(MigrateError::SendBootFile)?;
        offset += len as u64;
    }
    Ok(())
}

/// Waits for the reply to the commit, and repeats the commit until there is one. `connect` makes a new
/// connection; `wait` sleeps between attempts and returns whether to continue. Returns the instant since
/// which the machine runs on the target, as far as the target reports it.
pub fn confirm(
    handover: HandoverId,
    first: PendingCommit,
    connect: &dyn Fn() -> Result<Box<dyn Link>, BoxError>,
    wait: &dyn Fn(Duration) -> bool,
) -> Option<Instant> {
    let answer = |commit: PendingCommit| commit.0.and_then(|sent| sent.wait()).map_err(BoxError::from);
    let mut outcome = answer(first);
    let mut pause = Duration::from_millis(50);
    while let Err(error) = outcome {
        tracing::warn!(%handover, error = &*error, "the target has not confirmed the handover yet");
        if !wait(pause) {
            return None;
        }
        pause = (pause * 2).min(Duration::from_secs(5));
        outcome = connect().and_then(|link| answer(PendingCommit::send(&*link, handover)));
    }
    let said =
        outcome.ok().and_then(|said| postcard::from_bytes::<RunningSince>(&said).ok()).unwrap_or_default();
    let now = Instant::now();
    Some(now.checked_sub(Duration::from_micros(said.since)).unwrap_or(now))
}
