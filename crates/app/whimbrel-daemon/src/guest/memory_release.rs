//! Memory release: memory that a guest frees before it is copied, namely caches whose content its disks have,
//! and unused pages.
//!
//! The guest agent drops clean caches at once. The balloon then takes free memory, which punches holes into
//! the machine's memory here, and gives it back. Holes are not copied and stay holes until the guest uses
//! them again, here or there. Without the agent the balloon alone makes the guest drop caches, more slowly.

use crate::{
    core::state::Core,
    core::{error::DaemonError, operations::ProgressReporter},
    machine::record::Record,
};
use std::{os::unix::fs::MetadataExt as _, time::Duration};
use whimbrel_api::{BalloonTarget, Unit};
use whimbrel_core::ByteSize;
use whimbrel_guest_protocol::{Command, Report};
use whimbrel_vm::{AgentCommands, RunningMachine};

/// Time limit for dropping caches: a guest full of them takes a while.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

impl Core {
    /// Has the guest free what it can spare, if requested. Returns by how much its memory to copy has shrunk.
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
        drop_caches(&live.guest.commands(), reporter);
        self.shrink_guest(record, live, BalloonTarget::Auto, reporter)?;
        // Given back before anything is copied: the guest has all its memory wherever it is in the end.
        self.restore_balloon(record, live);
        let freed = before.zip(in_use(live)).map(|(before, after)| ByteSize(before.saturating_sub(after)));
        tracing::info!(name = %record.name, ?freed, "a guest has freed memory");
        Ok(freed)
    }
}

fn drop_caches(orders: &AgentCommands, reporter: &ProgressReporter) {
    if !orders.is_present() {
        return;
    }
    reporter.progress("dropping guest caches", Unit::Bytes, 0, None);
    match orders.ask(&Command::FreeCaches, DROP_TIMEOUT) {
        Ok(Report::Freed { before, after }) => {
            tracing::debug!(before, after, "a guest has dropped its caches")
        }
        Ok(_) => {}
        Err(error) => tracing::info!(%error, "a guest did not drop its caches"),
    }
}

fn in_use(live: &RunningMachine) -> Option<u64> {
    std::fs::metadata(live.ram_path()).ok().map(|meta| meta.blocks().saturating_mul(512))
}
