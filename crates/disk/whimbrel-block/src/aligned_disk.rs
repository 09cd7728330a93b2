//! Aligned disk: applies a [`PageAlignment`] to block devices, in both directions.
//!
//! [`AlignedDisk`] presents a disk as the aligned array that is hashed and stored; [`RawDisk`] presents such
//! an array as the disk. A range of any length is one call of the device below for each segment that it
//! touches, never one for each page. Padding reads as zeros; it is a hole of the aligned disk, and no byte of
//! the raw one. Neither has state; errors are those of the device below.

use crate::{BlockError, Device, Extent, ExtentKind, device::push_extent};
use std::{io, sync::Arc};
use whimbrel_alignment::{AlignedBytes, Layout, MappedRange, PageAlignment, ReadAt, inspect};
use whimbrel_core::PAGE_SIZE;

/// The alignment is for a device of another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the alignment is for {expected} bytes, but the device has {found}")]
pub struct AlignmentMismatch {
    /// Bytes that the alignment calls for.
    pub expected: u64,
    /// Bytes of the device.
    pub found: u64,
}

impl AlignmentMismatch {
    fn check(device: &dyn Device, expected: u64) -> Result<(), AlignmentMismatch> {
        match device.size() {
            found if found == expected => Ok(()),
            found => Err(AlignmentMismatch { expected, found }),
        }
    }
}

/// Determines the layout of `device`, with a few hundred small reads at most.
pub fn layout_of(device: &dyn Device) -> Layout {
    struct Content<'a>(&'a dyn Device);
    impl ReadAt for Content<'_> {
        fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read_at(offset, out).map_err(io::Error::other)
        }
    }
    inspect(&Content(device), device.size())
}

/// Read-only view of a disk as its aligned pages.
pub struct AlignedDisk {
    disk: Arc<dyn Device>,
    alignment: PageAlignment,
}

impl AlignedDisk {
    /// Aligns `disk` by `cuts`.
    ///
    /// # Errors
    /// If the alignment is for a disk of another size.
    pub fn new(disk: Arc<dyn Device>, cuts: PageAlignment) -> Result<Self, AlignmentMismatch> {
        AlignmentMismatch::check(&*disk, cuts.size())?;
        Ok(Self { disk, alignment: cuts })
    }

    /// Alignment of the disk.
    pub fn alignment(&self) -> &PageAlignment {
        &self.alignment
    }

    fn parts(&self, offset: u64, len: u64) -> Result<impl Iterator<Item = AlignedBytes>, BlockError> {
        BlockError::check(offset, len, self.size())?;
        Ok(self.alignment.parts(offset..offset + len))
    }

    /// Fills `out` by calls of `read`, part by part; stops where `read` returns false.
    fn fill(
        &self,
        offset: u64,
        mut out: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> Result<bool, BlockError>,
    ) -> Result<bool, BlockError> {
        for piece in self.parts(offset, out.len() as u64)? {
            let (part, rest) = out.split_at_mut(piece.len() as usize);
            match piece {
                AlignedBytes::Padding(_) => part.fill(0),
                AlignedBytes::Disk(MappedRange { offset, .. }) => {
                    if !read(offset, part)? {
                        return Ok(false);
                    }
                }
            }
            out = rest;
        }
        Ok(true)
    }
}

impl crate::ReadOnlyDevice for AlignedDisk {
    fn size(&self) -> u64 {
        self.alignment.page_count() * PAGE_SIZE as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        self.fill(offset, out, |offset, part| self.disk.read_at(offset, part).map(|()| true)).map(drop)
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        self.fill(offset, out, |offset, part| self.disk.try_read_at(offset, part))
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let mut extents = Vec::new();
        for piece in self.parts(offset, len)? {
            match piece {
                AlignedBytes::Padding(len) => {
                    push_extent(&mut extents, Extent { len, kind: ExtentKind::Hole })
                }
                AlignedBytes::Disk(MappedRange { offset, len }) => {
                    let below = self.disk.extents(offset, len)?;
                    below.into_iter().for_each(|extent| push_extent(&mut extents, extent));
                }
            }
        }
        Ok(extents)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        self.alignment.parts(offset..offset.saturating_add(len)).any(|piece| match piece {
            AlignedBytes::Padding(_) => false,
            AlignedBytes::Disk(MappedRange { offset, len }) => self.disk.may_wait(offset, len),
        })
    }
}

/// Aligned pages as the disk; writable if the device below is.
pub struct RawDisk {
    pages: Arc<dyn Device>,
    alignment: PageAlignment,
}

impl RawDisk {
    /// Presents `pages`, aligned by `cuts`, as the disk.
    ///
    /// # Errors
    /// If the alignment has another number of pages.
    pub fn new(pages: Arc<dyn Device>, cuts: PageAlignment) -> Result<Self, AlignmentMismatch> {
        AlignmentMismatch::check(&*pages, cuts.page_count() * PAGE_SIZE as u64)?;
        Ok(Self { pages, alignment: cuts })
    }

    /// Alignment of the pages.
    pub fn cuts(&self) -> &PageAlignment {
        &self.alignment
    }

    fn ranges(&self, offset: u64, len: u64) -> Result<impl Iterator<Item = MappedRange>, BlockError> {
        BlockError::check(offset, len, self.size())?;
        Ok(self.alignment.aligned_ranges(offset..offset + len))
    }

    fn each(
        &self,
        offset: u64,
        len: u64,
        apply: impl Fn(u64, u64) -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        self.ranges(offset, len)?.try_for_each(|stretch| apply(stretch.offset, stretch.len))
    }
}

impl Device for RawDisk {
    fn size(&self) -> u64 {
        self.alignment.size()
    }

    fn is_read_only(&self) -> bool {
        self.pages.is_read_only()
    }

    fn read_at(&self, offset: u64, mut out: &mut [u8]) -> Result<(), BlockError> {
        for stretch in self.ranges(offset, out.len() as u64)? {
            let (part, rest) = out.split_at_mut(stretch.len as usize);
            self.pages.read_at(stretch.offset, part)?;
            out = rest;
        }
        Ok(())
    }

    fn try_read_at(&self, offset: u64, mut out: &mut [u8]) -> Result<bool, BlockError> {
        for stretch in self.ranges(offset, out.len() as u64)? {
            let (part, rest) = out.split_at_mut(stretch.len as usize);
            if !self.pages.try_read_at(stretch.offset, part)? {
                return Ok(false);
            }
            out = rest;
        }
        Ok(true)
    }

    fn write_at(&self, offset: u64, mut data: &[u8]) -> Result<(), BlockError> {
        for stretch in self.ranges(offset, data.len() as u64)? {
            let (part, rest) = data.split_at(stretch.len as usize);
            self.pages.write_at(stretch.offset, part)?;
            data = rest;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.each(offset, len, |offset, len| self.pages.write_zeroes(offset, len))
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.each(offset, len, |offset, len| self.pages.trim(offset, len))
    }

    fn flush(&self) -> Result<(), BlockError> {
        self.pages.flush()
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let mut extents = Vec::new();
        for stretch in self.ranges(offset, len)? {
            let below = self.pages.extents(stretch.offset, stretch.len)?;
            below.into_iter().for_each(|extent| push_extent(&mut extents, extent));
        }
        Ok(extents)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        let mut stretches = self.alignment.aligned_ranges(offset..offset.saturating_add(len));
        stretches.any(|stretch| self.pages.may_wait(stretch.offset, stretch.len))
    }
}
