//! The versions of pages that the target holds, kept for those that are sent again and again.
//!
//! Bounded: once full it takes no new pages. A page enters when it is sent while known to be hot, so the store
//! fills with the working set and not with the bulk of the first round.

use std::collections::HashMap;
use whimbrel_core::PAGE_SIZE;

/// Last versions sent.
pub(crate) struct Sent {
    slots: HashMap<(u32, u64), usize>,
    pages: Vec<u8>,
    capacity: usize,
}

impl Sent {
    /// Room for `capacity` bytes of pages.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { slots: HashMap::new(), pages: Vec::new(), capacity }
    }

    /// The version of the page that the target holds, if it is kept.
    pub(crate) fn get(&self, array: u32, page: u64) -> Option<&[u8]> {
        self.slots.get(&(array, page)).map(|slot| &self.pages[*slot..*slot + PAGE_SIZE])
    }

    /// The page was sent as `content`. Kept if it was kept before, or if it is hot and there is room.
    pub(crate) fn record(&mut self, array: u32, page: u64, content: &[u8], hot: bool) {
        if let Some(slot) = self.slots.get(&(array, page)) {
            self.pages[*slot..*slot + PAGE_SIZE].copy_from_slice(content);
        } else if hot && self.pages.len() + PAGE_SIZE <= self.capacity {
            self.slots.insert((array, page), self.pages.len());
            self.pages.extend_from_slice(content);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_hot_pages_up_to_its_capacity_and_always_the_newest_version() {
        let page = |byte| vec![byte; PAGE_SIZE];
        let mut sent = Sent::new(2 * PAGE_SIZE);
        sent.record(0, 1, &page(1), false);
        assert!(sent.get(0, 1).is_none(), "a cold page");
        sent.record(0, 1, &page(2), true);
        sent.record(1, 1, &page(3), true);
        sent.record(0, 9, &page(4), true);
        assert!(sent.get(0, 9).is_none(), "full");
        sent.record(0, 1, &page(5), false);
        assert_eq!(sent.get(0, 1), Some(&page(5)[..]));
        assert_eq!(sent.get(1, 1), Some(&page(3)[..]));
    }
}
