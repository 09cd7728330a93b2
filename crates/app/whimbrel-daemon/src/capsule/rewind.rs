//! Rewind: takes a machine back to an earlier capsule, and keeps its present state as a capsule.
//!
//! The machine is suspended first, so nothing of it is lost whatever happens next. If the earlier state
//! cannot be resumed, the present one is.

use super::checkpoint::CheckpointOptions;
use crate::{
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::{entry::Machine, record::Phase},
};
use std::{sync::Arc, time::Instant};
use whimbrel_api::{BalloonTarget, Operation, OperationKind, OperationResult, RewindRequest};
use whimbrel_core::{CapsuleId, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::Expected;
use whimbrel_vm::Failpoint;

impl Daemon {
    /// Takes a running or suspended machine back to one of its capsules.
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
            let before = host.suspend_to_rewind(&machine, reporter)?;
            Failpoint::Rewind.reached_unless(|| reporter.is_cancelled());
            let rewound = host.tag_rewound(&before).and_then(|tag| {
                if reporter.is_cancelled() {
                    return Err(DaemonError::Cancelled { left: "the machine goes on as it was".into() });
                }
                host.resume_suspended(&name, (capsule, &manifest), reporter)?;
                Ok(tag)
            });
            let tag = rewound.inspect_err(|_| host.resume_as_before(&machine, before, reporter))?;
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

    /// The capsule that the machine is, or is suspended as now.
    fn suspend_to_rewind(
        &self,
        machine: &Machine,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let mut turn = machine.try_lock("rewind", Some(reporter.id))?;
        match turn.record.phase {
            Phase::Suspended { capsule } => Ok(capsule),
            _ => {
                let wanted = CheckpointOptions::without_tag(BalloonTarget::Off);
                Ok(self.suspend_in(&mut turn, &wanted, reporter)?.capsule)
            }
        }
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
    fn resume_as_before(self: &Arc<Self>, machine: &Machine, before: CapsuleId, reporter: &ProgressReporter) {
        let manifest = self.store.manifest(&before).map_err(refs::store_error("read the capsule"));
        let resumed = manifest
            .and_then(|manifest| self.resume_suspended(machine.name(), (before, &manifest), reporter));
        if let Err(error) = resumed {
            let error = &error as &dyn std::error::Error;
            tracing::error!(machine = %machine.name(), error, "a machine stays suspended after a failed rewind");
        }
    }
}
