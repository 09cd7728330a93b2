//! Schedules and the daemon: what their work is in its terms, and the thread that runs what is due.

use crate::{
    capsule::checkpoint::CheckpointOptions,
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};
use whimbrel_api::{
    BalloonTarget, BucketRequest, CapsuleRef, EventKind, Operation, OperationResult, OperationState,
    PushRequest, ScheduledWork, is_bucket,
};
use whimbrel_core::{CapsuleId, HostName, MachineName, RefName};
use whimbrel_schedule::{HostFailure, ScheduledActions};
use whimbrel_store::{Expected, StoreError};
use whimbrel_vm::CapturedArrays;

/// Interval at which due schedules are looked for. Short, as a clock may be put forward or back.
const LOOK: Duration = Duration::from_secs(10);

/// A daemon, as schedules see it.
pub(crate) struct Actions(pub(crate) Arc<Daemon>);

impl Actions {
    fn begin(
        &self,
        work: &ScheduledWork,
        tag: &RefName,
        copied: Option<CapsuleId>,
    ) -> Result<Operation, DaemonError> {
        let daemon = &self.0;
        match work {
            ScheduledWork::Checkpoint { machine, disks_only, .. } => {
                let arrays = if *disks_only { CapturedArrays::Disks } else { CapturedArrays::All };
                let options = CheckpointOptions {
                    tag: Some(tag.clone()),
                    arrays,
                    ..CheckpointOptions::without_tag(BalloonTarget::Off)
                };
                daemon.start_checkpoint(machine, options)
            }
            ScheduledWork::Push { machine, host, pool, .. } => {
                let capsule = copied.map_or_else(|| self.newest_capsule(machine), Ok)?;
                // The id, since by its name the machine itself would be handed off.
                let request = PushRequest {
                    subject: CapsuleRef::Id(capsule),
                    host: host.clone(),
                    pool: pool.clone(),
                    balloon: BalloonTarget::Off,
                    follow: false,
                    unfollow: false,
                };
                let is_to_bucket = pool.as_deref().is_some_and(is_bucket);
                let name = match copied {
                    Some(_) => Some(tag.clone()),
                    // Each run would leave another name there, which nobody removes.
                    None if is_to_bucket => machine.as_str().parse().ok(),
                    None => None,
                };
                daemon.push_as(request, name)
            }
            ScheduledWork::Verify { bucket: None } => Ok(daemon.verify()),
            ScheduledWork::Gc { bucket: None } => Ok(daemon.gc()),
            ScheduledWork::Verify { bucket: Some(bucket) } | ScheduledWork::Gc { bucket: Some(bucket) } => {
                let (gc, bucket) = (matches!(work, ScheduledWork::Gc { .. }), bucket.clone());
                daemon.tend_bucket(BucketRequest { bucket, untag: None, gc, verify: !gc })
            }
        }
    }

    fn newest_capsule(&self, machine: &MachineName) -> Result<CapsuleId, DaemonError> {
        let newest = self.0.store.get_ref(&refs::machine_ref(machine));
        newest.map_err(refs::store_error("read a ref"))?.ok_or_else(|| DaemonError::NotFound {
            what: "capsule of the machine",
            name: machine.to_string(),
        })
    }

    /// The result of an operation, in words, when it has ended.
    fn wait_for(&self, operation: &Operation) -> Result<String, DaemonError> {
        let mut watch = self.0.operations().watch(operation.id)?;
        let ended = watch.wait_for(|now| now.state != OperationState::Running);
        let state = self.0.runtime.block_on(ended).map(|now| now.state.clone());
        match state {
            Ok(OperationState::Succeeded { result }) => outcome(result),
            Ok(OperationState::Failed { error }) => {
                let causes = [vec![error.message], error.causes].concat();
                Err(DaemonError::invalid(causes.join(": ")))
            }
            Ok(OperationState::Cancelled { left }) => Err(DaemonError::Cancelled { left }),
            Ok(OperationState::Running) | Err(_) => Err(DaemonError::Panicked),
        }
    }
}

impl ScheduledActions for Actions {
    fn now_ms(&self) -> u64 {
        crate::now_ms()
    }

    fn host(&self) -> HostName {
        self.0.name.clone()
    }

    fn newest(&self, machine: &MachineName) -> Result<CapsuleId, HostFailure> {
        Ok(self.newest_capsule(machine)?)
    }

    fn perform(
        &self,
        work: &ScheduledWork,
        tag: &RefName,
        copied: Option<CapsuleId>,
    ) -> Result<String, HostFailure> {
        Ok(self.wait_for(&self.begin(work, tag, copied)?)?)
    }

    fn refs(&self) -> Result<BTreeMap<RefName, CapsuleId>, HostFailure> {
        Ok(self.0.store.list_refs().map_err(refs::store_error("read the refs"))?)
    }

    fn readable_refs(&self) -> BTreeMap<RefName, CapsuleId> {
        self.0.store.readable_refs().unwrap_or_default().0
    }

    fn remove(&self, name: &RefName, capsule: CapsuleId) -> Result<(), HostFailure> {
        match self.0.store.delete_ref(name, Expected::Capsule(capsule)) {
            // A user removed it meanwhile.
            Ok(()) | Err(StoreError::Unknown { .. }) => Ok(()),
            Err(error) => Err(refs::store_error("remove an old tag")(error).into()),
        }
    }

    fn report_end(&self, schedule: &MachineName, outcome: &str) {
        self.0.events.add(EventKind::Schedule, schedule, outcome);
    }
}

/// What was done, in words. A store with damage is a failure of its verification.
fn outcome(result: OperationResult) -> Result<String, DaemonError> {
    match result {
        OperationResult::Checkpoint(taken) => Ok(format!("capsule {}", taken.capsule.short())),
        OperationResult::Push { report, .. } => {
            Ok(format!("{} is at {}", report.capsule.short(), report.host))
        }
        OperationResult::Verify { damaged, objects, .. } => match damaged.first() {
            None => Ok(format!("{objects} objects are whole")),
            Some(first) => Err(DaemonError::invalid(format!(
                "{} damaged places, the first {}: {}; `whimbrel repair` heals what another host has",
                damaged.len(),
                first.place,
                first.problem
            ))),
        },
        OperationResult::Gc { freed, .. } | OperationResult::Bucket { freed, .. } => {
            Ok(format!("{freed} freed"))
        }
        _ => Ok("done".to_owned()),
    }
}

impl Daemon {
    /// Runs schedules when they are due, as long as the daemon lives.
    pub(crate) fn start_schedules(self: &Arc<Self>) {
        let daemon = Arc::downgrade(self);
        let work = move || {
            while let Some(daemon) = Weak::upgrade(&daemon) {
                for name in daemon.schedules.due(crate::now_ms()) {
                    daemon.start_scheduled(name);
                }
                if !daemon.sleep_unless_closing(LOOK) {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("schedules".into()).spawn(work) {
            tracing::error!(%error, "no schedule runs");
        }
    }

    /// Runs one on a thread of its own: a long verification must not delay checkpoints.
    fn start_scheduled(self: &Arc<Self>, name: MachineName) {
        let daemon = self.clone();
        let run = move || {
            if let Err(error) = daemon.schedules.run(&name, &Actions(daemon.clone())) {
                let error = &error as &dyn std::error::Error;
                tracing::error!(schedule = %name, error, "a schedule could not run");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("scheduled".into()).spawn(run) {
            tracing::error!(%error, "no thread to run a schedule");
        }
    }
}
