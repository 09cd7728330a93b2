//! Partition tables: list the regions of a disk. Without a table, the complete disk is one region.
//!
//! For any table, the list is sorted, within the disk, without overlaps and has at most [`MAX_REGIONS`]
//! regions. Regions beyond the disk are truncated or left out, and of two that overlap the first remains.

mod crc32;
mod gpt;
mod mbr;

use crate::{MAX_REGIONS, SECTOR, bounded_reader::BoundedReader, file_system};

/// Kind of table that lists a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// No table: the disk has no partitions.
    Whole,
    /// MBR table in the first sector.
    Primary,
    /// Chain of an extended partition.
    Logical,
    /// GUID partition table.
    Gpt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableEntry {
    pub(crate) kind: RegionKind,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl TableEntry {
    /// Clips sectors `first .. first + count` to a disk of `size` bytes; none if nothing remains.
    fn new(kind: RegionKind, first: u64, count: u64, size: u64) -> Option<Self> {
        let start = first.checked_mul(SECTOR).filter(|start| *start < size)?;
        let len = count.saturating_mul(SECTOR).min(size - start);
        (len > 0).then_some(Self { kind, start, len })
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }
}

pub(crate) fn regions(disk: &mut BoundedReader<'_>) -> Vec<TableEntry> {
    let mut slots = named(disk);
    if slots.is_empty() {
        slots.push(TableEntry { kind: RegionKind::Whole, start: 0, len: disk.size() });
    }
    // The sort is stable: of two regions with one start, the one listed first remains.
    slots.sort_by_key(|slot| slot.start);
    let mut end = 0;
    slots.retain(|slot| {
        let free = slot.start >= end;
        end = if free { slot.end() } else { end };
        free
    });
    slots.truncate(MAX_REGIONS);
    slots
}

/// Regions that a table lists, if there is one.
fn named(disk: &mut BoundedReader<'_>) -> Vec<TableEntry> {
    let Some(first) = disk.sectors::<512>(0) else { return Vec::new() };
    let Some(entries) = mbr::entries(&first) else { return Vec::new() };
    // The first sector of FAT and NTFS ends like a table, with code or zeros in place of entries.
    if file_system::starts_with_boot_sector(&first) {
        return Vec::new();
    }
    let protective = entries.iter().any(|entry| entry.is_protective());
    match protective.then(|| gpt::regions(disk)).flatten() {
        Some(slots) => slots,
        None => mbr::regions(disk, &entries),
    }
}
