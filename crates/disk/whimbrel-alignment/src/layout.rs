//! Disk layout: the regions of a disk, and the page alignment that follows from them.
//!
//! [`inspect`] cannot fail: regions that cannot be read or trusted are left out. It reads at most
//! [`MAX_SECTORS`](crate::MAX_SECTORS) sectors and returns at most [`MAX_REGIONS`] regions, sorted, disjoint
//! and within the disk.

use crate::{
    AlignmentChange, AlignmentError, FileSystem, PAGE, PageAlignment, ReadAt, RegionKind,
    bounded_reader::BoundedReader,
    file_system,
    partition_table::{self, TableEntry},
};

/// Most regions of a disk.
pub const MAX_REGIONS: usize = 128;

/// Regions of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Partitions, or the disk as one region.
    pub regions: Vec<Region>,
    /// Whether everything needed could be read within the limit.
    pub complete: bool,
}

/// Partition, or the complete disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Kind of the table that lists it.
    pub kind: RegionKind,
    /// Offset of the first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Content of the region, if it is known.
    pub file_system: Option<FileSystem>,
    /// Bytes of a block (cluster) of the file system. Below 4096, files may begin at other phases too.
    pub block: Option<u32>,
    /// Disk byte of the file system's first block; before it, pages begin at `start`.
    pub data: u64,
    /// Offset modulo 4096 of file pages.
    pub phase: u64,
}

/// Determines the layout of a disk of `size` bytes.
pub fn inspect(disk: &dyn ReadAt, size: u64) -> Layout {
    let mut reader = BoundedReader::new(disk, size);
    let slots = partition_table::regions(&mut reader);
    let regions = slots.iter().map(|slot| region(&mut reader, slot)).collect();
    Layout { size, regions, complete: reader.is_complete() }
}

fn region(disk: &mut BoundedReader<'_>, slot: &TableEntry) -> Region {
    let found = file_system::identify(disk, slot);
    let data = slot.start + found.map_or(0, |found| found.data);
    Region {
        kind: slot.kind,
        start: slot.start,
        len: slot.len,
        file_system: found.map(|found| found.file_system),
        block: found.map(|found| found.block),
        data,
        phase: data % PAGE,
    }
}

impl Layout {
    /// Alignment with which a page of a file is a page of the image.
    ///
    /// Bytes between regions have the alignment of the region before, which saves a border.
    ///
    /// # Errors
    /// If the disk is larger than an alignment allows.
    pub fn page_alignment(&self) -> Result<PageAlignment, AlignmentError> {
        let mut borders: Vec<AlignmentChange> = Vec::new();
        let mut cut = |start: u64, phase: u64| {
            // A later segment with the same start replaces an empty one; one with the same phase is not
            // needed.
            borders.pop_if(|last| last.start == start);
            if start < self.size && borders.last().is_none_or(|last| last.phase != phase) {
                borders.push(AlignmentChange { start, phase });
            }
        };
        cut(0, 0);
        for region in &self.regions {
            cut(region.start, region.start % PAGE);
            cut(region.data, region.phase);
        }
        PageAlignment::new(self.size, borders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(start: u64, len: u64, data: u64) -> Region {
        Region {
            kind: RegionKind::Primary,
            start: start * 512,
            len: len * 512,
            file_system: None,
            block: None,
            data: data * 512,
            phase: data * 512 % PAGE,
        }
    }

    fn borders(size: u64, regions: Vec<Region>) -> Vec<(u64, u64)> {
        let cuts = Layout { size, regions, complete: true }.page_alignment().unwrap();
        cuts.changes().map(|border| (border.start / 512, border.phase / 512)).collect()
    }

    #[test]
    fn borders_stand_where_the_phase_changes_and_nowhere_else() {
        let size = 1 << 20;
        assert_eq!(borders(size, vec![region(8, 100, 8)]), [(0, 0)]);
        assert_eq!(borders(size, vec![region(63, 100, 63), region(167, 8, 167)]), [(0, 0), (63, 7)]);
        let fat = region(63, 100, 98);
        assert_eq!(borders(size, vec![fat, region(256, 8, 256)]), [(0, 0), (63, 7), (98, 2), (256, 0)]);
        assert_eq!(borders(size, vec![region(0, 100, 3)]), [(0, 0), (3, 3)], "a FAT without a table");
        assert_eq!(borders(size, vec![region(16, 100, 16), region(16, 0, 19)]), [(0, 0), (19, 3)]);
        assert_eq!(borders(0, vec![region(0, 0, 0)]), []);
    }

    proptest! {
        #[test]
        fn no_content_leads_out_of_bounds(
            mut disk in prop::collection::vec(any::<u8>(), 2048..6000),
            flags in any::<[bool; 4]>(),
            size in prop_oneof![0..10_000u64, any::<u64>()],
        ) {
            for (number, boot) in flags.iter().enumerate() { disk[446 + 16 * number] = u8::from(*boot) << 7; }
            disk[510..512].copy_from_slice(&[0x55, 0xaa]);
            let layout = inspect(&disk, size);
            let mut end = 0;
            for region in &layout.regions {
                prop_assert!(region.start >= end && region.len <= size - region.start);
                prop_assert!(region.data - region.start <= region.len);
                end = region.start + region.len;
            }
            prop_assert!(layout.page_alignment().is_ok() == (size <= crate::MAX_SIZE));
        }
    }
}
