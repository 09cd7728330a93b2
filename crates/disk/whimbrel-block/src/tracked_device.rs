//! Tracked device: a layer that records which pages were written.
//!
//! A page is marked *after* the write below returned, failed or not. So a reader that takes the marks and
//! then reads the pages sees every write that returned before. A write in progress during that read is marked
//! later and is in the next set, together with any half of it that the reader saw. Marking before the write
//! would lose it: the mark could be taken, the old page read, and the new data written unmarked.

use crate::{BlockError, Device, atomic_page_set::AtomicPageSet, layer::all_but_writes};
use std::sync::Arc;
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};

/// Device that tracks written pages.
pub struct TrackedDevice {
    inner: Arc<dyn Device>,
    written: AtomicPageSet,
}

impl TrackedDevice {
    /// Tracks `inner` from now on; no page is marked yet.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let written = AtomicPageSet::new(inner.size().div_ceil(PAGE_SIZE as u64));
        Self { inner, written }
    }

    /// Device below the layer.
    pub fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    /// Pages written since the last call: at least those whose write returned before this call began.
    pub fn take_dirty(&self) -> PageSet {
        self.written.take()
    }

    /// Marks `pages` again, after a `take_dirty` whose result was not used.
    pub fn put_back(&self, pages: &PageSet) {
        pages.runs().for_each(|run| self.written.insert(run));
    }

    fn mark(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size());
        if offset < end {
            self.written.insert(pages_of(offset, end - offset));
        }
    }
}

whimbrel_core::opaque_debug!(TrackedDevice);

/// Pages that bytes `offset .. offset + len` touch.
pub(crate) fn pages_of(offset: u64, len: u64) -> PageRun {
    let start = offset / PAGE_SIZE as u64;
    PageRun::new(start, (offset + len).div_ceil(PAGE_SIZE as u64) - start)
}

impl Device for TrackedDevice {
    all_but_writes!(inner);

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        let outcome = self.inner.write_at(offset, data);
        self.mark(offset, data.len() as u64);
        outcome
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        let outcome = self.inner.write_zeroes(offset, len);
        self.mark(offset, len);
        outcome
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        let outcome = self.inner.trim(offset, len);
        self.mark(offset, len);
        outcome
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        self.inner.may_wait(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemDevice;

    #[test]
    fn every_way_of_writing_is_seen_once_and_what_is_put_back_is_seen_again() {
        let device = TrackedDevice::new(Arc::new(MemDevice::new(vec![0; 16 * PAGE_SIZE])));
        device.write_at(4095, &[1, 2]).unwrap();
        device.write_zeroes(3 * 4096, 4096).unwrap();
        device.trim(5 * 4096, 1).unwrap();
        assert!(device.write_at(16 * 4096 - 1, &[0; 2]).is_err());
        let dirty = device.take_dirty();
        assert_eq!(dirty.iter().collect::<Vec<_>>(), [0, 1, 3, 5, 15]);
        assert!(device.take_dirty().is_empty());
        device.put_back(&dirty);
        assert_eq!(device.take_dirty(), dirty);
    }
}
