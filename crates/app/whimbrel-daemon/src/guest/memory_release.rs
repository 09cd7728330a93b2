//! Memory that a guest frees before it is copied: caches whose content its disks have, and pages that it uses
//! for nothing.
//!
//! The program inside drops clean caches at once; the balloon then takes what is free, which punches it out
//! of the machine's memory here, and gives it back. What was punched is not copied and stays a hole until the
//! guest uses it again, here or there. Without the program the balloon alone does it: its pressure makes the
//! guest drop caches, more slowly.

use super::agent::AgentCommands;
use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::record::Record,
    running::RunningMachine,
};
use std::{os::unix::fs::MetadataExt as _, time::Duration};
use whimbrel_api::{BalloonTarget, Unit};
use whimbrel_core::ByteSize;
use whimbrel_guest_protocol::{Command, Report};

/// A guest full of caches takes a while to look through them.
const DROPS_WITHIN: Duration = Duration::from_secs(10);

impl Daemon {
    /// Has the guest free what it can spare, if that was asked for; how much less of its memory there is to
    /// copy.
    pub(crate) fn free_caches(
        &self,
        record: &mut Record,
        live: &mut RunningMachine,
        wanted: bool,
        reporter: &ProgressReporter,
    ) -> Result<Option<ByteSize>, DaemonError> {
        if !wanted || live.is_paused() {
            return Ok(None);
        }
        let before = in_use(live);
        drop_caches(&live.guest.orders(), reporter);
        self.squeeze(record, live, BalloonTarget::Auto, reporter)?;
        // Given back before anything is copied: what the guest has is what it had, wherever it is in the end.
        self.restore_balloon(record, live);
        let freed = before.zip(in_use(live)).map(|(before, after)| ByteSize(before.saturating_sub(after)));
        tracing::info!(name = %record.name, ?freed, "a guest has freed memory");
        Ok(freed)
    }
}

fn drop_caches(orders: &AgentCommands, reporter: &ProgressReporter) {
    if !orders.is_heard() {
        return;
    }
    reporter.progress("the guest drops its caches", Unit::Bytes, 0, None);
    match orders.ask(&Command::FreeCaches, DROPS_WITHIN) {
        Ok(Report::Freed { before, after }) => {
            tracing::debug!(before, after, "a guest has dropped its caches")
        }
        Ok(_) => {}
        Err(error) => tracing::info!(%error, "a guest keeps its caches"),
    }
}

/// What the machine's memory takes of the host's.
fn in_use(live: &RunningMachine) -> Option<u64> {
    std::fs::metadata(live.ram_path()).ok().map(|meta| meta.blocks().saturating_mul(512))
}
