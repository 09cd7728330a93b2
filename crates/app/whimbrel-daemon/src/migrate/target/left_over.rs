//! Incoming machines that an earlier daemon left: what they wait for, and how they are discarded.

use super::handed_off;
use crate::{
    daemon::Daemon,
    machine::record::{Phase, Record},
};
use whimbrel_migrate::handover::PausedIncoming;
use whimbrel_vm::runtime_dir::{self, RuntimeMark};

/// What an earlier daemon left of an incoming machine; nothing of any other machine.
pub(crate) fn waiting(host: &Daemon, record: &Record) -> Option<PausedIncoming> {
    let Phase::Prepared { ahead, never_ran, .. } = record.phase else { return None };
    if never_ran {
        return Some(PausedIncoming::Gone);
    }
    let slot = record.process.as_ref().map(|process| host.directories.runtime_dir(&process.slot));
    Some(match slot.filter(|slot| slot.exists()) {
        None => PausedIncoming::Gone,
        Some(slot) if ahead && !RuntimeMark::Complete.is_on(&slot) => PausedIncoming::Unfinished,
        Some(_) => PausedIncoming::Complete,
    })
}

/// Discards a machine that came from another host and was not loaded to its end.
pub(crate) fn discard_unfinished(host: &Daemon, record: &Record) {
    tracing::info!(machine = %record.name, "discarding an incoming machine whose migration was interrupted");
    host.protections.remove_inherited(record);
    if let Some(process) = &record.process {
        runtime_dir::clear(&host.directories.runtime_dir(&process.slot));
    }
    handed_off::remove_incoming(host, record);
}
