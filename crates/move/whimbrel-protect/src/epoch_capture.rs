//! Capture of an epoch: everything that happens while the machine is paused.
//!
//! Pause, collect the dirty pages, copy them, save the device state, unpause. The buffer of the copy is
//! reused from epoch to epoch, and while epochs are large it is made as long as what is dirty before the
//! pause, so that the pause does not pay for fresh memory. One that is much too long is freed.
//!
//! Invariant: a page that was collected from a dirty log is in the capture or put back. A machine paused here
//! runs again on return, also after a failure, unless QEMU no longer obeys.

use crate::{error::PrimaryError, protocol::EPOCH_BYTES_MAX, stats::EpochPause};
use std::time::{Duration, Instant};
use whimbrel_capture::{CaptureSource, Consumer, DirtyLog};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageError, UnpauseReport};

/// Largest buffer that is kept whatever the epochs need.
const BUFFER_BYTES_KEPT: usize = 32 << 20;
/// Bytes of an epoch from which on fresh memory would be a noticeable part of the pause.
const LARGE_BYTES: u64 = 8 << 20;

/// Pages of an array with their content.
pub type ArrayPages<'a> = Vec<(u64, &'a [u8])>;

/// Changes of a machine from one instant to the next.
#[derive(Debug, Default)]
pub struct EpochCapture {
    runs: Vec<(u32, PageRun)>,
    buffer: Vec<u8>,
    /// The device state at the capture.
    pub device_state: Vec<u8>,
    /// Durations of the pause.
    pub pause: EpochPause,
}

impl EpochCapture {
    /// Number of captured pages.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|(_, run)| run.len).sum()
    }

    /// Number of captured pages that are in the set of their array.
    pub fn count_in(&self, sets: &[PageSet]) -> u64 {
        let count = |(array, run): &(u32, PageRun)| {
            run.pages().filter(|page| sets[*array as usize].contains(*page)).count() as u64
        };
        self.runs.iter().map(count).sum()
    }

    /// The pages of each array with their content, in ascending order.
    pub fn arrays(&self) -> Vec<(u32, ArrayPages<'_>)> {
        let mut arrays: Vec<(u32, ArrayPages<'_>)> = Vec::new();
        let mut rest = &self.buffer[..];
        for (array, run) in &self.runs {
            let (data, after) = rest.split_at(run.bytes());
            rest = after;
            let pages = run.pages().zip(data.chunks_exact(PAGE_SIZE));
            match arrays.last_mut() {
                Some((last, list)) if last == array => list.extend(pages),
                _ => arrays.push((*array, pages.collect())),
            }
        }
        arrays
    }

    /// Captures the next epoch. `stopped` is called during the pause, once all pages are copied.
    pub fn take(
        &mut self,
        subject: &mut CaptureSource<'_>,
        stopped: &mut dyn FnMut(),
    ) -> Result<(), PrimaryError> {
        self.make_room(subject)?;
        subject.machine.about_to_pause_for_state();
        let begun = Instant::now();
        // The device state is saved while dirty pages are collected and copied: saving it changes no memory,
        // which QEMU's own migration relies on too.
        subject.machine.pause_for_state()?;
        self.pause = EpochPause { stop: begun.elapsed(), ..EpochPause::default() };
        let mut taken = Vec::with_capacity(subject.dirty_logs.len());
        let pages = self.take_pages(subject.dirty_logs, subject.consumer, &mut taken);
        if pages.is_ok() {
            stopped();
        }
        let stood = begun.elapsed();
        let UnpauseReport { device_state, device_state_time: devices, unpause_time: go_on } =
            subject.machine.unpause_with_state();
        self.pause = EpochPause { devices, unpause: go_on, total: stood + devices + go_on, ..self.pause };
        let cut = pages.and_then(|()| device_state.map_err(PrimaryError::from));
        match cut {
            Ok(state) => self.device_state = state,
            Err(error) => {
                for (ledger, set) in subject.dirty_logs.iter_mut().zip(&taken) {
                    ledger.put_back(subject.consumer, set);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes the buffer ready before the pause, if the last epoch was large.
    fn make_room(&mut self, subject: &mut CaptureSource<'_>) -> Result<(), PageError> {
        let last = self.pages() * PAGE_SIZE as u64;
        if last < LARGE_BYTES {
            self.fit_buffer(last as usize);
            return Ok(());
        }
        subject.dirty_logs.iter_mut().try_for_each(DirtyLog::refresh)?;
        let dirty = subject.dirty_logs.iter().filter_map(|log| log.dirty_pages(subject.consumer));
        let bytes = dirty.map(PageSet::count).sum::<u64>() * PAGE_SIZE as u64;
        self.fit_buffer((bytes as usize).min(EPOCH_BYTES_MAX));
        Ok(())
    }

    /// Lets the buffer have at least these bytes, and not far more.
    fn fit_buffer(&mut self, bytes: usize) {
        if self.buffer.capacity() > BUFFER_BYTES_KEPT.max(2 * bytes) {
            self.buffer = Vec::new();
        }
        if self.buffer.len() < bytes {
            self.buffer.resize(bytes, 0);
        }
    }

    fn take_pages(
        &mut self,
        ledgers: &mut [DirtyLog],
        follower: Consumer,
        taken: &mut Vec<PageSet>,
    ) -> Result<(), PrimaryError> {
        let scanning = Instant::now();
        for ledger in ledgers.iter_mut() {
            taken.push(ledger.collect(follower)?);
        }
        self.pause.scan = scanning.elapsed();
        let bytes = taken.iter().map(PageSet::count).sum::<u64>() * PAGE_SIZE as u64;
        if bytes > EPOCH_BYTES_MAX as u64 {
            return Err(PrimaryError::EpochTooLarge { bytes });
        }
        self.runs.clear();
        for (array, set) in taken.iter().enumerate() {
            self.runs.extend(set.runs().map(|run| (array as u32, run)));
        }
        // The buffer is not shrunk between epochs, so it is zeroed only once.
        self.buffer.resize(self.buffer.len().max(bytes as usize), 0);
        let (runs, room) = (&self.runs, &mut self.buffer[..bytes as usize]);
        let copied = timed(|| copy(ledgers, runs, room));
        self.pause.copy = copied.1;
        Ok(copied.0?)
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    (work(), begun.elapsed())
}

fn copy(ledgers: &[DirtyLog], runs: &[(u32, PageRun)], room: &mut [u8]) -> Result<(), PageError> {
    let mut rest = room;
    for (array, run) in runs {
        let (out, after) = rest.split_at_mut(run.bytes());
        ledgers[*array as usize].read(*run, out)?;
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_epochs_reuse_one_buffer_and_small_ones_give_it_back() {
        let mut capture = EpochCapture::default();
        capture.fit_buffer(64 << 20);
        let place = capture.buffer.as_ptr();
        for bytes in [64 << 20, 40 << 20, 60 << 20] {
            capture.fit_buffer(bytes);
            assert!(capture.buffer.as_ptr() == place && capture.buffer.len() == 64 << 20, "{bytes}");
        }
        capture.fit_buffer(4096);
        assert!(capture.buffer.capacity() <= BUFFER_BYTES_KEPT);
        capture.fit_buffer(16 << 20);
        let place = capture.buffer.as_ptr();
        capture.fit_buffer(0);
        assert_eq!(capture.buffer.as_ptr(), place, "a short one is kept");
    }
}
