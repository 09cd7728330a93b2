//! Balloon of a machine: guest memory that is taken before its state is saved, and given back afterwards.
//!
//! Invariant: the record has the former memory size from before anything is taken until it was given back. So
//! the guest gets all its memory back when the operation has ended, after a restart of the daemon, or where
//! its capsule is resumed.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter, state::Core},
    machine::record::Record,
};
use whimbrel_api::{BalloonTarget, Unit};
use whimbrel_core::ByteSize;
use whimbrel_vm::{BalloonGoal, RunningMachine};

/// Smallest memory that a guest may be left with.
const SIZE_MIN: u64 = 1 << 20;

impl Core {
    /// Shrinks the guest's memory as requested and returns how much it gave up. A paused guest can give none.
    pub(crate) fn shrink_guest(
        &self,
        record: &mut Record,
        live: &mut RunningMachine,
        how: BalloonTarget,
        reporter: &ProgressReporter,
    ) -> Result<Option<ByteSize>, DaemonError> {
        let memory = record.config.memory;
        let goal = match how {
            BalloonTarget::Off => return Ok(None),
            BalloonTarget::Auto if live.is_paused() => return Ok(None),
            BalloonTarget::To { .. } if live.is_paused() => {
                let (name, state) = (record.name.clone(), "paused");
                return Err(DaemonError::State { name, state, needed: "running" });
            }
            BalloonTarget::Auto => BalloonGoal::Spare { memory },
            BalloonTarget::To { size } => BalloonGoal::To(checked_size(size, memory)?),
        };
        // Not the balloon's current size: a guest that was shrunk a moment ago is still taking its memory
        // back.
        let former = record.ballooned.unwrap_or(memory);
        // A guest without a balloon fails here, before anything is recorded.
        live.memory_left()?;
        record.squeezed_from = Some(former);
        record.save(&self.directories)?;
        let left = live.shrink_memory(goal, &mut |left| {
            reporter.progress("shrinking guest memory", Unit::Bytes, left, None);
            !reporter.is_cancelled()
        });
        let cancelled = || DaemonError::Cancelled { left: "the machine runs on, nothing was stored".into() };
        match left.map_err(DaemonError::from).and_then(|left| left.ok_or_else(cancelled)) {
            Ok(left) => Ok(Some(ByteSize(former.0.saturating_sub(left.0)))),
            Err(error) => {
                self.restore_balloon(record, live);
                Err(error)
            }
        }
    }

    /// Gives a guest its memory back, if it was shrunk. After a failure the next daemon tries again.
    pub(crate) fn restore_balloon(&self, record: &mut Record, live: &RunningMachine) {
        let Some(former) = record.squeezed_from else { return };
        let former = former.min(record.config.memory);
        let given = live.set_balloon(former).map_err(DaemonError::from).and_then(|()| {
            record.squeezed_from = None;
            record.save(&self.directories)
        });
        if let Err(error) = given {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(name = %record.name, error, "could not give a guest all of its memory back");
        }
    }
}

/// Checks a size that a user wants to leave a guest.
pub(crate) fn checked_size(size: ByteSize, memory: ByteSize) -> Result<ByteSize, DaemonError> {
    match size.0 {
        SIZE_MIN.. if size <= memory => Ok(size),
        _ => Err(DaemonError::invalid(format!("the balloon size must be between 1 MiB and {memory}"))),
    }
}
