//! Source of a migration: offer, rounds, handover.
//!
//! The order of steps is that of [`crate::handover::Source`]. This module reports its events; `attempt.rs`
//! carries out its actions. A failure before the commit point returns a [`MigrateError`] with the machine
//! running here and all state intact.

use crate::{
    attempt::{Attempt, HandoverRecord},
    baseline::{ArrayBaseline, Baseline, MayDiffer},
    boot_files::BootFile,
    compatibility::Incompatibility,
    downtime::DowntimeParts,
    late_frames::{self, LateFrame},
    link::{self, Link, LinkError},
    outcome::PendingCommit,
    page_sender::Pipeline,
    postcopy::deferred_pages::DeferredPages,
    protocol::{self, Accepted, BootFileRange, Finish, FinishHeader, HandoverId, Offer, Prepared},
    watchdog::{Budget, Watchdog},
};
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
use whimbrel_machine::Machine;

/// Machine to migrate, and everything that the migration needs.
pub struct MigrationJob<'a> {
    /// Connection to the target.
    pub link: &'a dyn Link,
    /// Offer to the target.
    pub offer: &'a Offer,
    /// Opens a boot file of the offer.
    pub open_boot_file: OpenBootFile<'a>,
    /// Opens the baseline of an array, if it is more than zeros.
    pub open_baseline: &'a dyn Fn(&mut DirtyLog, &Baseline) -> Result<ArrayBaseline, BoxError>,
    /// Secret random number, new for each migration: see `sent_hashes.rs`.
    pub seed: u64,
    /// Returns the addresses seen on each port; called at the pause.
    pub ports: &'a dyn Fn() -> Vec<Vec<u8>>,
    /// Takes the frames that arrived for the machine since the pause, once it is handed over.
    pub take_late_frames: &'a mut dyn FnMut() -> Vec<LateFrame>,
    /// Policy that sets the rates and decides when to stop.
    pub policy: &'a dyn StopPolicy,
    /// Decides which pages stay here at the pause for the target to fetch, if any may.
    pub deferred: Option<&'a mut DeferredPages>,
    /// Disks whose writes are sent to the target too once their mirror is armed, by their arrays. Each mirror
    /// has ended when [`migrate`] returns.
    pub mirrors: &'a [(usize, Arc<Mirror>)],
    /// Backup host that must have all of the machine as of the pause before it is handed over.
    pub backup: Option<&'a mut dyn BackupSink>,
    /// Limits until the commit point.
    pub budget: &'a Budget<'a>,
    /// Called with the progress after every batch; `Break` cancels.
    pub observe: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

/// Opens a boot file by its digest.
pub type OpenBootFile<'a> = &'a (dyn Fn(Digest) -> Result<Box<dyn BootFile>, BoxError> + Sync);

/// Error of the daemon.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Copy of the machine to the backup host. A failure here fails the migration.
pub trait BackupSink {
    /// Copies what the backup host lacks, while the machine runs: the target is ready for it.
    fn copy_ahead(&mut self, ledgers: &mut [DirtyLog]) -> Result<(), BoxError>;

    /// Copies the rest, with the device state, while the machine is paused; returns once the backup host has
    /// all of it.
    fn copy_at_pause(&mut self, ledgers: &mut [DirtyLog], device_state: &[u8]) -> Result<(), BoxError>;

