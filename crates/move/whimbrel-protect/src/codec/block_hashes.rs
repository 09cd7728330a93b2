//! Which blocks of a page differ from what was sent last (the paper's section 3.1): hashes of all blocks,
//! kept from then.
//!
//! A hash is 32 bits of xxh3, seeded anew for every table. Two blocks of one hash are told apart by the
//! page's digest, at the standby. Memory: a page that was dirty once has its hashes, which is 4 bytes a
//! block: 1/16 of the page at 64 bytes, 1/32 at 128, 1/64 at 256. Never more than the bound given; a page for
//! which there is no room always counts as new. The device state, which is small and comes with every epoch,
//! has room whatever else is known.

use super::BlockSize;
use crate::protocol::DEVICES;
use std::collections::BTreeMap;
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Hashes are kept for so many neighbouring pages at once.
const GROUP: u64 = 64;

/// What differs in a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageChange {
    /// Nothing is known of what was sent: all of it.
    New,
    /// These blocks: bit `n` is block `n`.
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

    /// Bytes it takes at the moment.
    pub fn bytes(&self) -> usize {
        self.groups.len() * Self::group_bytes(self.block)
    }

    /// Compares `page` with what was sent last; from now on it is what was sent last.
    pub fn change(&mut self, array: u32, number: u64, page: &[u8]) -> PageChange {
        debug_assert_eq!(page.len(), PAGE_SIZE);
        let (key, at) = ((array, number / GROUP), (number % GROUP) as usize);
        if self.block == BlockSize::Page {
            // The kernel has said that it is dirty: it would only be hashed to be sent.
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

    /// It is not known any more what the standby has of this page.
    pub fn forget(&mut self, array: u32, number: u64) {
        if let Some(group) = self.groups.get_mut(&(array, number / GROUP)) {
            group.known &= !(1 << (number % GROUP));
        }
    }

    /// It is not known any more what the standby has.
    pub fn forget_all(&mut self) {
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
