//! Disk pages: a tracked disk as a page array for the capture engine.

use crate::{BlockError, Device, ExtentKind, TrackedDevice, tracked_device::pages_of};
use std::sync::Arc;
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};

/// Bytes of an extent query, which bounds the list.
const WINDOW: u64 = 1 << 30;

/// Disk as an array of pages whose baseline is zeros.
pub struct DiskPages {
    /// Name of the array: `disk0`, `disk1`, …
    pub name: String,
    /// Tracked device of the disk.
    pub device: Arc<TrackedDevice>,
}

impl DiskPages {
    fn fail(&self, action: &'static str) -> impl Fn(BlockError) -> PageError {
        move |error| PageError::new(&self.name, action, error)
    }
}

impl PageArray for DiskPages {
    fn name(&self) -> &str {
        &self.name
    }

    fn page_count(&self) -> u64 {
        self.device.size().div_ceil(PAGE_SIZE as u64)
    }

    fn populated(&mut self) -> Result<PageSet, PageError> {
        let (mut pages, size) = (PageSet::empty(self.page_count()), self.device.size());
        for window in (0..size).step_by(WINDOW as usize) {
            let mut at = window;
            for extent in self.device.extents(window, WINDOW.min(size - window)).map_err(self.fail("scan"))? {
                if extent.kind == ExtentKind::Data {
                    pages.insert_run(pages_of(at, extent.len));
                }
                at += extent.len;
            }
        }
        Ok(pages)
    }

    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        Ok(self.device.take_dirty())
    }

    fn put_back(&mut self, pages: &PageSet) {
        self.device.put_back(pages);
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        // A disk may end inside its last page; the rest of that page is zeros.
        let on_disk = self.device.size().saturating_sub(run.offset()).min(out.len() as u64) as usize;
        let (data, past_end) = out.split_at_mut(on_disk);
        past_end.fill(0);
        self.device.read_at(run.offset(), data).map_err(self.fail("read"))
    }
}
