//! Block hashes: a table that finds the blocks of a page that differ from what was sent last (the paper's
//! section 3.1).
//!
//! A hash is 32 bits of xxh3, seeded anew for every table. A collision is detected at the standby by the
//! page's digest. Memory: each page that was ever dirty has its hashes, 4 bytes a block: 1/16 of the page at
//! 64 bytes, 1/32 at 128, 1/64 at 256. The table never exceeds its bound; a page without space in it always
//! counts as new. The device state, which is small and sent with every epoch, always has space.

use super::BlockSize;
use crate::protocol::DEVICES;
use std::collections::BTreeMap;
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Consecutive pages that share one table entry.
const GROUP: u64 = 64;

/// Change of a page since it was sent last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageChange {
    /// The whole page; it is not known what was sent.
    New,
    /// Changed blocks: bit `n` is block `n`.
    Blocks(u64),
}

/// Hashes of the pages of all arrays, as the standby has them.
#[derive(Debug)]
pub struct BlockHashes {
    block: BlockSize,
    seed: u64,
    groups: BTreeMap<(u32, u64), Group>,
    groups_max: usize,
}

#[derive(Debug)]
struct Group {
    known: u64,
    hashes: Box<[u32]>,
}

impl BlockHashes {
    /// An empty table of at most `bytes_max` bytes.
    pub fn new(block: BlockSize, seed: u64, bytes_max: usize) -> Self {
        let groups_max = bytes_max / Self::group_bytes(block);
        Self { block, seed, groups: BTreeMap::new(), groups_max }
    }

    const fn group_bytes(block: BlockSize) -> usize {
        GROUP as usize * block.in_page() * 4 + 32
    }

    /// Bytes that the table takes at present.
    pub fn bytes(&self) -> usize {
        self.groups.len() * Self::group_bytes(self.block)
    }

    /// Compares `page` with what was sent last, and records it as sent.
    pub fn change(&mut self, array: u32, number: u64, page: &[u8]) -> PageChange {
        assert_eq!(page.len(), PAGE_SIZE);
        let (key, at) = ((array, number / GROUP), (number % GROUP) as usize);
        if self.block == BlockSize::Page {
            // The dirty log reports it as dirty: a hash would be of no use.
            return PageChange::New;
        }
        let count = self.block.in_page();
        if !self.groups.contains_key(&key) {
            if self.groups.len() >= self.groups_max && array != DEVICES {
                return PageChange::New;
            }
            let hashes = vec![0; GROUP as usize * count].into_boxed_slice();
            self.groups.insert(key, Group { known: 0, hashes });
        }
        let Some(group) = self.groups.get_mut(&key) else { return PageChange::New };
        let was_known = group.known >> at & 1 == 1;
        group.known |= 1 << at;
        let mut changed = 0;
        let hashes = &mut group.hashes[at * count..][..count];
        for (index, (block, kept)) in page.chunks_exact(self.block.bytes()).zip(hashes).enumerate() {
            let hash = xxh3_64_with_seed(block, self.seed) as u32;
            if std::mem::replace(kept, hash) != hash {
                changed |= 1 << index;
            }
        }
        if was_known { PageChange::Blocks(changed) } else { PageChange::New }
    }

    /// Forgets what the standby has of this page.
    pub fn forget(&mut self, array: u32, number: u64) {
        if let Some(group) = self.groups.get_mut(&(array, number / GROUP)) {
            group.known &= !(1 << (number % GROUP));
        }
    }

    /// Forgets what the standby has.
    pub(crate) fn forget_all(&mut self) {
        self.groups.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_that_differ_are_named_and_a_forgotten_page_is_new() {
        for block in [BlockSize::B64, BlockSize::B128, BlockSize::B256] {
            let mut hashes = BlockHashes::new(block, 7, 1 << 20);
            let mut page = vec![0; PAGE_SIZE];
            assert_eq!(hashes.change(0, 70, &page), PageChange::New);
            assert_eq!(hashes.change(0, 70, &page), PageChange::Blocks(0));
            page[PAGE_SIZE - 1] = 1;
            assert_eq!(hashes.change(0, 70, &page), PageChange::Blocks(1 << (block.in_page() - 1)));
            assert_eq!(hashes.change(1, 70, &page), PageChange::New, "another array");
            hashes.forget(0, 70);
            assert_eq!(hashes.change(0, 70, &page), PageChange::New);
        }
    }

    #[test]
    fn the_table_never_outgrows_its_bound() {
        let mut hashes = BlockHashes::new(BlockSize::B64, 7, 100 << 10);
        let page = vec![1; PAGE_SIZE];
        (0..1000).for_each(|group| _ = hashes.change(0, group * GROUP, &page));
        assert!(hashes.bytes() <= 100 << 10 && hashes.bytes() > 50 << 10);
        assert_eq!(hashes.change(0, 999 * GROUP, &page), PageChange::New, "no room: always new");
        assert_eq!(hashes.change(0, 0, &page), PageChange::Blocks(0));
        assert_eq!(hashes.change(DEVICES, 3, &page), PageChange::New);
        assert_eq!(hashes.change(DEVICES, 3, &page), PageChange::Blocks(0), "the device state has room");
    }
}
