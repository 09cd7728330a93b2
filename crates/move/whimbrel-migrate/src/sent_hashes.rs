//! Block hashes of the pages that were sent, from which the changed delta blocks of their next version are
//! found.
//!
//! Eight bytes for 64: an eighth of the memory that the pages would take, and enough to tell which blocks
//! changed, which is all that must be sent. A changed block with an equal hash would be lost. Hashes are 64
//! bits of xxh3 with a secret seed, so that takes 2^64 changed blocks, and a guest that finds one damages
//! only itself.
//!
//! Bounded. While there is room, every page is recorded, because nobody knows yet which will be written
//! again; once full, a page that is known to be hot replaces one that was sent only once.

use crate::page_batch::{BLOCK, BLOCKS};
use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

type Key = (u32, u64);
pub(crate) type BlockHashes = [u64; BLOCKS];
const BYTES_PER_PAGE: usize = size_of::<BlockHashes>();

/// Index of a page's hashes, and whether the page has been written again.
struct SentPage {
    at: usize,
    hot: bool,
}

/// Hashes of the versions that were sent last.
pub(crate) struct SentHashes {
    pages: HashMap<Key, SentPage>,
    hashes: Vec<BlockHashes>,
    /// Pages recorded as cold, the latest last. Some may have become hot since.
    cold: Vec<Key>,
    capacity: usize,
    seed: u64,
}

impl SentHashes {
    /// Creates an empty table with room for `capacity` bytes of hashes.
    pub(crate) fn new(capacity: usize, seed: u64) -> Self {
        let capacity = capacity / BYTES_PER_PAGE;
        Self { pages: HashMap::new(), hashes: Vec::new(), cold: Vec::new(), capacity, seed }
    }

    /// Returns the hash function of a page, for threads that do not hold this.
    pub(crate) fn hasher(&self) -> impl Fn(&[u8]) -> BlockHashes + use<> {
        let seed = self.seed;
        move |content| {
            let mut marks = [0; BLOCKS];
            for (mark, block) in marks.iter_mut().zip(content.chunks_exact(BLOCK)) {
                *mark = xxh3_64_with_seed(block, seed);
            }
            marks
        }
    }

    /// Blocks of the page that changed since it was sent, if its hashes are stored.
    pub(crate) fn changed(&self, array: u32, page: u64, now: &BlockHashes) -> Option<u64> {
        let then = &self.hashes[self.pages.get(&(array, page))?.at];
        let blocks = then.iter().zip(now).enumerate().filter(|(_, (then, now))| then != now);
        Some(blocks.fold(0, |changed, (at, _)| changed | 1 << at))
    }

    pub(crate) fn record(&mut self, array: u32, page: u64, marks: &BlockHashes, hot: bool) {
        let key = (array, page);
        if self.update(array, page, marks) {
            return;
        }
        if let Some(at) = self.free_entry(hot) {
            self.hashes[at] = *marks;
            self.pages.insert(key, SentPage { at, hot });
            if !hot {
                self.cold.push(key);
            }
        }
    }

    /// Updates the hashes of a page if it is recorded, and does nothing otherwise: for a page that is cheap
    /// to send again.
    pub(crate) fn update(&mut self, array: u32, page: u64, marks: &BlockHashes) -> bool {
        let Some(kept) = self.pages.get_mut(&(array, page)) else { return false };
        // A page that is sent a second time is hot.
        kept.hot = true;
        self.hashes[kept.at] = *marks;
        true
    }

    /// Whether hashes of a hot page would be stored.
    pub(crate) fn has_room(&self) -> bool {
        self.hashes.len() < self.capacity || !self.cold.is_empty()
    }

    /// Index of a free entry; a hot page may replace a cold one.
    fn free_entry(&mut self, hot: bool) -> Option<usize> {
        let end = self.hashes.len();
        if end < self.capacity {
            self.hashes.push([0; BLOCKS]);
            return Some(end);
        }
        while let Some(key) = self.cold.pop_if(|_| hot) {
            if self.pages.get(&key).is_some_and(|kept| !kept.hot) {
                return self.pages.remove(&key).map(|kept| kept.at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::PAGE_SIZE;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_SIZE]
    }

    #[test]
    fn tells_the_blocks_that_changed_since_the_newest_version() {
        let mut sent = SentHashes::new(2 * BYTES_PER_PAGE, 7);
        let marks = sent.hasher();
        sent.record(0, 1, &marks(&page(2)), true);
        sent.record(1, 1, &marks(&page(3)), true);
        sent.record(0, 9, &marks(&page(4)), true);
        assert_eq!(sent.changed(0, 9, &marks(&page(4))), None, "full of hot pages");
        let mut now = page(2);
        (now[0], now[4095]) = (9, 9);
        assert_eq!(sent.changed(0, 1, &marks(&now)), Some(1 << 63 | 1));
        sent.record(0, 1, &marks(&now), false);
        assert_eq!(sent.changed(0, 1, &marks(&now)), Some(0));
        assert_eq!(sent.changed(1, 1, &marks(&page(3))), Some(0));
    }

    #[test]
    fn a_hot_page_takes_the_place_of_one_that_never_came_again() {
        let mut sent = SentHashes::new(2 * BYTES_PER_PAGE, 7);
        let marks = sent.hasher();
        let knows = |sent: &SentHashes, page| sent.changed(0, page, &[0; BLOCKS]).is_some();
        sent.record(0, 1, &marks(&page(1)), false);
        sent.record(0, 2, &marks(&page(2)), false);
        sent.record(0, 2, &marks(&page(3)), false);
        sent.record(0, 3, &marks(&page(4)), false);
        assert!(!knows(&sent, 3), "a cold page drives nobody out");
        sent.record(0, 4, &marks(&page(5)), true);
        assert!(knows(&sent, 4) && !knows(&sent, 1), "it has the place of the page that was sent once");
        assert!(knows(&sent, 2), "the page that was sent twice stays");
        sent.record(0, 5, &marks(&page(6)), true);
        assert!(!knows(&sent, 5), "only hot pages are left");
        assert!(!sent.has_room());
    }
}
