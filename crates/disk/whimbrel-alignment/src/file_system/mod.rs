//! Superblocks: detect the file system of a region, its block size and the offset of its first block.
//!
//! A superblock is recognised by its magic number and the few fields that are used, each checked for a
//! possible value. Checksums are ignored: a wrong answer costs savings only. If several match, the one whose
//! creation overwrites the others wins.

mod fat;

use crate::{
    SECTOR,
    bounded_reader::{BoundedReader, le16, le32, le64},
    partition_table::TableEntry,
};

/// File system or other content of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// File systems ext2, ext3 and ext4.
    Ext,
    /// File system XFS.
    Xfs,
    /// FAT with 12-bit entries.
    Fat12,
    /// FAT with 16-bit entries.
    Fat16,
    /// FAT with 32-bit entries.
    Fat32,
    /// File system exFAT.
    ExFat,
    /// File system NTFS.
    Ntfs,
    /// File system Btrfs.
    Btrfs,
    /// Swap area of Linux.
    Swap,
    /// Physical volume of LVM2.
    Lvm2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) file_system: FileSystem,
    /// Bytes of a block or cluster.
    pub(crate) block: u32,
    /// Offset in the region of the first block that a file can have.
    pub(crate) data: u64,
}

impl Superblock {
    fn new(file_system: FileSystem, block: u32) -> Self {
        Self { file_system, block, data: 0 }
    }
}

/// Bytes at the start of a region that contain most superblocks.
const HEAD: usize = 2048;

/// Detects the content of `slot`; none if it is unknown.
pub(crate) fn identify(disk: &mut BoundedReader<'_>, slot: &TableEntry) -> Option<Superblock> {
    if slot.len < HEAD as u64 {
        return None;
    }
    let head = disk.sectors::<HEAD>(slot.start)?;
    let boot = &head[..512];
    let found = xfs(boot)
        .or_else(|| ntfs(boot))
        .or_else(|| fat::exfat(boot))
        .or_else(|| ext(&head))
        .or_else(|| fat::fat(boot))
        .or_else(|| lvm2(&head))
        .or_else(|| swap(disk, slot))
        .or_else(|| btrfs(disk, slot))?;
    let plausible = found.data < slot.len && found.data.is_multiple_of(SECTOR);
    plausible.then_some(found)
}

/// Whether the first sector of a disk belongs to a file system, although it has the mark of a partition
/// table.
pub(crate) fn starts_with_boot_sector(sector: &[u8; 512]) -> bool {
    ntfs(sector).or_else(|| fat::exfat(sector)).or_else(|| fat::fat(sector)).is_some()
}

fn power_of_two(value: u64, range: std::ops::RangeInclusive<u64>) -> Option<u32> {
    (value.is_power_of_two() && range.contains(&value)).then_some(value as u32)
}

/// XFS: `xfs_dsb` in fs/xfs/libxfs/xfs_format.h; big-endian.
fn xfs(boot: &[u8]) -> Option<Superblock> {
    let block = u32::from_be_bytes([boot[4], boot[5], boot[6], boot[7]]);
    let block = power_of_two(block.into(), 512..=65_536).filter(|_| boot.starts_with(b"XFSB"))?;
    Some(Superblock::new(FileSystem::Xfs, block))
}

/// ext: `ext4_super_block` in fs/ext4/ext4.h, 1024 bytes from the start; older versions have the same fields.
fn ext(head: &[u8]) -> Option<Superblock> {
    let block = le32(head, 1024 + 24);
    let known = le16(head, 1024 + 56) == 0xef53 && block <= 6;
    known.then(|| Superblock::new(FileSystem::Ext, 1024 << block))
}

/// NTFS: `NTFS_BOOT_SECTOR` in ntfs-3g's layout.h. A cluster count above 128 is the negated power of two.
fn ntfs(boot: &[u8]) -> Option<Superblock> {
    if boot[3..11] != *b"NTFS    " {
        return None;
    }
    let sector = power_of_two(le16(boot, 11).into(), 512..=4096)?;
    let count = match boot[13] {
        count @ 0..=128 => u64::from(count),
        negated => 1 << (256 - u32::from(negated)).min(31),
    };
    Some(Superblock::new(FileSystem::Ntfs, power_of_two(count * u64::from(sector), 512..=2 << 20)?))
}

