//! Shared pages: a table of pages that the standby host has of all machines protected there (the paper's
//! section 3.2, across machines), by hash.
//!
//! A page found here is sent as a reference. The table is a guess, and correctness does not depend on it: the
//! other machine may have written the page since, may have been taken over or be gone. So a reference has the
//! page's digest, and the standby requests the page itself if it finds other content. Pages of the same
//! machine are referenced as well: what a guest has read from its disk is in its memory.
//!
//! Memory: 17 bytes a bucket, at most [`ENTRIES_MAX`] entries for all machines of one standby host together:
//! 18 MB. Further pages are not recorded.

use crate::protocol::{DEVICES, ProtectionId};
use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex},
};
use whimbrel_core::lock;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Most recorded pages: what a table of 2^20 buckets holds before it grows.
pub const ENTRIES_MAX: usize = (1 << 20) / 8 * 7;

/// A page of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageReference {
    /// The protection of the machine.
    pub of: ProtectionId,
    /// Index of the array.
    pub array: u32,
    /// Number of the page.
    pub page: u64,
}

/// The table of one standby host. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedPages {
    table: Arc<Mutex<Table>>,
    seed: u64,
}

#[derive(Debug, Default)]
struct Table {
    members: BTreeMap<u16, ProtectionId>,
    places: HashMap<u64, CompactReference, BuildHasherDefault<IdentityHasher>>,
}

/// A [`PageReference`] in compact form.
#[derive(Debug, Clone, Copy)]
struct CompactReference {
    member: u16,
    array: u16,
    page: u32,
}

/// Hasher for keys that are seeded hashes already.
#[derive(Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// One machine's membership in the table, until it is dropped.
#[derive(Debug)]
pub struct SharingMachine {
    shared_pages: SharedPages,
    index: u16,
}

impl SharedPages {
    /// An empty table whose hashes use `seed`.
    pub fn new(seed: u64) -> Self {
        Self { table: Arc::default(), seed }
    }

    /// Adds a machine, which shares pages with the others. None if there are too many.
    pub fn join(&self, id: ProtectionId) -> Option<SharingMachine> {
        let mut table = lock(&self.table);
        let index = (0..=u16::MAX).find(|index| !table.members.contains_key(index))?;
        table.members.insert(index, id);
        drop(table);
        Some(SharingMachine { shared_pages: self.clone(), index })
    }

    /// Number of recorded pages.
    pub fn places(&self) -> usize {
        lock(&self.table).places.len()
    }
}

impl SharingMachine {
    /// The recorded place of a page with this content. If there is none, or if `anew`, records this place
    /// instead.
    pub(super) fn find_or_record(
        &self,
        array: u32,
        page: u64,
        content: &[u8],
        anew: bool,
    ) -> Option<PageReference> {
        if array == DEVICES {
            return None;
        }
        let hash = xxh3_64_with_seed(content, self.shared_pages.seed);
        let mut table = lock(&self.shared_pages.table);
        let found = table.places.get(&hash).copied();
        if let Some(CompactReference { member, array, page }) = found.filter(|_| !anew)
            && let Some(of) = table.members.get(&member)
        {
            return Some(PageReference { of: *of, array: array.into(), page: page.into() });
        }
        if (found.is_some() || table.places.len() < ENTRIES_MAX)
            && let (Ok(array), Ok(page)) = (array.try_into(), page.try_into())
        {
            table.places.insert(hash, CompactReference { member: self.index, array, page });
        }
        None
    }
}

impl Drop for SharingMachine {
    fn drop(&mut self) {
        let mut table = lock(&self.shared_pages.table);
        table.members.remove(&self.index);
        table.places.retain(|_, place| place.member != self.index);
        table.places.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ProtectionId = ProtectionId([1; 16]);
    const OTHER: ProtectionId = ProtectionId([2; 16]);

    #[test]
    fn a_page_is_named_as_long_as_its_machine_is_protected() {
        let known = SharedPages::new(7);
        let (one, other) = (known.join(ONE).unwrap(), known.join(OTHER).unwrap());
        let page = [5; 4096];
        assert_eq!(one.find_or_record(1, 20, &page, false), None, "the first of its kind");
        let name = PageReference { of: ONE, array: 1, page: 20 };
        assert_eq!(other.find_or_record(0, 9, &page, false), Some(name));
        assert_eq!(one.find_or_record(0, 3, &page, false), Some(name), "of the same machine");
        assert_eq!(other.find_or_record(0, 9, &page, true), None, "it was not there");
        assert_eq!(
            one.find_or_record(0, 3, &page, false),
            Some(PageReference { of: OTHER, array: 0, page: 9 })
        );
        drop(other);
        assert_eq!((one.find_or_record(0, 3, &page, false), known.places()), (None, 1));
        drop(one);
        assert_eq!(known.places(), 0);
    }

    #[test]
    fn the_table_never_outgrows_its_bound_and_the_device_state_is_not_in_it() {
        let known = SharedPages::new(7);
        let one = known.join(ONE).unwrap();
        assert_eq!(one.find_or_record(DEVICES, 0, &[1], false), None);
        assert_eq!(known.places(), 0);
        (0..ENTRIES_MAX as u64 + 9)
            .for_each(|page| _ = one.find_or_record(0, page, &page.to_le_bytes(), false));
        assert_eq!(known.places(), ENTRIES_MAX);
    }
}
