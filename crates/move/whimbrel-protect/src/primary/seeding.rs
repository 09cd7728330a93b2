//! A copy for a standby that somebody else inherits: rounds while the machine runs, and a last one while it
//! stands still for good, sealed with the device state that the heir gets too.
//!
//! The machine is paused by whoever moves it; nothing here pauses it or lets it go on. What a round took and
//! did not deliver is lost to the ledgers' follower: a failure ends the protection, which has not begun.

use super::{EpochSender, Filler};
use crate::{epoch::PrimaryEpochs, error::PrimaryError};
use std::{collections::VecDeque, ops::ControlFlow};
use whimbrel_capture::{CaptureError, Consumer, DirtyLog, PageBatch, Sink};
use whimbrel_core::{PAGE_SIZE, PageSet};

/// Pages that are read at once.
const BATCH_PAGES: u64 = 256;

impl EpochSender<'_> {
    /// Sends what the standby has not seen, once; how many pages that were. `observe` is told how many of how
    /// many were read, and stops it.
    pub fn copy_round(
        &mut self,
        ledgers: &mut [DirtyLog],
        observe: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<u64, PrimaryError> {
        let taken = ledgers.iter_mut().map(|ledger| ledger.collect(Consumer::Standby));
        let taken = taken.collect::<Result<Vec<PageSet>, _>>()?;
        let total: u64 = taken.iter().map(PageSet::count).sum();
        self.encoder.first_copy(true);
        let mut sink =
            Filler { sender: self, list: Vec::new(), data: Vec::new(), unanswered: VecDeque::new() };
        let (mut done, mut data) = (0, vec![0; BATCH_PAGES as usize * PAGE_SIZE]);
        for (array, (ledger, set)) in ledgers.iter().zip(&taken).enumerate() {
            for run in set.runs().flat_map(|run| run.chunks(BATCH_PAGES).collect::<Vec<_>>()) {
                let data = &mut data[..run.bytes()];
                ledger.read(run, data)?;
                let batch = PageBatch { array, run, data, hot: None };
                sink.pages(batch).map_err(|error| PrimaryError::Copy(CaptureError::Sink(error)))?;
                done += run.len;
                if observe(done, total).is_break() {
                    return Err(PrimaryError::Copy(CaptureError::Cancelled));
                }
            }
        }
        sink.end_round().map_err(|error| PrimaryError::Copy(CaptureError::Sink(error)))?;
        Ok(total)
    }

    /// The last round, of a machine that stands still; then the standby is told that it is whole.
    pub fn copy_last(
        &mut self,
        ledgers: &mut [DirtyLog],
        device_state: &[u8],
        ports: Vec<Vec<u8>>,
    ) -> Result<(), PrimaryError> {
        self.copy_round(ledgers, &mut |_, _| ControlFlow::Continue(()))?;
        self.seal(0, 0, device_state.to_vec(), ports)
    }

    /// Goes on from a standby that somebody else has filled and sealed: the next epoch is the first.
    pub fn inherits(&mut self) {
        self.state = PrimaryEpochs::initial();
    }
}
