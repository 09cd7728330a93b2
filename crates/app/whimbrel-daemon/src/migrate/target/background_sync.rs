//! What an arriving machine's disks get is made durable while it comes, so that little of that is left for
//! the pause.

use crate::running::RunningDisk;
use std::thread::{self, JoinHandle};
use whimbrel_block::Device;

/// A sync begins when so much was written since the last one.
const DUE: u64 = 32 << 20;

/// Syncs disks in the background, one sync at a time.
#[derive(Default)]
pub(crate) struct BackgroundSync {
    unsettled: u64,
    under_way: Option<JoinHandle<()>>,
}

impl BackgroundSync {
    /// So many bytes more were written to the disks.
    pub(crate) fn wrote(&mut self, bytes: u64, disks: &[RunningDisk]) {
        self.unsettled += bytes;
        if self.unsettled < DUE || self.under_way.as_ref().is_some_and(|sync| !sync.is_finished()) {
            return;
        }
        let devices: Vec<_> = disks.iter().map(|disk| disk.device().clone()).collect();
        // A failure latches the device and is told by the sync in the pause, which is the one that counts.
        let sync = move || devices.iter().for_each(|device| drop(device.flush()));
        match thread::Builder::new().name("settle".into()).spawn(sync) {
            Ok(sync) => (self.unsettled, self.under_way) = (0, Some(sync)),
            Err(error) => tracing::debug!(%error, "disks are synced at the end only"),
        }
    }
}
