//! Checkpoint and suspend of a machine: the capture loop with the store as its sink.
//!
//! A capsule exists from the moment its ref is durable. A failure before that leaves the machine as it was,
//! and in the store only garbage that `gc` removes.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::{
        entry::MachineLock,
        record::{Phase, Record},
    },
};
use std::{collections::BTreeMap, time::Instant};
use whimbrel_api::{
    BalloonTarget, CaptureReport, CheckpointRequest, Operation, OperationKind, OperationResult, RoundInfo,
    SuspendRequest, Unit,
};
use whimbrel_capture::{AfterCapture, CheckpointPolicy, Phase as CapturePhase, Progress, RoundStats};
use whimbrel_core::{CapsuleId, MachineName, RefName};
use whimbrel_image::{ImageRef, Manifest};
use whimbrel_store::CapsuleWriter;
use whimbrel_vm::{CaptureBreaks, CapturedArrays, RunningMachine, remove_overlays};

#[derive(Debug, Clone)]
pub(crate) struct CheckpointOptions {
    pub(crate) tag: Option<RefName>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) balloon: BalloonTarget,
    pub(crate) arrays: CapturedArrays,
    /// Whether the guest freezes its file systems for the pause.
    pub(crate) quiesce: bool,
}

impl CheckpointOptions {
    /// Memory and all disks, without a tag.
    pub(crate) fn without_tag(balloon: BalloonTarget) -> Self {
        Self { tag: None, labels: BTreeMap::new(), balloon, arrays: CapturedArrays::All, quiesce: false }
    }
}

impl Daemon {
    /// Takes a capsule of a machine and lets it run on.
    pub(crate) fn checkpoint(
        self: &std::sync::Arc<Self>,
        name: &MachineName,
        request: CheckpointRequest,
    ) -> Result<Operation, DaemonError> {
        refs::check_tag(request.tag.as_ref())?;
        let arrays = if request.disks_only { CapturedArrays::Disks } else { CapturedArrays::All };
        let CheckpointRequest { tag, labels, balloon, quiesce, .. } = request;
        if quiesce && arrays == CapturedArrays::All {
            return Err(DaemonError::invalid(
                "a capsule with memory has what the guest did not write yet, so nothing is frozen for it: \
                 --quiesce is for --disks-only",
            ));
        }
        self.start_checkpoint(name, CheckpointOptions { tag, labels, balloon, arrays, quiesce })
    }

    /// Starts the operation that takes a capsule of a running machine.
    pub(crate) fn start_checkpoint(
        self: &std::sync::Arc<Self>,
        name: &MachineName,
        wanted: CheckpointOptions,
    ) -> Result<Operation, DaemonError> {
        let (host, machine) = (self.clone(), self.machines.get(name)?);
        Ok(self.operations().start(OperationKind::Checkpoint, name.to_string(), move |reporter| {
            if let Some(taken) = host.checkpoint_protected(&machine, &wanted, reporter)? {
                return Ok(OperationResult::Checkpoint(taken));
            }
            let mut turn = machine.try_lock("checkpoint", Some(reporter.id))?;
            let taken = match wanted.arrays {
                CapturedArrays::All => {
                    host.take_capsule(&mut turn, AfterCapture::Unpause, &wanted, reporter)?
                }
                CapturedArrays::Disks => host.take_disk_only_capsule(&mut turn, &wanted, reporter)?,
            };
            turn.record.save(&host.directories)?;
            Ok(OperationResult::Checkpoint(taken))
        }))
    }

    /// Takes a capsule of a machine and ends its QEMU.
    pub(crate) fn suspend(
        self: &std::sync::Arc<Self>,
        name: &MachineName,
        request: SuspendRequest,
    ) -> Result<Operation, DaemonError> {
        refs::check_tag(request.tag.as_ref())?;
        let (host, machine) = (self.clone(), self.machines.get(name)?);
        let wanted =
            CheckpointOptions { tag: request.tag, ..CheckpointOptions::without_tag(request.balloon) };
        Ok(self.operations().start(OperationKind::Suspend, name.to_string(), move |reporter| {
            let mut turn = machine.try_lock("suspend", Some(reporter.id))?;
            let taken = host.suspend_in(&mut turn, &wanted, reporter)?;
            // A suspended machine is usually resumed; a prestarted QEMU then saves most of the time.
            host.prestart_qemu(&turn.record.config);
            Ok(OperationResult::Suspend(taken))
        }))
    }