    /// Leaves the dirty logs: nothing more is copied from here.
    fn give_up(&mut self, ledgers: &mut [DirtyLog]);
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
    /// A limit of the migration was exceeded.
    #[error("the {what} before the handover exceeded its limit of {limit:?}")]
    OverBudget {
        /// What was limited: `downtime` or `time`.
        what: &'static str,
        /// Longest time that was allowed.
        limit: Duration,
    },
    /// The target's reply could not be decoded.
    #[error("cannot decode the reply of the target")]
    Answer(#[source] postcard::Error),
}

/// Copies the machine to the target and hands it over, up to and including the commit point.
///
/// On success the machine is paused here and must never run here again: call [`crate::confirm`], which frees
/// it. On failure it runs here as before, and the target waits for an [`AbortedAction::SendAbort`]. After
/// [`MigrateError::Record`] it may also be paused still: see [`HandoverRecord::revert`].
///
/// [`AbortedAction::SendAbort`]: crate::handover::AbortedAction::SendAbort
pub fn migrate(
    source: &mut CaptureSource<'_>,
    record: &mut dyn HandoverRecord,
    mut job: MigrationJob<'_>,
) -> Result<HandedOver, MigrateError> {
    let CaptureSource { machine, dirty_logs, .. } = source;
    let watchdog = Watchdog::new(job.budget, job.link);
    let mut attempt =
        Attempt::new(&mut **machine, record, &watchdog, (job.link, job.offer, job.open_boot_file));
    let outcome = thread::scope(|scope| {
        scope.spawn(|| watchdog.watch());
        let outcome = hand_over_to(&mut job, &mut attempt, dirty_logs);
        // What the watchdog has ended failed for its reason, whatever was waited for.
        let reason = watchdog.end();
        outcome.map_err(|error| reason.unwrap_or(error))
    });
    outcome.inspect_err(|_| {
        dirty_logs.iter_mut().for_each(|ledger| ledger.detach(Consumer::Migration));
        job.backup.iter_mut().for_each(|third| third.give_up(dirty_logs));
        attempt.failed();
    })
}

fn hand_over_to(
    job: &mut MigrationJob<'_>,
    attempt: &mut Attempt<'_>,
    dirty_logs: &mut [DirtyLog],
) -> Result<HandedOver, MigrateError> {
    let (accepted, boot) = attempt.begin()?;
    for (digest, size) in &job.offer.blobs {
        if accepted.blobs_missing.contains(digest) {
            send_boot_file(job, *digest, *size)?;
        }
    }
    let bases = attach_consumer(job, dirty_logs, &accepted)?;
    let ahead = send_early_state(job, attempt).map_err(MigrateError::EarlyState)?;
    if let Some(third) = &mut job.backup {
        third.copy_ahead(dirty_logs).map_err(MigrateError::BackupHost)?;
    }
    let arrays = dirty_logs.iter().zip(&bases);
    let arrays = arrays.map(|(ledger, base)| (ledger.page_count(), base.as_ref())).collect();
    let line = Pipeline::new(job.link, job.offer.handover, arrays, job.seed);
    let line = line.with_mirrors(job.mirrors).with_boot_files(boot);
    thread::scope(|scope| {
        // The threads of the pipeline end while the target works.
        let captured = copy(job, attempt, dirty_logs, &line, scope)?;
        hand_over(job, attempt, dirty_logs, captured, &ahead)
    })
}

/// Steps from the end of the copy to the commit point, and the commit itself.
fn hand_over(
    job: &mut MigrationJob<'_>,
    attempt: &mut Attempt<'_>,
    dirty_logs: &mut [DirtyLog],
    captured: Captured,
    ahead: &[u8],
) -> Result<HandedOver, MigrateError> {
    let handover = job.offer.handover;
    let Captured { device_state, rounds, stop_reason: why, paused_at, parts, .. } = captured;
    if let Some(leaving) = &job.deferred {
        leaving.announce(job.link, handover).map_err(MigrateError::MissingPages)?;
    }
    let mut pause = DowntimeParts::copied(&parts);
    if let Some(third) = &mut job.backup {
        let begun = Instant::now();
        third.copy_at_pause(dirty_logs, &device_state).map_err(MigrateError::BackupHost)?;
        pause.pages += begun.elapsed();
    }
    let prepared = finish(job, &device_state, ahead)?;
    pause.prepared(paused_at, prepared);
    let commit = attempt.target_ready()?;
    pause.committed(paused_at);
    if let Err(unsent) = late_frames::send(job.link, handover, &(job.take_late_frames)()) {
        tracing::debug!(%handover, %unsent, "the frames that arrived during the downtime are lost");
    }
    Ok(HandedOver { handover, rounds, stop_reason: why, paused_at, downtime: pause, commit })
}

/// Sends the part of the device state that hardly ever changes while the machine still runs: most of it.
fn send_early_state(job: &MigrationJob<'_>, machine: &mut dyn Machine) -> Result<Vec<u8>, BoxError> {
    let Some(ahead) = machine.early_device_state() else { return Ok(Vec::new()) };
    let packed = protocol::pack_state(&ahead)?;
    link::call(job.link, protocol::EARLY_STATE, &job.offer.handover, packed.into())?;
    Ok(ahead)
}

/// Sends the end of the copy and the rest of the device state; the reply tells that the target is ready.
fn finish(job: &MigrationJob<'_>, state: &[u8], ahead: &[u8]) -> Result<Prepared, MigrateError> {
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
    job: &MigrationJob<'_>,
    dirty_logs: &mut [DirtyLog],
    accepted: &Accepted,
) -> Result<Vec<Option<ArrayBaseline>>, MigrateError> {
    let mut bases = Vec::new();
    for (index, ledger) in dirty_logs.iter_mut().enumerate() {
        let begun = accepted.begun_as.get(index).unwrap_or(&Baseline::Zeros);
        if !job.offer.permits(begun) {
            return Err(MigrateError::Baseline("the target chose a baseline that was not offered".into()));
        }
        let base = attach_array_consumer(ledger, begun, job.open_baseline);
        bases.push(base.map_err(MigrateError::Baseline)?);
    }
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

fn copy<'scope>(
    job: &mut MigrationJob<'_>,
    attempt: &mut Attempt<'_>,
    dirty_logs: &mut [DirtyLog],
    line: &'scope Pipeline<'_>,
    scope: &'scope thread::Scope<'scope, '_>,
) -> Result<Captured, MigrateError> {
    let (policy, observe) = (job.policy, &mut *job.observe);
    let mut subject = CaptureSource { machine: attempt, dirty_logs, consumer: Consumer::Migration };
    let leaving = &mut job.deferred;
    let mut divide = |left: &mut [PageSet], fresh: &[PageSet], why| {
        leaving.iter_mut().for_each(|leaving| leaving.defer(left, fresh, why));
    };
    let mut sink = line.start(scope);
    sink.divide = Some(&mut divide);
    let captured = capture(&mut subject, &mut sink, policy, CaptureFinish::StayPaused, &mut |progress| {
        if progress.phase == Phase::Paused {
            line.start_downtime();
        }
        observe(progress)
    });
    captured.map_err(MigrateError::Capture)
}

fn send_boot_file(job: &MigrationJob<'_>, digest: Digest, size: u64) -> Result<(), MigrateError> {
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
