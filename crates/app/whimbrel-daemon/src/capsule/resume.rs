//! Resume: a machine made from a capsule.
//!
//! The order: start a QEMU, serve memory on demand, put the disks over the capsule's images, load the device
//! state, write the record, and only then run the CPUs. A failure before the end leaves nothing behind.

use crate::{
    capsule::disk_alignment::disk_bases,
    core::state::Core,
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::record::{Phase, Record},
    network::tunnel,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{
    CapsuleRef, CloneNetwork, MachineSettings, MoveNetwork, Operation, OperationKind, OperationResult,
    ResumeMode, ResumeRequest, Unit, is_bucket,
};
use whimbrel_core::{ByteSize, CapsuleId, MachineName};
use whimbrel_image::Manifest;
use whimbrel_migrate::protocol::HomeNetwork;
use whimbrel_qemu::VmIdentity;
use whimbrel_vm::{RunningMachine, remove_overlays};

/// Interval at which a full resume polls for the end of its loading.
const FULL_POLL: Duration = Duration::from_millis(20);

pub(super) struct Plan<'a> {
    pub(super) capsule: CapsuleId,
    pub(super) manifest: &'a Manifest,
    pub(super) name: MachineName,
    pub(super) mode: ResumeMode,
    pub(super) fetch_rest: bool,
    pub(super) network: CloneNetwork,
    /// Home network, if the network is not here.
    pub(super) tunnel: Option<HomeNetwork>,
    pub(super) kind: Relation,
}

/// Relation of the machine to the one that the capsule was taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relation {
    /// The suspended machine itself.
    Same,
    /// A copy with its own memory.
    Copy,
    /// A clone: clones share the memory that none of them has written to.
    Clone,
}

impl Daemon {
    pub(crate) fn resume(self: &Arc<Self>, request: ResumeRequest) -> Result<Operation, DaemonError> {
        let (host, subject) = (self.clone(), request.capsule.to_string());
        let begun = Instant::now();
        let here = self.find_locally(&request)?;
        if let Some((_, manifest)) = &here {
            let name = name_for(&request, manifest)?;
            if request.reclaim {
                self.reclaim(&name)?;
            }
            self.machines.check_free(&name, true)?;
        }
        Ok(self.operations().start(OperationKind::Resume, subject, move |reporter| {
            // Until the machine has its own pin.
            let (capsule, manifest, _pin) = match here {
                Some((capsule, manifest)) => (capsule, manifest, None),
                None => {
                    reporter.progress("fetching the manifest", Unit::Items, 0, None);
                    let itself =
                        |machine: &MachineName| request.name.as_ref().is_none_or(|name| name == machine);
                    match &request.pool {
                        Some(bucket) if is_bucket(bucket) => {
                            let found = host.fetch_to_resume_from_bucket(bucket, &request.capsule)?;
                            (found.0, found.1, None)
                        }
                        Some(pool) => {
                            let name = request.name.as_ref();
                            let found = host.fetch_pooled_to_resume(pool, &request.capsule, name)?;
                            (found.0, found.1, None)
                        }
                        None => {
                            let found =
                                host.fetch_to_resume(request.host.as_ref(), &request.capsule, itself)?;
                            (found.0, found.1, Some(found.2))
                        }
                    }
                }
            };
            let name = name_for(&request, &manifest)?;
            host.machines.check_free(&name, true)?;
            let kind = if host.is_suspended_as(&name, &capsule) { Relation::Same } else { Relation::Copy };
            let network = CloneNetwork::Same;
            let ResumeRequest { mode, then_full, .. } = request;
            let tunnel = host.tunnel_of(request.network, &manifest, (capsule, kind))?;
            let (manifest, name) = (&manifest, name.clone());
            let plan = Plan { capsule, manifest, name, mode, fetch_rest: then_full, network, tunnel, kind };
            check_not_cancelled(reporter)?;
            host.make_machine(&plan, reporter)?;
            let name = plan.name;
            let to_running_ms = begun.elapsed().as_secs_f64() * 1e3;
            host.prestart_qemu(&manifest.machine);
            Ok(OperationResult::Resume { machines: vec![name], to_running_ms })
        }))
    }

    /// Resumes a machine that is suspended here from any of its capsules.
    pub(super) fn resume_suspended(
        self: &Arc<Self>,
        name: &MachineName,
        (capsule, manifest): (CapsuleId, &Manifest),
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        let (kind, mode, network) = (Relation::Same, ResumeMode::Lazy, CloneNetwork::Same);
        let tunnel = self.tunnel_of(None, manifest, (capsule, kind))?;
        let name = name.clone();
        let plan = Plan { capsule, manifest, name, mode, fetch_rest: false, network, tunnel, kind };
        self.make_machine(&plan, reporter)
    }

