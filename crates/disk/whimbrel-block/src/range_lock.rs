//! Range lock: locks ranges of pages, held across I/O on exactly those pages.
//!
//! The list of locked ranges is short (one entry for each request in flight), so it is a plain vector behind
//! a mutex that is never held during I/O.

use std::{
    ops::Range,
    sync::{Condvar, Mutex, PoisonError},
};

#[derive(Debug, Default)]
pub(crate) struct RangeLock {
    held: Mutex<Vec<Range<u64>>>,
    released: Condvar,
}

/// Unlocks its range when dropped.
#[derive(Debug)]
pub(crate) struct RangeGuard<'a> {
    lock: &'a RangeLock,
    range: Range<u64>,
}

impl RangeLock {
    /// Waits until no overlapping range is locked, then locks `range`.
    pub(crate) fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        let overlaps =
            |held: &mut Vec<Range<u64>>| held.iter().any(|r| r.start < range.end && range.start < r.end);
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = self.released.wait_while(held, overlaps).unwrap_or_else(PoisonError::into_inner);
        held.push(range.clone());
        RangeGuard { lock: self, range }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.held.lock().unwrap_or_else(PoisonError::into_inner);
        // Locked ranges never overlap, so an equal one is this one.
        if let Some(at) = held.iter().position(|r| *r == self.range) {
            held.swap_remove(at);
        }
        drop(held);
        self.lock.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn two_holders_never_share_a_page() {
        let (lock, pages) = (RangeLock::default(), [const { AtomicU32::new(0) }; 8]);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (lock, pages) = (&lock, &pages);
                scope.spawn(move || {
                    for step in 0..2000 {
                        let start = (thread * 3 + step * 5) % 7;
                        let range = start..start + 1 + step % (8 - start);
                        let _guard = lock.lock(range.clone());
                        for page in range.clone() {
                            assert_eq!(pages[page as usize].fetch_add(1, SeqCst), 0);
                        }
                        for page in range {
                            pages[page as usize].fetch_sub(1, SeqCst);
                        }
                    }
                });
            }
        });
    }
}
