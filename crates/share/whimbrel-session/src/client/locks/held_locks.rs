//! Locks that programs of this mount have, so that they can be asked for again after the server has lost
//! them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use whimbrel_fuse::{FileLock, LockKind};

/// Locks of one owner on one file, and the handles by which they were set.
#[derive(Debug, Default)]
struct Owned {
    handles: BTreeSet<u64>,
    /// Kind and last byte of each range, by its first byte. They do not overlap.
    ranges: BTreeMap<u64, (LockKind, u64)>,
}

/// Locks by inode and owner.
#[derive(Debug, Default)]
pub(in crate::client) struct HeldLocks {
    owned: BTreeMap<(u64, u64), Owned>,
}

impl Owned {
    /// The lock replaces what the owner has in its range.
    fn set(&mut self, lock: FileLock) {
        let over: Vec<_> = self.ranges.range(..=lock.end).map(|(start, range)| (*start, *range)).collect();
        for (start, (kind, end)) in over.into_iter().filter(|(_, (_, end))| *end >= lock.start) {
            self.ranges.remove(&start);
            if start < lock.start {
                self.ranges.insert(start, (kind, lock.start - 1));
            }
            if end > lock.end {
                self.ranges.insert(lock.end + 1, (kind, end));
            }
        }
        if lock.kind != LockKind::Unlock {
            self.ranges.insert(lock.start, (lock.kind, lock.end));
        }
    }
}

impl HeldLocks {
    /// A lock was set or removed by way of a handle.
    pub(in crate::client) fn set(&mut self, inode: u64, handle: u64, owner: u64, lock: FileLock) {
        let owned = self.owned.entry((inode, owner)).or_default();
        owned.handles.insert(handle);
        owned.set(lock);
        if owned.ranges.is_empty() {
            self.owned.remove(&(inode, owner));
        }
    }

    /// Whether an owner has locks of a file.
    pub(in crate::client) fn has(&self, inode: u64, owner: u64) -> bool {
        self.owned.contains_key(&(inode, owner))
    }

    /// Forgets the locks of an owner.
    pub(in crate::client) fn remove(&mut self, inode: u64, owner: u64) {
        self.owned.remove(&(inode, owner));
    }

    /// Owners whose locks of a file were set by way of a handle.
    pub(in crate::client) fn of_handle(&self, inode: u64, handle: u64) -> Vec<u64> {
        let of = self.owned.range((inode, 0)..=(inode, u64::MAX));
        of.filter(|(_, owned)| owned.handles.contains(&handle)).map(|((_, owner), _)| *owner).collect()
    }

    /// All locks: inode, owner and lock.
    pub(in crate::client) fn all(&self) -> Vec<(u64, u64, FileLock)> {
        let locks = |owned: &Owned| -> Vec<FileLock> {
            let lock = |(start, (kind, end)): (&u64, &(LockKind, u64))| FileLock {
                start: *start,
                end: *end,
                kind: *kind,
                pid: 0,
            };
            owned.ranges.iter().map(lock).collect()
        };
        let each = self.owned.iter();
        each.flat_map(|((inode, owner), owned)| locks(owned).into_iter().map(|lock| (*inode, *owner, lock)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
        FileLock { start, end, kind, pid: 0 }
    }

    #[test]
    fn a_lock_replaces_what_its_owner_has_in_the_range_and_leaves_the_rest() {
        let mut held = HeldLocks::default();
        let last = i64::MAX as u64;
        held.set(1, 10, 7, lock(LockKind::Shared, 0, last));
        held.set(1, 11, 7, lock(LockKind::Exclusive, 100, 199));
        held.set(1, 10, 7, lock(LockKind::Unlock, 150, 299));
        held.set(1, 10, 8, lock(LockKind::Shared, 5, 5));
        let expected = [
            (1, 7, lock(LockKind::Shared, 0, 99)),
            (1, 7, lock(LockKind::Exclusive, 100, 149)),
            (1, 7, lock(LockKind::Shared, 300, last)),
            (1, 8, lock(LockKind::Shared, 5, 5)),
        ];
        assert_eq!(held.all(), expected);
        assert_eq!(
            (held.of_handle(1, 11), held.of_handle(1, 10), held.of_handle(2, 10)),
            (vec![7], vec![7, 8], vec![])
        );
        held.set(1, 10, 7, lock(LockKind::Unlock, 0, last));
        held.remove(1, 8);
        assert!(!held.has(1, 7) && held.all().is_empty());
    }
}