    /// Reclaims a machine that was handed off: the user knows that the other host will not run it.
    fn reclaim(&self, name: &MachineName) -> Result<(), DaemonError> {
        let Ok(machine) = self.machines.get(name) else { return Ok(()) };
        let mut turn = machine.try_lock("resume", None)?;
        if let Phase::Given { capsule, .. } = turn.record.phase {
            turn.record.phase = Phase::Suspended { capsule };
            turn.record.save(&self.directories)?;
        }
        Ok(())
    }

    /// Network of a resumed machine: as requested, by default where it was.
    fn tunnel_of(
        &self,
        wanted: Option<MoveNetwork>,
        manifest: &Manifest,
        (capsule, kind): (CapsuleId, Relation),
    ) -> Result<Option<HomeNetwork>, DaemonError> {
        let had = tunnel::home_of(manifest).filter(|tunnel| tunnel.home != self.name);
        match wanted {
            Some(MoveNetwork::Home) => self.tunnel_home(manifest, capsule),
            None if kind == Relation::Same => Ok(had),
            Some(MoveNetwork::Local) if kind == Relation::Same => {
                had.into_iter().for_each(|tunnel| self.leave_tunnel(tunnel));
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn is_suspended_as(&self, name: &MachineName, capsule: &CapsuleId) -> bool {
        let Ok(machine) = self.machines.get(name) else { return false };
        let Ok(turn) = machine.try_lock("resume", None) else { return false };
        turn.record.phase == Phase::Suspended { capsule: *capsule }
    }

    fn make_machine(
        self: &Arc<Self>,
        plan: &Plan<'_>,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        let _claim = self.machines.reserve(&plan.name, true)?;
        // A suspended machine of that name stays suspended until the new one runs.
        let suspended = self.machines.get(&plan.name).ok();
        let suspended = suspended.as_ref().map(|machine| machine.try_lock("resume", Some(reporter.id)));
        let suspended = suspended.transpose()?;
        if suspended.is_some() {
            // The capsule has the disks. A resume that failed may have left overlays.
            remove_overlays(&self.directories.live_bitmaps(), &self.directories.machine(&plan.name));
        }
        let settings = suspended.as_ref().map(|turn| turn.record.settings.clone());
        let (mut record, live) = self.prepare_machine(plan, settings.unwrap_or_default(), reporter)?;
        self.end_tunnels_of(&mut record);
        let view = live.pager_view();
        match suspended {
            Some(turn) => self.register_restarted(record, live, &turn.record)?,
            None => self.register_started(record, live)?,
        };
        if let Some(view) = view {
            if plan.fetch_rest && self.is_partial(&plan.capsule) {
                self.fetch_complete_later(plan.capsule, view.clone());
            }
            self.save_prefetch_list_later(plan.capsule, view);
        }
        Ok(())
    }

    /// The machine of a plan, whose name the caller has reserved, before its first instruction here.
    pub(super) fn prepare_machine(
        &self,
        plan: &Plan<'_>,
        settings: MachineSettings,
        reporter: &ProgressReporter,
    ) -> Result<(Record, RunningMachine), DaemonError> {
        if self.is_partial(&plan.capsule) {
            reporter.progress("prefetching pages", Unit::Items, 0, None);
            self.prefetch(plan.capsule, plan.manifest);
        }
        self.materialize_boot_files(plan.manifest)?;
        let mut record = plan.record();
        record.settings = settings;
        let live = match plan.manifest.device.is_empty() {
            true => {
                let mut live = self.boot(&record)?;
                if let Err(error) = live.set_stored_bases(&plan.manifest.images) {
                    live.end();
                    return Err(error.into());
                }
                live
            }
            false => self.restore(plan, &record, reporter)?,
        };
        Ok((record, live))
    }

    fn restore(
        &self,
        plan: &Plan<'_>,
        record: &Record,
        reporter: &ProgressReporter,
    ) -> Result<RunningMachine, DaemonError> {
        let parts = plan.manifest.device.iter().map(|part| self.store.blob(part));
        let parts =
            parts.collect::<Result<Vec<_>, _>>().map_err(refs::store_error("read the device state"))?;
        let device_state = parts.concat();
        let memory = plan.manifest.image("memory").and_then(|image| image.root);
        let warm = match plan.kind {
            Relation::Same | Relation::Copy => self.take_or_start_qemu(&record.config)?,
            Relation::Clone => self.start_clone(&record.config, (memory, record.config.memory))?,
        };
        let mut live = self.restore_machine(record, memory, warm)?;
        let loaded = self.prefetch_memory(plan, &live, reporter).and_then(|()| {
            live.load(&device_state, VmIdentity::New)?;
            Ok(live.set_stored_bases(&plan.manifest.images)?)
        });
        match loaded {
            Ok(()) => Ok(live),
            Err(error) => {
                live.end();
                Err(error)
            }
        }
    }

    /// Prefetches memory before the machine runs or while it does.
    fn prefetch_memory(
        &self,
        plan: &Plan<'_>,
        live: &RunningMachine,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        if plan.mode == ResumeMode::Lazy && !plan.fetch_rest {
            // What the machine touched first the last time is read while the device state is loaded. The
            // memory of clones is there already, or one of them reads it for all.
            let view = live.pager_view().filter(|_| plan.kind != Relation::Clone);
            if let Some(memory) = plan.manifest.image("memory")
                && let Some((view, list)) = view.zip(self.prefetch_list(&plan.capsule, plan.manifest))
            {
                list.of("memory", memory.pages).iter().for_each(|pages| view.prefetch(pages));
            }
            return Ok(());
        }
        match plan.mode {
            ResumeMode::Full => self.fetch_complete(plan.capsule, reporter)?,
            // Prefetching single pages would delay the fetch of the complete capsule; see `make`.
            ResumeMode::Lazy if self.is_partial(&plan.capsule) => return Ok(()),
            ResumeMode::Lazy => {}
        }
        live.memory.prefetch_all();
        if plan.mode == ResumeMode::Lazy { Ok(()) } else { wait_for_all(live, reporter) }
    }
}

impl Core {
    /// The capsule, if the request names no other source and it is here.
    fn find_locally(&self, request: &ResumeRequest) -> Result<Option<(CapsuleId, Manifest)>, DaemonError> {
        if request.host.is_some() || request.pool.is_some() {
            return Ok(None);
        }
        match self.find(&request.capsule) {
            Err(DaemonError::NotFound { .. }) if !self.trust.list().unwrap_or_default().is_empty() => {
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// Writes boot files to the disk, since QEMU reads them by name.
    pub(crate) fn materialize_boot_files(&self, manifest: &Manifest) -> Result<(), DaemonError> {
        for digest in manifest.machine.boot_files() {
            if !self.directories.boot_file(&digest).exists() {
                let content = self.store.blob(&digest).map_err(refs::store_error("read a boot file"))?;
                self.write_boot_file(&digest, &content)?;
            }
        }
        Ok(())
    }
}

impl Plan<'_> {
    fn record(&self) -> Record {
        let mut config = self.manifest.machine.clone();
        if self.network == CloneNetwork::Isolated {
            config.nics.iter_mut().for_each(|nic| nic.bridge = None);
        }
        let bases = disk_bases(self.manifest);
        let mut record = Record::new(self.name.clone(), config, bases);
        record.origin = Some(self.capsule);
        record.last = Some(self.capsule);
        let former = self.manifest.labels.get(refs::BALLOON_LABEL).and_then(|bytes| bytes.parse().ok());
        record.squeezed_from = former
            .map(ByteSize)
            .and_then(|size| crate::machine::balloon::checked_size(size, record.config.memory).ok());
        record.ballooned = record.squeezed_from.filter(|size| *size < record.config.memory);
        record.tunnel = self.tunnel.clone();
        if self.kind != Relation::Same {
            // A copy is another machine: its first capsule is a child of this one, not its successor.
            record.last = None;
        }
        record
    }
}

/// Ends an operation that was cancelled before a machine was made.
pub(super) fn check_not_cancelled(reporter: &ProgressReporter) -> Result<(), DaemonError> {
    match reporter.is_cancelled() {
        true => Err(DaemonError::Cancelled { left: "no machine was made".into() }),
        false => Ok(()),
    }
}

/// Waits until all memory has arrived.
fn wait_for_all(live: &RunningMachine, reporter: &ProgressReporter) -> Result<(), DaemonError> {
    loop {
        let (resident, total, stalled) = live.memory.progress();
        reporter.progress("reading memory", Unit::Pages, resident, Some(total));
        if let Some(stalled) = stalled {
            return Err(DaemonError::Memory { source: stalled.into() });
        }
        if live.memory.wait_resident(FULL_POLL) {
            return Ok(());
        }
        if reporter.is_cancelled() {
            return Err(DaemonError::Cancelled { left: "no machine was made".into() });
        }
    }
}

fn name_for(request: &ResumeRequest, manifest: &Manifest) -> Result<MachineName, DaemonError> {
    match (&request.name, &request.capsule) {
        (Some(name), _) => Ok(name.clone()),
        // The machine may have had another name then.
        (None, CapsuleRef::Past(past)) => Ok(past.machine.clone()),
        (None, _) => refs::machine_of(manifest),
    }
}
