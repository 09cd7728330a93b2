//! Rewind: takes a machine back to an earlier capsule, and keeps its present state as a capsule.
//!
//! The machine is suspended first, so nothing of it is lost whatever happens next. If the earlier state
//! cannot be resumed, the present one is. One that is switched off has only its disks to lose: they become a
//! capsule, and the machine is suspended as that until it is resumed or again what it was.

use super::checkpoint::CheckpointOptions;
use crate::{
    capsule::disk_alignment::disk_bases,
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Phase,
    },
};
use std::{sync::Arc, time::Instant};
use whimbrel_api::{BalloonTarget, Operation, OperationKind, OperationResult, RewindRequest};
use whimbrel_core::{CapsuleId, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::Expected;
use whimbrel_vm::{Failpoint, StoppedDisk, remove_overlays};

impl Daemon {
    /// Takes a machine back to one of its capsules, whether it runs, is suspended or is switched off.
    pub(crate) fn rewind(
        self: &Arc<Self>,
        name: &whimbrel_core::MachineName,
        request: &RewindRequest,
    ) -> Result<Operation, DaemonError> {
        let machine = self.machines.get(name)?;
        let (capsule, manifest) = self.find(&request.capsule)?;
        self.check_own_past(&machine, capsule, &manifest)?;
        // The pin keeps the capsule when its last name moves to the present state.
        let pin = self.store.pin(&capsule).map_err(refs::store_error("read the capsule"))?;
        let (host, name, begun) = (self.clone(), name.clone(), Instant::now());
        Ok(self.operations().start(OperationKind::Rewind, name.to_string(), move |reporter| {
            let _pin = pin;
            let (before, off) = host.suspend_to_rewind(&machine, reporter)?;
            Failpoint::Rewind.reached_unless(|| reporter.is_cancelled());
            let rewound = host.tag_rewound(&before).and_then(|tag| {
                if reporter.is_cancelled() {
                    return Err(DaemonError::Cancelled { left: "the machine is as it was".into() });
                }
                host.resume_suspended(&name, (capsule, &manifest), reporter)?;
                Ok(tag)
            });
            let tag = rewound.inspect_err(|_| host.make_as_before(&machine, (before, off), reporter))?;
            host.self_starts.forget(&name);
            let to_running_ms = begun.elapsed().as_secs_f64() * 1e3;
            Ok(OperationResult::Rewind { machine: name, capsule, before, tag, to_running_ms })
        }))
    }

    /// Refuses a capsule that the machine was never in: it would become another machine.
    fn check_own_past(
        &self,
        machine: &Machine,
        capsule: CapsuleId,
        manifest: &Manifest,
    ) -> Result<(), DaemonError> {
        let info = machine.info();
        let own = refs::machine_of(manifest).is_ok_and(|of| of == info.name);
        if own || self.capsule_graph()?.ancestors(info.follows).contains(&capsule) {
            return Ok(());
        }
        Err(DaemonError::NotItsPast { name: info.name, capsule })
    }

    /// The capsule that the machine is, or is suspended as now, and its phase if it was switched off.
    fn suspend_to_rewind(
        self: &Arc<Self>,
        machine: &Machine,
        reporter: &ProgressReporter,
    ) -> Result<(CapsuleId, Option<Phase>), DaemonError> {
        let mut turn = machine.try_lock("rewind", Some(reporter.id))?;
        let wanted = CheckpointOptions::without_tag(BalloonTarget::Off);
        match turn.record.phase.clone() {
            Phase::Suspended { capsule } => Ok((capsule, None)),
            off @ (Phase::Stopped | Phase::Crashed { .. }) => {
                // The machine runs at the end, so no standby may have it.
                self.end_at_standbys(machine.name())?;
                Ok((self.suspend_disks(&mut turn, &wanted, reporter)?, Some(off)))
            }
            _ => Ok((self.suspend_in(&mut turn, &wanted, reporter)?.capsule, None)),
        }
    }

    /// Suspends a machine that is switched off, as a capsule of its disks. On failure it is as it was.
    fn suspend_disks(
        &self,
        turn: &mut MachineLock<'_>,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let capsule = self.take_stopped_disks(&mut turn.record, wanted, reporter)?.capsule;
        let mut record = turn.record.clone();
        record.phase = Phase::Suspended { capsule };
        (record.process, record.since_ms) = (None, crate::now_ms());
        if let Err(error) = record.save(&self.directories) {
            // The failed write may have reached the disk all the same.
            turn.record.save(&self.directories)?;
            return Err(error);
        }
        turn.record = record;
        // The capsule has the disks.
        remove_overlays(&self.directories.live_bitmaps(), &self.directories.machine(&turn.record.name));
        Ok(capsule)
    }

    /// Keeps the state before a rewind by a tag, as the next checkpoint takes over the machine's own ref.
    fn tag_rewound(&self, before: &CapsuleId) -> Result<RefName, DaemonError> {
        let tag = format!("rewound.{}", before.short());
        let tag: RefName = tag.parse().map_err(|error| DaemonError::invalid(format!("{error}")))?;
        let set = self.store.set_ref(&tag, before, Expected::Anything);
        set.map_err(refs::store_error("tag the present state"))?;
        Ok(tag)
    }

    /// After a rewind that failed or was cancelled. If this fails as well, the machine stays suspended.
    fn make_as_before(
        self: &Arc<Self>,
        machine: &Machine,
        (before, off): (CapsuleId, Option<Phase>),
        reporter: &ProgressReporter,
    ) {
        let manifest = self.store.manifest(&before).map_err(refs::store_error("read the capsule"));
        let made = manifest.and_then(|manifest| match off {
            None => self.resume_suspended(machine.name(), (before, &manifest), reporter),
            Some(phase) => self.switch_off_again(machine, (before, &manifest), phase),
        });
        if let Err(error) = made {
            let error = &error as &dyn std::error::Error;
            tracing::error!(machine = %machine.name(), error, "a machine stays suspended after a failed rewind");
        }
    }

    /// Makes a machine that is suspended as a capsule of its disks one that is switched off, over that
    /// capsule.
    fn switch_off_again(
        &self,
        machine: &Machine,
        (capsule, manifest): (CapsuleId, &Manifest),
        phase: Phase,
    ) -> Result<(), DaemonError> {
        let mut turn = machine.try_lock("rewind", None)?;
        let mut record = turn.record.clone();
        record.bases = disk_bases(manifest);
        (record.origin, record.last) = (Some(capsule), Some(capsule));
        (record.phase, record.since_ms) = (phase, crate::now_ms());
        let dirs = self.directories.machine_dirs(&record.name);
        for (index, base) in record.bases.iter().enumerate() {
            let size = record.config.disks[index].size.0;
            StoppedDisk::create((&dirs, &self.store), (index, size), base)?;
        }
        record.save(&self.directories)?;
        turn.record = record;
        Ok(())
    }
}
