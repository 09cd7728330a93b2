//! Offer to a standby: the machine is described as to the target of a migration.
//!
//! All baselines are zeros, so that what the standby lacks is what differs from zeros.

use crate::{core::error::DaemonError, daemon::Daemon, machine::record::Record, running::RunningMachine};
use whimbrel_core::Digest;
use whimbrel_migrate::protocol::{ArrayOffer, HandoverId, Offer};

/// Describes a machine for its standby.
pub(in crate::protect) fn of(
    host: &Daemon,
    record: &Record,
    live: &RunningMachine,
    handover: HandoverId,
) -> Result<Offer, DaemonError> {
    let file_len = |digest: Digest| {
        let path = host.directories.boot_file(&digest);
        let meta = std::fs::metadata(&path).map_err(|source| DaemonError::io("read", &path, source))?;
        Ok((digest, meta.len()))
    };
    let boot = record.config.boot.iter().flat_map(|boot| [Some(boot.kernel), boot.initrd]).flatten();
    let arrays = live.dirty_logs.iter();
    let arrays = arrays.map(|l| ArrayOffer { name: l.name().to_owned(), pages: l.page_count() });
    Ok(Offer {
        handover,
        name: record.name.clone(),
        config: record.config.clone(),
        arrays: arrays.collect(),
        vmgenid: record.vmgenid.clone().unwrap_or_default(),
        origin: record.last.or(record.origin),
        blobs: boot.map(file_len).collect::<Result<_, DaemonError>>()?,
        qemu_version: host.qemu()?.version.to_string(),
        disk_bytes: crate::migrate::target::incoming::disk_bytes(record, live),
        processor: crate::migrate::target::incoming::processor(),
        tunnel: None,
        bases: Vec::new(),
        files: Vec::new(),
        leaves: None,
        third: None,
        paused: false,
    })
}
