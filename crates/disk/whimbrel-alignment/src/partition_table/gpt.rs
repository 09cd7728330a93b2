//! GUID partition table: one copy after the first sector, one at the end of the disk (UEFI specification
//! 2.10, section 5.3).
//!
//! A copy whose header or entries do not match their checksums is ignored; without a valid copy there is no
//! such table. Sectors count as 512 bytes: on disks with 4 KiB sectors everything is aligned anyway.

use super::{RegionKind, TableEntry, crc32::crc32};
use crate::{
    PAGE, SECTOR,
    bounded_reader::{BoundedReader, le32, le64},
};
use std::iter;

/// Most bytes of entries that are read: 256 of the usual size, twice what tools create.
const MAX_ENTRIES: usize = 32 << 10;

struct Header {
    entries: u64,
    count: usize,
    entry: usize,
    checksum: u32,
}

/// Regions of the first valid copy.
pub(super) fn regions(disk: &mut BoundedReader<'_>) -> Option<Vec<TableEntry>> {
    let end = disk.size() / SECTOR;
    // A file with an odd number of sectors may be served as a disk of complete pages, so the last sector is
    // one of eight.
    let mut copies = iter::once(1).chain((end.saturating_sub(PAGE / SECTOR)..end).rev());
    copies.find_map(|at| copy(disk, at))
}

/// Regions of the copy with its header in sector `at`.
fn copy(disk: &mut BoundedReader<'_>, at: u64) -> Option<Vec<TableEntry>> {
    let header = parse_header(&disk.sectors::<512>(at * SECTOR)?, at)?;
    let len = header.count * header.entry;
    let mut entries = vec![0; len.next_multiple_of(SECTOR as usize)];
    disk.read(header.entries.checked_mul(SECTOR)?, &mut entries)?;
    let entries = &entries[..len];
    if crc32(&[entries]) != header.checksum {
        return None;
    }
    let size = disk.size();
    let slot = |entry: &[u8]| {
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let used = entry[..16].iter().any(|byte| *byte != 0);
        let count = last.checked_sub(first).filter(|_| used)?.saturating_add(1);
        TableEntry::new(RegionKind::Gpt, first, count, size)
    };
    Some(entries.chunks_exact(header.entry).filter_map(slot).collect())
}

fn parse_header(sector: &[u8; 512], at: u64) -> Option<Header> {
    let len = le32(sector, 12) as usize;
    if !sector.starts_with(b"EFI PART") || !(92..=512).contains(&len) || le64(sector, 24) != at {
        return None;
    }
    if crc32(&[&sector[..16], &[0; 4], &sector[20..len]]) != le32(sector, 16) {
        return None;
    }
    let (count, entry) = (le32(sector, 80) as usize, le32(sector, 84) as usize);
    let plain = entry.is_power_of_two() && (128..=4096).contains(&entry) && count <= MAX_ENTRIES / entry;
    plain.then(|| Header { entries: le64(sector, 72), count, entry, checksum: le32(sector, 88) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition_table;

    const SECTORS: u64 = 1000;

    /// Disk whose table lists sectors `first..=last`, in both copies.
    fn disk(partitions: &[(u64, u64)]) -> Vec<u8> {
        let mut disk = vec![0; (SECTORS * SECTOR) as usize];
        disk[446 + 4] = 0xee;
        disk[446 + 8] = 1;
        disk[446 + 12..446 + 16].copy_from_slice(&u32::MAX.to_le_bytes());
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        let mut entries = vec![0; 128 * 128];
        for (entry, (first, last)) in entries.chunks_exact_mut(128).zip(partitions) {
            entry[..16].fill(7);
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&last.to_le_bytes());
        }
        for (at, list) in [(1, 2), (SECTORS - 1, SECTORS - 33)] {
            put_header(&mut disk, at, list, &entries);
            disk[(list * SECTOR) as usize..][..entries.len()].copy_from_slice(&entries);
        }
        disk
    }

    fn put_header(disk: &mut [u8], at: u64, list: u64, entries: &[u8]) {
        let sector = &mut disk[(at * SECTOR) as usize..][..512];
        sector[..8].copy_from_slice(b"EFI PART");
        sector[12] = 92;
        sector[24..32].copy_from_slice(&at.to_le_bytes());
        sector[72..80].copy_from_slice(&list.to_le_bytes());
        sector[80] = 128;
        sector[84] = 128;
        sector[88..92].copy_from_slice(&crc32(&[entries]).to_le_bytes());
        sector[16..20].fill(0);
        let checksum = crc32(&[&sector[..92]]);
        sector[16..20].copy_from_slice(&checksum.to_le_bytes());
    }

    fn found(disk: &Vec<u8>) -> Vec<(RegionKind, u64, u64)> {
        let slots = partition_table::regions(&mut BoundedReader::new(disk, disk.len() as u64));
        slots.iter().map(|slot| (slot.kind, slot.start / SECTOR, slot.len / SECTOR)).collect()
    }

    #[test]
    fn partitions_are_found_in_order_and_from_the_backup_too() {
        let expected = [(RegionKind::Gpt, 34, 66), (RegionKind::Gpt, 100, 200)];
        let good = disk(&[(100, 299), (34, 99)]);
        assert_eq!(found(&good), expected);
        for (damaged, why) in [(512, "magic"), (512 + 60, "header"), (1024 + 32, "entries")] {
            let mut bad = good.clone();
            bad[damaged] ^= 1;
            assert_eq!(found(&bad), expected, "{why}");
            let backup = match damaged {
                1056 => (SECTORS - 33) * SECTOR + 32,
                header => (SECTORS - 1) * SECTOR + (header as u64 - 512),
            };
            bad[backup as usize] ^= 1;
            assert_eq!(found(&bad), [(RegionKind::Whole, 0, SECTORS)], "{why} in both");
        }
    }

    #[test]
    fn entries_that_lie_are_left_out_or_cut() {
        let lies = [(u64::MAX, u64::MAX), (0, u64::MAX), (500, 400), (1 << 60, 1 << 61), (900, u64::MAX - 1)];
        assert_eq!(found(&disk(&lies)), [(RegionKind::Gpt, 0, SECTORS)]);
        assert_eq!(found(&disk(&lies[2..])), [(RegionKind::Gpt, 900, 100)]);
    }

    #[test]
    fn a_header_that_asks_for_too_much_is_refused() {
        let mut sector = disk(&[(34, 99)])[512..1024].to_vec();
        for (at, value) in [(80, u32::MAX), (84, 0), (84, 1 << 31), (12, 513), (12, 0), (24, 2)] {
            let before = sector.clone();
            sector[at..at + 4].copy_from_slice(&value.to_le_bytes());
            sector[16..20].fill(0);
            let len = (le32(&sector, 12) as usize).min(512);
            let checksum = crc32(&[&sector[..len]]);
            sector[16..20].copy_from_slice(&checksum.to_le_bytes());
            let whole: &[u8; 512] = sector.as_slice().try_into().unwrap();
            assert!(parse_header(whole, 1).is_none(), "{value} at {at}");
            sector = before;
        }
    }
}
