//! Superblocks of FAT and exFAT, whose clusters begin after tables of odd length, so file pages have a phase.
//!
//! FAT after Microsoft's "FAT: General Overview of On-Disk Format" 1.03, exFAT after its specification,
//! section 3.1.

use super::{FileSystem, Superblock, power_of_two};
use crate::bounded_reader::{le16, le32};

/// Detects FAT12, FAT16 or FAT32 from the first sector.
pub(super) fn fat(boot: &[u8]) -> Option<Superblock> {
    let jumps = matches!(boot[0], 0xeb | 0xe9) && le16(boot, 510) == 0xaa55;
    let media = boot[21] == 0xf0 || boot[21] >= 0xf8;
    let (reserved, copies) = (u64::from(le16(boot, 14)), u64::from(boot[16]));
    if !jumps || !media || reserved == 0 || copies == 0 {
        return None;
    }
    let sector = u64::from(power_of_two(le16(boot, 11).into(), 512..=4096)?);
    let per_cluster = u64::from(power_of_two(boot[13].into(), 1..=128)?);
    let either = |short: usize, long: usize| match le16(boot, short) {
        0 => u64::from(le32(boot, long)),
        short => u64::from(short),
    };
    let (total, table) = (either(19, 32), either(22, 36));
    let root = (u64::from(le16(boot, 17)) * 32).div_ceil(sector);
    let data = reserved + copies * table + root;
    let clusters = total.checked_sub(data).filter(|_| table > 0)? / per_cluster;
    let file_system = match clusters {
        // Only FAT32 lacks the 16-bit length of its tables; FAT12 and FAT16 differ only in the count of
        // clusters.
        _ if le16(boot, 22) == 0 => FileSystem::Fat32,
        ..4085 => FileSystem::Fat12,
        _ => FileSystem::Fat16,
    };
    Some(Superblock { file_system, block: (per_cluster * sector) as u32, data: data * sector })
}

/// Detects exFAT from the first sector.
pub(super) fn exfat(boot: &[u8]) -> Option<Superblock> {
    let (sector, cluster) = (u32::from(boot[108]), u32::from(boot[109]));
    let known = boot[3..11] == *b"EXFAT   " && (9..=12).contains(&sector) && sector + cluster <= 25;
    known.then(|| Superblock {
        file_system: FileSystem::ExFat,
        block: 1 << (sector + cluster),
        data: u64::from(le32(boot, 88)) << sector,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FAT16 with 2 tables of 33 sectors, 512 root entries and clusters of 4 KiB.
    fn sample() -> Vec<u8> {
        let mut boot = vec![0; 512];
        boot[0] = 0xeb;
        boot[11..17].copy_from_slice(&[0, 2, 8, 1, 0, 2]);
        boot[17..24].copy_from_slice(&[0, 2, 0, 0, 0xf8, 33, 0]);
        boot[32..36].copy_from_slice(&65_536u32.to_le_bytes());
        boot[510..].copy_from_slice(&[0x55, 0xaa]);
        boot
    }

    #[test]
    fn data_begin_behind_tables_and_root() {
        let found = fat(&sample()).unwrap();
        assert_eq!(
            found,
            Superblock { file_system: FileSystem::Fat16, block: 4096, data: (1 + 66 + 32) * 512 }
        );
        let mut wide = sample();
        wide[22] = 0;
        wide[36] = 33;
        wide[17..19].fill(0);
        let found = fat(&wide).unwrap();
        assert_eq!((found.file_system, found.data), (FileSystem::Fat32, 67 * 512));
    }

    #[test]
    fn what_cannot_be_fat_is_none() {
        for (at, value) in [(0, 0x33), (12, 0), (13, 3), (13, 0), (14, 0), (16, 0), (21, 7), (511, 0)] {
            let mut boot = sample();
            boot[at] = value;
            assert_eq!(fat(&boot), None, "{value} at {at}");
        }
        let mut small = sample();
        small[32..36].copy_from_slice(&50u32.to_le_bytes());
        assert_eq!(fat(&small), None, "the tables are longer than the whole");
    }

    #[test]
    fn exfat_says_where_its_heap_is() {
        let mut boot = vec![0; 512];
        boot[3..11].copy_from_slice(b"EXFAT   ");
        boot[88..92].copy_from_slice(&2049u32.to_le_bytes());
        boot[108..110].copy_from_slice(&[9, 3]);
        let expected = Superblock { file_system: FileSystem::ExFat, block: 4096, data: 2049 * 512 };
        assert_eq!(exfat(&boot), Some(expected));
        boot[109] = 250;
        assert_eq!(exfat(&boot), None);
    }
}