/// LVM2: `label_header` and `pv_header` of lib/format_text/layout.h. The label is in one of the first four
/// sectors; the identity and the size precede the offsets of data, first that of the first extent.
fn lvm2(head: &[u8]) -> Option<Superblock> {
    let label = head.chunks_exact(SECTOR as usize).find(|sector| sector.starts_with(b"LABELONE"))?;
    let header = le32(label, 20) as usize;
    let known = label[24..32] == *b"LVM2 001" && header <= SECTOR as usize - 48;
    known.then(|| Superblock { file_system: FileSystem::Lvm2, block: 4096, data: le64(label, header + 40) })
}

/// Swap: `swap_header` in include/linux/swap.h, whose magic number ends the first page.
fn swap(disk: &mut BoundedReader<'_>, slot: &TableEntry) -> Option<Superblock> {
    if slot.len < 4096 {
        return None;
    }
    let sector = disk.sectors::<512>(slot.start + 4096 - SECTOR)?;
    let known = sector.ends_with(b"SWAPSPACE2") || sector.ends_with(b"SWAP-SPACE");
    known.then(|| Superblock::new(FileSystem::Swap, 4096))
}

/// Btrfs: `btrfs_super_block` in include/uapi/linux/btrfs_tree.h, 64 KiB from the start.
fn btrfs(disk: &mut BoundedReader<'_>, slot: &TableEntry) -> Option<Superblock> {
    const PLACE: u64 = 64 << 10;
    if slot.len < PLACE + SECTOR {
        return None;
    }
    let sector = disk.sectors::<512>(slot.start + PLACE)?;
    let block = power_of_two(le32(&sector, 0x90).into(), 4096..=65_536)?;
    (sector[0x40..0x48] == *b"_BHRfS_M").then(|| Superblock::new(FileSystem::Btrfs, block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition_table::RegionKind;

    fn put(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut disk = vec![0; 128 << 10];
        disk[at..at + bytes.len()].copy_from_slice(bytes);
        disk
    }

    fn found(disk: &Vec<u8>) -> Option<(FileSystem, u32, u64)> {
        let slot = TableEntry { kind: RegionKind::Whole, start: 0, len: disk.len() as u64 };
        let found = identify(&mut BoundedReader::new(disk, slot.len), &slot)?;
        Some((found.file_system, found.block, found.data))
    }

    #[test]
    fn superblocks_without_a_maker_at_hand_are_recognised() {
        assert_eq!(found(&put(4086, b"SWAPSPACE2")), Some((FileSystem::Swap, 4096, 0)));
        let mut btrfs = put((64 << 10) + 0x40, b"_BHRfS_M");
        assert_eq!(found(&btrfs), None, "no block size");
        btrfs[(64 << 10) + 0x91] = 16;
        assert_eq!(found(&btrfs), Some((FileSystem::Btrfs, 4096, 0)));
        let mut lvm = put(512, b"LABELONE");
        lvm[512 + 20] = 32;
        lvm[512 + 24..512 + 32].copy_from_slice(b"LVM2 001");
        lvm[512 + 72..512 + 80].copy_from_slice(&(63 * 512u64).to_le_bytes());
        assert_eq!(found(&lvm), Some((FileSystem::Lvm2, 4096, 63 * 512)));
        for data in [1 << 40, 100, u64::MAX] {
            lvm[512 + 72..512 + 80].copy_from_slice(&u64::to_le_bytes(data));
            assert_eq!(found(&lvm), None, "data at {data}");
        }
        lvm[512 + 20..512 + 24].fill(0xff);
        assert_eq!(found(&lvm), None, "a header outside of its sector");
    }

    #[test]
    fn block_sizes_that_cannot_be_are_refused() {
        let mut xfs = put(0, b"XFSB\0\0\x10\0");
        assert_eq!(found(&xfs), Some((FileSystem::Xfs, 4096, 0)));
        xfs[5] = 1;
        assert_eq!(found(&xfs), None);
        let mut ext = put(1024 + 56, &[0x53, 0xef]);
        assert_eq!(found(&ext), Some((FileSystem::Ext, 1024, 0)));
        ext[1024 + 24] = 40;
        assert_eq!(found(&ext), None);
        let mut ntfs = put(3, b"NTFS    \0\x02\x08");
        assert_eq!(found(&ntfs), Some((FileSystem::Ntfs, 4096, 0)));
        ntfs[13] = 0xf4;
        assert_eq!(found(&ntfs), Some((FileSystem::Ntfs, 2 << 20, 0)));
        for count in [0, 3, 0x81, 0xff] {
            ntfs[13] = count;
            assert_eq!(found(&ntfs).is_some(), count == 0xff, "{count} sectors a cluster");
        }
    }
}
