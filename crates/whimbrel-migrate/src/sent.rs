//! The versions of pages that the target holds, for those that may be sent again.
//!
//! Bounded. While there is room every page enters, since nobody knows yet which will be written; once full, a page
//! that is known to be hot takes the place of one that was sent once and never again.

use std::collections::HashMap;
use whimbrel_core::PAGE_SIZE;

type Key = (u32, u64);

/// A kept version: where it lies, and whether the page has shown that it is written again and again.
struct Kept {
    at: usize,
    hot: bool,
}

/// Last versions sent.
pub(crate) struct Sent {
    kept: HashMap<Key, Kept>,
    pages: Vec<u8>,
    /// Pages that entered cold, the latest last. Some may have become hot meanwhile.
    cold: Vec<Key>,
    capacity: usize,
}

impl Sent {
    /// Room for `capacity` bytes of pages.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { kept: HashMap::new(), pages: Vec::new(), cold: Vec::new(), capacity }
    }

    /// The version of the page that the target holds, if it is kept.
    pub(crate) fn get(&self, array: u32, page: u64) -> Option<&[u8]> {
        self.kept.get(&(array, page)).map(|kept| &self.pages[kept.at..kept.at + PAGE_SIZE])
    }

    /// The page was sent as `content`.
    pub(crate) fn record(&mut self, array: u32, page: u64, content: &[u8], hot: bool) {
        let key = (array, page);
        if let Some(kept) = self.kept.get_mut(&key) {
            // Sent a second time: that is what hot means.
            kept.hot = true;
            self.pages[kept.at..kept.at + PAGE_SIZE].copy_from_slice(content);
            return;
        }
        // Pages of zeros travel as a range: there is nothing to save by keeping them.
        if whimbrel_core::is_zero(content) {
            return;
        }
        if let Some(at) = self.room(hot) {
            self.pages[at..at + PAGE_SIZE].copy_from_slice(content);
            self.kept.insert(key, Kept { at, hot });
            if !hot {
                self.cold.push(key);
            }
        }
    }

    /// Whether a hot page would be kept.
    pub(crate) fn has_room(&self) -> bool {
        self.pages.len() + PAGE_SIZE <= self.capacity || !self.cold.is_empty()
    }

    /// A free place, for a hot page made free if need be.
    fn room(&mut self, hot: bool) -> Option<usize> {
        let end = self.pages.len();
        if end + PAGE_SIZE <= self.capacity {
            self.pages.resize(end + PAGE_SIZE, 0);
            return Some(end);
        }
        while let Some(key) = self.cold.pop_if(|_| hot) {
            if self.kept.get(&key).is_some_and(|kept| !kept.hot) {
                return self.kept.remove(&key).map(|kept| kept.at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_SIZE]
    }

    #[test]
    fn keeps_the_newest_version_and_nothing_beyond_its_capacity() {
        let mut sent = Sent::new(2 * PAGE_SIZE);
        sent.record(0, 7, &page(0), true);
        assert!(sent.get(0, 7).is_none(), "zeros need no keeping");
        sent.record(0, 1, &page(2), true);
        sent.record(1, 1, &page(3), true);
        sent.record(0, 9, &page(4), true);
        assert!(sent.get(0, 9).is_none(), "full of hot pages");
        sent.record(0, 1, &page(5), false);
        assert_eq!(sent.get(0, 1), Some(&page(5)[..]));
        assert_eq!(sent.get(1, 1), Some(&page(3)[..]));
    }

    #[test]
    fn a_hot_page_takes_the_place_of_one_that_never_came_again() {
        let mut sent = Sent::new(2 * PAGE_SIZE);
        sent.record(0, 1, &page(1), false);
        sent.record(0, 2, &page(2), false);
        sent.record(0, 2, &page(3), false);
        sent.record(0, 3, &page(4), false);
        assert!(sent.get(0, 3).is_none(), "a cold page drives nobody out");
        sent.record(0, 4, &page(5), true);
        assert_eq!(sent.get(0, 4), Some(&page(5)[..]));
        assert!(sent.get(0, 1).is_none(), "the page that was sent once");
        assert_eq!(sent.get(0, 2), Some(&page(3)[..]), "the page that was sent twice");
        sent.record(0, 5, &page(6), true);
        assert!(sent.get(0, 5).is_none(), "only hot pages are left");
    }
}
