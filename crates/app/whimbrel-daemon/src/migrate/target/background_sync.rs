//! Background sync: syncs the disks of an incoming machine while pages arrive, which shortens the downtime.

use std::thread::{self, JoinHandle};
use whimbrel_block::Device;
use whimbrel_vm::RunningDisk;

/// Bytes written after which a sync is due.
const SYNC_BYTES: u64 = 32 << 20;

/// Syncs disks in the background, one sync at a time.
#[derive(Default)]
pub(crate) struct BackgroundSync {
    unsynced: u64,
    running: Option<JoinHandle<()>>,
}

impl BackgroundSync {
    /// Counts bytes written to the disks and starts a sync if one is due.
    pub(crate) fn add_written(&mut self, bytes: u64, disks: &[RunningDisk]) {
        self.unsynced += bytes;
        if self.unsynced < SYNC_BYTES || self.running.as_ref().is_some_and(|sync| !sync.is_finished()) {
            return;
        }
        let devices: Vec<_> = disks.iter().map(|disk| disk.device().clone()).collect();
        // A failure latches the device, and the sync in the pause reports it, which is the one that counts.
        let sync = move || devices.iter().for_each(|device| drop(device.flush()));
        match thread::Builder::new().name("settle".into()).spawn(sync) {
            Ok(sync) => (self.unsynced, self.running) = (0, Some(sync)),
            Err(error) => tracing::debug!(%error, "no sync thread: disks are synced at the end only"),
        }
    }
}
