//! Which regions the partition tables of a disk name. Where there is no table, the whole disk is one region.
//!
//! Whatever the tables say, the list is sorted, inside the disk, without overlaps and of at most
//! [`MAX_REGIONS`] regions: what lies outside is cut off or left out, and of two that overlap the one that
//! starts first stays.

mod crc32;
mod gpt;
mod mbr;

use crate::{MAX_REGIONS, SECTOR, bounded_reader::BoundedReader, file_system};

/// Which table names a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// None: the disk has no partitions.
    Whole,
    /// The table in the first sector.
    Primary,
    /// The chain of an extended partition.
    Logical,
    /// A GUID partition table.
    Gpt,
}

/// What a table says of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableEntry {
    pub(crate) kind: RegionKind,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl TableEntry {
    /// The part of sectors `first .. first + count` that lies on a disk of `size` bytes; none if none does.
    fn new(kind: RegionKind, first: u64, count: u64, size: u64) -> Option<Self> {
        let start = first.checked_mul(SECTOR).filter(|start| *start < size)?;
        let len = count.saturating_mul(SECTOR).min(size - start);
        (len > 0).then_some(Self { kind, start, len })
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The regions of the disk, in order.
pub(crate) fn regions(disk: &mut BoundedReader<'_>) -> Vec<TableEntry> {
    let mut slots = named(disk);
    if slots.is_empty() {
        slots.push(TableEntry { kind: RegionKind::Whole, start: 0, len: disk.size() });
    }
    // Stable: of two that start together the one that was named first stays.
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

/// What a table names, if there is one.
fn named(disk: &mut BoundedReader<'_>) -> Vec<TableEntry> {
    let Some(first) = disk.sectors::<512>(0) else { return Vec::new() };
    let Some(entries) = mbr::entries(&first) else { return Vec::new() };
    // FAT and NTFS end their first sector as a table does, with code or zeros where its entries would be.
    if file_system::starts_with_boot_sector(&first) {
        return Vec::new();
    }
    let protective = entries.iter().any(|entry| entry.is_protective());
    match protective.then(|| gpt::regions(disk)).flatten() {
        Some(slots) => slots,
        None => mbr::regions(disk, &entries),
    }
}
