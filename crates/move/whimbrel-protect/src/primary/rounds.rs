//! Large epochs: more than a pause can copy is sent in rounds while the machine runs.
//!
//! The standby buffers what arrives beside the machine and applies it when the epoch ends, so the epoch
//! before stays whole until then. The last part is captured in a short pause as always. Between rounds that
//! leave too much for that, the machine is slowed down; if that does not help either, this gives up.

use super::{Committed, EpochSender};
use crate::{
    epoch::{PrimaryAction, PrimaryEvent},
    error::PrimaryError,
    protocol::EPOCH_PAGES_MAX,
};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};
use whimbrel_capture::{CaptureSource, Consumer, DirtyLog};
use whimbrel_core::{PAGE_SIZE, PageSet};
use whimbrel_migrate::link::LinkError;

/// Most rounds before it is given up.
const ROUNDS_MAX: u32 = 12;
/// Rounds after which the machine is slowed down.
const ROUNDS_FREE: u32 = 2;

impl EpochSender<'_> {
    /// Sends the next epoch in rounds and returns when the standby has committed it. `stopped` is called
    /// during the last pause; `observe` gets the pages of a round that were read so far and in total, and may
    /// cancel.
    pub fn large_epoch(
        &mut self,
        subject: &mut CaptureSource<'_>,
        ports: &dyn Fn() -> Vec<Vec<u8>>,
        stopped: &mut dyn FnMut(),
        observe: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Committed, PrimaryError> {
        let (state, action) = self.state.step(PrimaryEvent::Due);
        let Some(PrimaryAction::CaptureAndSend(epoch)) = action else {
            return Err(PrimaryError::Link(LinkError::Lost { source: "the standby is lost already".into() }));
        };
        self.state = state;
        subject.consumer = Consumer::Standby;
        self.encoder.set_seeding(true);
        let ahead = self.send_rounds(epoch, subject, stopped, observe);
        self.encoder.set_seeding(false);
        self.captured_at = Instant::now();
        let sent = ahead.and_then(|ahead| self.send(epoch, ahead, ports()));
        self.record_outcome(epoch, sent)
    }

    /// Sends rounds until the rest is captured. Returns how many pages were sent that are not in the capture.
    fn send_rounds(
        &mut self,
        epoch: u64,
        subject: &mut CaptureSource<'_>,
        stopped: &mut dyn FnMut(),
        observe: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<u64, PrimaryError> {
        let empty = |ledger: &DirtyLog| PageSet::empty(ledger.page_count());
        let mut sent: Vec<PageSet> = subject.dirty_logs.iter().map(empty).collect();
        let mut round = 1;
        loop {
            let taken = self.send_dirty_pages(Some(epoch), subject.dirty_logs, observe)?;
            sent.iter_mut().zip(&taken).for_each(|(sent, taken)| sent.union(taken));
            let pages: u64 = sent.iter().map(PageSet::count).sum();
            if pages > EPOCH_PAGES_MAX as u64 {
                return Err(PrimaryError::EpochTooLarge { bytes: pages * PAGE_SIZE as u64 });
            }
            match self.capture.take(subject, stopped) {
                Err(PrimaryError::EpochTooLarge { .. }) if round < ROUNDS_MAX => {
                    if round >= ROUNDS_FREE {
                        subject.machine.slow_down(Duration::MAX);
                    }
                    round += 1;
                }
                taken => {
                    taken?;
                    return Ok(pages - self.capture.count_in(&sent));
                }
            }
        }
    }
}
