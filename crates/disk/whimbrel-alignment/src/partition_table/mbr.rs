//! MBR: the partition table in the first sector, and the chain of tables in an extended partition.
//!
//! Each table of the chain points to the next one, so the chain may be a loop: no table is read twice, none
//! outside its extended partition, and at most [`MAX_CHAIN`] in all.

use super::{RegionKind, TableEntry};
use crate::{
    SECTOR,
    bounded_reader::{BoundedReader, le16, le32},
};

/// Most tables read after the first, over all extended partitions.
const MAX_CHAIN: usize = 64;

const FIRST_ENTRY: usize = 446;
const ENTRY: usize = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    kind: u8,
    first: u64,
    count: u64,
}

impl Entry {
    /// Whether the entry covers a GUID partition table, for programs that do not know those.
    pub(super) fn is_protective(&self) -> bool {
        self.kind == 0xee
    }

    fn is_extended(&self) -> bool {
        matches!(self.kind, 0x05 | 0x0f | 0x85)
    }

    fn is_data(&self) -> bool {
        self.kind != 0 && !self.is_extended() && !self.is_protective()
    }
}

/// Entries of a sector that is a partition table; none if it is not.
pub(super) fn entries(sector: &[u8; 512]) -> Option<[Entry; 4]> {
    let entry = |number: usize| &sector[FIRST_ENTRY + number * ENTRY..][..ENTRY];
    // Boot code and random bytes have other values here; Linux uses the same test.
    let plain = le16(sector, 510) == 0xaa55 && (0..4).all(|number| entry(number)[0] & 0x7f == 0);
    plain.then(|| {
        [0, 1, 2, 3].map(|number| {
            let bytes = entry(number);
            Entry { kind: bytes[4], first: le32(bytes, 8).into(), count: le32(bytes, 12).into() }
        })
    })
}

/// Regions of the `entries` of the first sector, logical partitions included.
pub(super) fn regions(disk: &mut BoundedReader<'_>, entries: &[Entry; 4]) -> Vec<TableEntry> {
    let size = disk.size();
    let slot = |entry: &Entry| TableEntry::new(RegionKind::Primary, entry.first, entry.count, size);
    let mut slots: Vec<TableEntry> =
        entries.iter().filter(|entry| entry.is_data()).filter_map(slot).collect();
    let mut seen = Vec::new();
    for extended in entries.iter().filter(|entry| entry.is_extended()) {
        read_chain(disk, extended, &mut seen, &mut slots);
    }
    slots
}

/// Adds the logical partitions of `extended`; `seen` has the tables read so far.
fn read_chain(
    disk: &mut BoundedReader<'_>,
    extended: &Entry,
    seen: &mut Vec<u64>,
    slots: &mut Vec<TableEntry>,
) {
    let mut next = Some(0);
    while let Some(relative) = next.filter(|relative| *relative < extended.count) {
        let table = extended.first + relative;
        if seen.contains(&table) || seen.len() == MAX_CHAIN {
            return;
        }
        seen.push(table);
        let Some(entries) = disk.sectors::<512>(table * SECTOR).as_ref().and_then(entries) else { return };
        let size = disk.size();
        let logical =
            |entry: &Entry| TableEntry::new(RegionKind::Logical, table + entry.first, entry.count, size);
        slots.extend(entries.iter().filter(|entry| entry.is_data()).filter_map(logical));
        next = entries.iter().find(|entry| entry.is_extended()).map(|entry| entry.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition_table;

    pub(crate) fn put_table(disk: &mut [u8], table: u64, entries: &[(u8, u32, u32)]) {
        let sector = &mut disk[(table * SECTOR) as usize..][..512];
        for (number, (kind, first, count)) in entries.iter().enumerate() {
            let entry = &mut sector[FIRST_ENTRY + number * ENTRY..][..ENTRY];
            entry[4] = *kind;
            entry[8..12].copy_from_slice(&first.to_le_bytes());
            entry[12..16].copy_from_slice(&count.to_le_bytes());
        }
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
    }

    fn found(disk: Vec<u8>) -> Vec<(RegionKind, u64, u64)> {
        let size = disk.len() as u64;
        let slots = partition_table::regions(&mut BoundedReader::new(&disk, size));
        slots.iter().map(|slot| (slot.kind, slot.start / SECTOR, slot.len / SECTOR)).collect()
    }

    #[test]
    fn primary_and_logical_partitions_are_found() {
        let mut disk = vec![0; 1000 * 512];
        put_table(&mut disk, 0, &[(0x83, 63, 100), (0x05, 200, 700)]);
        put_table(&mut disk, 200, &[(0x83, 63, 50), (0x05, 150, 100)]);
        put_table(&mut disk, 350, &[(0x06, 1, 90)]);
        let expected =
            [(RegionKind::Primary, 63, 100), (RegionKind::Logical, 263, 50), (RegionKind::Logical, 351, 90)];
        assert_eq!(found(disk), expected);
    }

    #[test]
    fn a_chain_that_bites_its_tail_ends() {
        let mut disk = vec![0; 1000 * 512];
        put_table(&mut disk, 0, &[(0x0f, 100, 800), (0x85, 100, 800), (0x05, 0, 1000)]);
        put_table(&mut disk, 100, &[(0x83, 10, 5), (0x05, 100, 100)]);
        put_table(&mut disk, 200, &[(0x83, 10, 5), (0x05, 0, 100)]);
        assert_eq!(found(disk), [(RegionKind::Logical, 110, 5), (RegionKind::Logical, 210, 5)]);
    }

    #[test]
    fn a_chain_may_not_leave_its_partition_nor_go_on_for_ever() {
        let mut disk = vec![0; 4000 * 512];
        put_table(&mut disk, 0, &[(0x05, 100, 3000)]);
        for number in 0..200 {
            put_table(&mut disk, 100 + number * 10, &[(0x83, 1, 9), (0x05, number as u32 * 10 + 10, 10)]);
        }
        assert_eq!(found(disk.clone()).len(), MAX_CHAIN);
        put_table(&mut disk, 110, &[(0x83, 1, 9), (0x05, 3000, 10)]);
        assert_eq!(found(disk).len(), 2);
    }

    #[test]
    fn lies_about_size_and_overlaps_leave_what_can_be_true() {
        let mut disk = vec![0; 1000 * 512];
        let lies = [(0x83, 900, u32::MAX), (0x83, 40, 500), (0x07, 539, 10), (0x07, u32::MAX, u32::MAX)];
        put_table(&mut disk, 0, &lies);
        assert_eq!(found(disk), [(RegionKind::Primary, 40, 500), (RegionKind::Primary, 900, 100)]);
    }

    #[test]
    fn a_sector_of_noise_is_no_table() {
        let mut disk = vec![0xcc; 100 * 512];
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(found(disk), [(RegionKind::Whole, 0, 100)]);
        assert_eq!(found(vec![0; 300]), [(RegionKind::Whole, 0, 0)], "less than a sector");
    }
}
