//! Offer to a standby: the machine is described as to the target of a migration.
//!
//! All baselines are zeros, so that what the standby lacks is what differs from zeros.

use crate::{core::error::DaemonError, daemon::Daemon, machine::record::Record, running::RunningMachine};
use whimbrel_migrate::protocol::{HandoverId, Offer};

/// Describes a machine for its standby.
pub(in crate::protect) fn of(
    host: &Daemon,
    record: &Record,
    live: &RunningMachine,
    handover: HandoverId,
) -> Result<Offer, DaemonError> {
    let offer = host.offer(record, live, None)?;
    Ok(Offer { handover, bases: Vec::new(), paused: false, ..offer })
}
