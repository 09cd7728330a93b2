//! Aligned pages: a disk as an array of aligned pages for the capture engine. [`AlignedPageView`] serves one
//! of several consumers of a disk, [`AlignedPages`] is an array of its own.
//!
//! Writes are tracked by pages of the disk, so a written file page that spans two of them dirties up to three
//! aligned pages. The contract of a dirty set allows that, and unchanged pages are not sent.

use crate::{AlignedDisk, AlignmentMismatch, Device, DiskPages, TrackedDevice};
use std::sync::Arc;
use whimbrel_alignment::PageAlignment;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError, PageView};

/// View of a disk's pages as aligned pages.
pub struct AlignedPageView {
    name: String,
    pages: AlignedDisk,
}

impl AlignedPageView {
    /// Views `device`, called `name`, with the alignment `cuts`.
    ///
    /// # Errors
    /// If the alignment is for a disk of another size.
    pub fn new(
        name: String,
        device: Arc<dyn Device>,
        cuts: PageAlignment,
    ) -> Result<Self, AlignmentMismatch> {
        Ok(Self { name, pages: AlignedDisk::new(device, cuts)? })
    }
}

impl PageView for AlignedPageView {
    fn page_count(&self) -> u64 {
        self.pages.alignment().page_count()
    }

    fn view_pages(&self, pages: &PageSet) -> PageSet {
        self.pages.alignment().to_aligned(pages)
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.pages.read_at(run.offset(), out).map_err(|error| PageError::new(&self.name, "read", error))
    }
}

/// Disk as an array of aligned pages whose baseline is zeros.
pub struct AlignedPages {
    disk: DiskPages,
    view: AlignedPageView,
}

impl AlignedPages {
    /// Array of `device`, called `name`, with the alignment `cuts`.
    ///
    /// # Errors
    /// If the alignment is for a disk of another size.
    pub fn new(
        name: String,
        device: Arc<TrackedDevice>,
        cuts: PageAlignment,
    ) -> Result<Self, AlignmentMismatch> {
        let view = AlignedPageView::new(name.clone(), device.clone(), cuts)?;
        Ok(Self { disk: DiskPages { name, device }, view })
    }
}

impl PageArray for AlignedPages {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn page_count(&self) -> u64 {
        self.view.page_count()
    }

    fn populated(&mut self) -> Result<PageSet, PageError> {
        self.disk.populated().map(|pages| self.view.view_pages(&pages))
    }

    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        self.disk.take_dirty().map(|pages| self.view.view_pages(&pages))
    }

    fn put_back(&mut self, pages: &PageSet) {
        self.disk.put_back(&self.view.pages.alignment().to_disk(pages));
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.view.read(run, out)
    }
}