    /// Suspends a machine whose lock the caller holds.
    pub(crate) fn suspend_in(
        &self,
        turn: &mut MachineLock<'_>,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<CaptureReport, DaemonError> {
        self.wait_until_complete(turn, reporter)?;
        let taken = self.take_capsule(turn, AfterCapture::StayPaused, wanted, reporter)?;
        self.end_suspended(turn, taken.capsule)?;
        Ok(taken)
    }

    /// Ends a machine that is in the store now. The record is written first, so that it never runs twice.
    fn end_suspended(&self, turn: &mut MachineLock<'_>, capsule: CapsuleId) -> Result<(), DaemonError> {
        turn.record.phase = Phase::Suspended { capsule };
        turn.record.process = None;
        turn.record.since_ms = crate::now_ms();
        if let Err(error) = turn.record.save(&self.directories) {
            turn.record.phase = Phase::Here;
            let (record, live) = turn.parts()?;
            live.unpause();
            self.restore_balloon(record, live);
            return Err(error);
        }
        turn.running.take().into_iter().for_each(RunningMachine::end);
        // The capsule has the disks; the overlays are no longer needed.
        remove_overlays(&self.directories.live_bitmaps(), &self.directories.machine(&turn.record.name));
        Ok(())
    }

    /// Takes a capsule after inflating the balloon. The guest gets its memory back unless the machine ends
    /// next.
    fn take_capsule(
        &self,
        turn: &mut MachineLock<'_>,
        finish: AfterCapture,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<CaptureReport, DaemonError> {
        let begun = Instant::now();
        let (record, live) = turn.parts()?;
        let balloon_freed = self.shrink_guest(record, live, wanted.balloon, reporter)?;
        let taken = self.take_capsule_as_is(record, live, finish, wanted, (&mut None, reporter));
        if taken.is_err() || finish == AfterCapture::Unpause {
            self.restore_balloon(record, live);
        }
        let total_ms = begun.elapsed().as_secs_f64() * 1e3;
        taken.map(|report| CaptureReport { total_ms, balloon_freed, ..report })
    }

    /// Takes a capsule without inflating the balloon. `breaks` are made while the machine runs.
    pub(crate) fn take_capsule_as_is(
        &self,
        record: &mut Record,
        live: &mut RunningMachine,
        finish: AfterCapture,
        wanted: &CheckpointOptions,
        (breaks, reporter): (&mut Option<&mut dyn CaptureBreaks>, &ProgressReporter),
    ) -> Result<CaptureReport, DaemonError> {
        let was_paused = live.is_paused();
        let finish = if was_paused { AfterCapture::StayPaused } else { finish };
        let stored_before = self.stored_bytes();
        let writer = self.store.writer().map_err(refs::store_error("begin to write"))?;
        live.align_disks(|index, disk| self.alignment_for(record, index, disk))?;
        let mut capture = live.begin_capture(&writer, wanted.arrays)?.quiesced(wanted.quiesce);
        let policy = policy_for(was_paused, finish);
        let mut told = |progress| {
            report(reporter, progress);
            reporter.flow()
        };
        let captured = capture.run(live, (&policy, finish), breaks, &mut told)?;
        tracing::debug!(machine = %record.name, pause = ?captured.parts, "captured");
        // The labels say already how much memory the guest is to get back.
        let labels = labels_of(record, wanted);
        if finish == AfterCapture::Unpause {
            self.restore_balloon(record, live);
        }
        let head_bytes = live.qemu.head().map_or(0, |head| head.as_bytes().len());
        // The stream header hardly ever changes; as a blob of its own it is stored once.
        let (head, sections) = captured.device_state.split_at(head_bytes.min(captured.device_state.len()));
        let kept = &*record;
        let commit = || {
            let images = capture.finish()?;
            let bases = images.iter().map(|image| (image.name.clone(), image.root)).collect();
            Ok((self.commit(kept, images, &writer, [head, sections], (wanted, labels))?, bases))
        };
        let committed = match breaks {
            None => commit(),
            Some(breaks) => live.take_breaks_during(&mut **breaks, commit),
        };
        match committed {
            Ok((capsule, bases)) => {
                record.last = Some(capsule);
                live.pin_base(self.store.pin(&capsule), wanted.arrays, bases);
                let bytes_added = self.stored_bytes().saturating_sub(stored_before);
                let pause = match finish {
                    AfterCapture::Unpause => captured.downtime,
                    AfterCapture::StayPaused => captured.paused_at.elapsed(),
                };
                if finish == AfterCapture::Unpause {
                    self.counts.checkpointed(pause);
                }
                Ok(CaptureReport {
                    capsule,
                    pause_ms: if was_paused { 0.0 } else { pause.as_secs_f64() * 1e3 },
                    total_ms: 0.0,
                    bytes_added,
                    rounds: captured.rounds.iter().map(round_info).collect(),
                    balloon_freed: None,
                })
            }
            Err(error) => {
                // Pages that the sink collected are in no capsule: the next one reads every page again.
                live.detach_store();
                if !was_paused && finish == AfterCapture::StayPaused {
                    live.unpause();
                }
                Err(error)
            }
        }
    }

    /// Makes the newest capsule of the machine from these images.
    pub(crate) fn commit(
        &self,
        record: &Record,
        images: Vec<ImageRef>,
        writer: &CapsuleWriter,
        device_state: [&[u8]; 2],
        (wanted, labels): (&CheckpointOptions, BTreeMap<String, String>),
    ) -> Result<CapsuleId, DaemonError> {
        let names: Vec<RefName> =
            wanted.tag.clone().into_iter().chain([refs::machine_ref(&record.name)]).collect();
        self.commit_as(record, images, writer, (device_state, labels), &names)
    }

    /// Makes a capsule from these images of the machine and points `names` at it.
    pub(crate) fn commit_as(
        &self,
        record: &Record,
        images: Vec<ImageRef>,
        writer: &CapsuleWriter,
        device_state: ([&[u8]; 2], BTreeMap<String, String>),
        names: &[RefName],
    ) -> Result<CapsuleId, DaemonError> {
        self.commit_at(record, images, writer, device_state, names, crate::now_ms())
    }

    /// Like [`Self::commit_as`], for the machine as it was at `time`.
    pub(crate) fn commit_at(
        &self,
        record: &Record,
        images: Vec<ImageRef>,
        writer: &CapsuleWriter,
        (device_state, mut labels): ([&[u8]; 2], BTreeMap<String, String>),
        names: &[RefName],
        time: u64,
    ) -> Result<CapsuleId, DaemonError> {
        let write = refs::store_error("write the capsule");
        let parts = device_state.into_iter().filter(|part| !part.is_empty());
        let device = parts.map(|part| writer.put_blob(part)).collect::<Result<_, _>>().map_err(&write)?;
        labels.extend(self.lineage_label(record));
        for digest in record.config.boot_files() {
            if self.store.has(&[digest]) != [true] {
                let path = self.directories.boot_file(&digest);
                let content =
                    std::fs::read(&path).map_err(|source| DaemonError::io("read", &path, source))?;
                writer.put_blob(&content).map_err(&write)?;
            }
        }
        let manifest = Manifest {
            format: whimbrel_image::FORMAT,
            machine: record.config.clone(),
            device,
            images,
            parents: record.last.or(record.origin).into_iter().collect(),
            time,
            host: self.name.to_string(),
            labels,
            working_set: self.prefetch_list_blob(record, writer),
        };
        let capsule = writer.commit(&manifest, names).map_err(refs::store_error("commit the capsule"))?;
        self.announce_soon();
        Ok(capsule)
    }
}

/// Labels that the user wants, and those that a resume needs.
pub(crate) fn labels_of(record: &Record, wanted: &CheckpointOptions) -> BTreeMap<String, String> {
    let mut labels = wanted.labels.clone();
    labels.insert(refs::MACHINE_LABEL.to_owned(), record.name.to_string());
    let squeezed = record.squeezed_from.map(|size| (refs::BALLOON_LABEL.to_owned(), size.0.to_string()));
    labels.extend(squeezed);
    labels.extend(record.tunnel.as_ref().map(crate::network::tunnel::home_label));
    labels
}

fn policy_for(was_paused: bool, finish: AfterCapture) -> CheckpointPolicy {
    match finish {
        AfterCapture::StayPaused if was_paused => CheckpointPolicy::STOPPED,
        AfterCapture::StayPaused => CheckpointPolicy::SUSPEND,
        AfterCapture::Unpause => CheckpointPolicy::CHECKPOINT,
    }
}

pub(crate) fn round_info(round: &RoundStats) -> RoundInfo {
    let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
    RoundInfo {
        pages: round.pages,
        bytes: round.bytes,
        ms: ms(round.duration),
        begun_ms: ms(round.start),
        limit: round.limit.map(whimbrel_core::ByteSize),
        skipped: round.skipped,
        left: round.left,
        downtime_ms: round.downtime.map(ms),
    }
}

pub(crate) fn report(reporter: &ProgressReporter, progress: Progress) {
    let stage = match progress.phase {
        CapturePhase::Round(round) => format!("copying, round {round}"),
        CapturePhase::Paused => "copying the last pages".to_owned(),
        CapturePhase::Delivering => "writing the last pages".to_owned(),
    };
    reporter.progress(&stage, Unit::Pages, progress.done, Some(progress.total));
}
