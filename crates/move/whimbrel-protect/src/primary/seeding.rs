//! Seeding for inherited protection: rounds while the machine runs, then a last one after the final pause of
//! the migration.
//!
//! The last round ends with the device state that the target gets too. The migration pauses the machine;
//! nothing here pauses or unpauses it. A failure ends the protection, which has not started, so pages that a
//! round collected and did not deliver are not put back.

use super::{EpochSender, SeedSink};
use crate::{epoch::PrimaryEpochs, error::PrimaryError};
use std::{collections::VecDeque, ops::ControlFlow};
use whimbrel_capture::{CaptureError, Consumer, DirtyLog, PageBatch, Sink};
use whimbrel_core::{PAGE_SIZE, PageSet};

/// Pages that are read at once.
const BATCH_PAGES: u64 = 256;

impl EpochSender<'_> {
    /// Sends the dirty pages once and returns their number. `observe` gets the pages read so far and in
    /// total, and may cancel.
    pub fn copy_round(
        &mut self,
        ledgers: &mut [DirtyLog],
        observe: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<u64, PrimaryError> {
        self.encoder.set_seeding(true);
        let taken = self.send_dirty_pages(None, ledgers, observe)?;
        Ok(taken.iter().map(PageSet::count).sum())
    }

    /// Collects and sends the dirty pages once, to be buffered for `epoch`, if it is one. Returns them.
    pub(super) fn send_dirty_pages(
        &mut self,
        epoch: Option<u64>,
        ledgers: &mut [DirtyLog],
        observe: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<PageSet>, PrimaryError> {
        let taken = ledgers.iter_mut().map(|ledger| ledger.collect(Consumer::Standby));
        let taken = taken.collect::<Result<Vec<PageSet>, _>>()?;
        let total: u64 = taken.iter().map(PageSet::count).sum();
        let mut sink =
            SeedSink { sender: self, epoch, list: Vec::new(), data: Vec::new(), unanswered: VecDeque::new() };
        let (mut done, mut data) = (0, vec![0; BATCH_PAGES as usize * PAGE_SIZE]);
        for (array, (ledger, set)) in ledgers.iter().zip(&taken).enumerate() {
            for run in set.runs().flat_map(|run| run.chunks(BATCH_PAGES).collect::<Vec<_>>()) {
                let data = &mut data[..run.bytes()];
                ledger.read(run, data)?;
                let batch = PageBatch { array, run, data, hot: None };
                sink.write(batch).map_err(|error| PrimaryError::Seeding(CaptureError::Sink(error)))?;
                done += run.len;
                if observe(done, total).is_break() {
                    return Err(PrimaryError::Seeding(CaptureError::Cancelled));
                }
            }
        }
        sink.end_round().map_err(|error| PrimaryError::Seeding(CaptureError::Sink(error)))?;
        Ok(taken)
    }

    /// Sends the last round of a paused machine, then ends epoch 0.
    pub fn copy_last_round(
        &mut self,
        ledgers: &mut [DirtyLog],
        device_state: &[u8],
        ports: Vec<Vec<u8>>,
    ) -> Result<(), PrimaryError> {
        self.copy_round(ledgers, &mut |_, _| ControlFlow::Continue(()))?;
        self.end_epoch(0, 0, device_state.to_vec(), ports)
    }

    /// Continues a standby that another host has seeded: the next epoch is 1.
    pub fn inherit_standby(&mut self) {
        self.state = PrimaryEpochs::initial();
    }
}
