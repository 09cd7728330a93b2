//! Stored disk: a stored image as a read-only block device.

use crate::{error::StoreError, stored_image::StoredImage};
use whimbrel_block::{BlockError, Extent, ExtentKind};
use whimbrel_core::{EXTENT_PAGES, PAGE_SIZE, PageRun};

const PAGE: u64 = PAGE_SIZE as u64;
const EXTENT: u64 = EXTENT_PAGES as u64;

/// Read-only block device over a stored image; put a writable layer above it.
#[derive(Debug, Clone)]
pub struct StoredDisk {
    image: StoredImage,
}

impl StoredDisk {
    /// Creates the device over `image`.
    pub fn new(image: StoredImage) -> Self {
        Self { image }
    }

    fn content(offset: u64, len: u64) -> impl FnOnce(StoreError) -> BlockError {
        move |source| BlockError::Content { offset, len, source: Box::new(source) }
    }

    /// Reads a part of the first or last page of a range.
    fn read_part(&self, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let (mut page, within) = ([0; PAGE_SIZE], (offset % PAGE) as usize);
        self.image.read(PageRun::new(offset / PAGE, 1), &mut page)?;
        out.copy_from_slice(&page[within..within + out.len()]);
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let head = ((PAGE - offset % PAGE) % PAGE).min(out.len() as u64) as usize;
        let (head, rest) = out.split_at_mut(head);
        if !head.is_empty() {
            self.read_part(offset, head)?;
        }
        let start = offset + head.len() as u64;
        let (middle, tail) = rest.split_at_mut(rest.len() / PAGE_SIZE * PAGE_SIZE);
        self.image.read(PageRun::new(start / PAGE, (middle.len() / PAGE_SIZE) as u64), middle)?;
        if !tail.is_empty() {
            self.read_part(start + middle.len() as u64, tail)?;
        }
        Ok(())
    }

    fn kinds(&self, offset: u64, len: u64) -> Result<Vec<Extent>, StoreError> {
        let (mut extents, mut at, end) = (Vec::<Extent>::new(), offset, offset + len);
        while at < end {
            let page = at / PAGE;
            let present = self.image.present_in(page / EXTENT)?;
            let mut next = page;
            let bit = |page: u64| present[(page % EXTENT / 64) as usize] >> (page % 64) & 1 == 1;
            while next / EXTENT == page / EXTENT && next * PAGE < end && bit(next) == bit(page) {
                next += 1;
            }
            let kind = if bit(page) { ExtentKind::Data } else { ExtentKind::Hole };
            let len = (next * PAGE).min(end) - at;
            match extents.last_mut().filter(|last| last.kind == kind) {
                Some(last) => last.len += len,
                None => extents.push(Extent { len, kind }),
            }
            at += len;
        }
        Ok(extents)
    }
}

impl whimbrel_block::ReadOnlyDevice for StoredDisk {
    fn size(&self) -> u64 {
        self.image.page_count() * PAGE
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        let len = out.len() as u64;
        BlockError::check(offset, len, self.size())?;
        self.read(offset, out).map_err(Self::content(offset, len))
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size())?;
        self.kinds(offset, len).map_err(Self::content(offset, len))
    }
}
