//! Group commit: flushes that arrive while one is running share the next sync.
//!
//! A flush covers what was written before it *began*, so a caller that arrives during a round waits for the
//! round after it. With any number of callers, at most two rounds pass before a call returns. A caller
//! returns at once if everything written is synced already.

use crate::{BlockError, latch::Latch};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};

/// Lets one caller at a time sync, for all that wait.
#[derive(Debug)]
pub(crate) struct GroupCommit {
    written: AtomicU64,
    synced: AtomicU64,
    rounds: Mutex<Rounds>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    /// Newest round that ended; all before it ended too.
    ended: u64,
}

impl GroupCommit {
    /// Starts with one unsynced write, because earlier users of the file may not have synced.
    pub(crate) fn new() -> Self {
        let (rounds, changed) = (Mutex::default(), Condvar::new());
        Self { written: AtomicU64::new(1), synced: AtomicU64::new(0), rounds, changed }
    }

    /// Counts a change; called before it is acknowledged.
    pub(crate) fn count_write(&self) {
        self.written.fetch_add(1, SeqCst);
    }

    /// Returns `Ok` once a `sync` succeeded that began after every change counted before this call. `sync`
    /// must latch its failure in `latch`, where waiting callers find it.
    pub(crate) fn flush(
        &self,
        latch: &Latch,
        sync: impl FnOnce() -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        latch.check()?;
        if self.synced.load(SeqCst) == self.written.load(SeqCst) {
            return Ok(());
        }
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = rounds.begun + 1;
        while rounds.ended < wanted {
            if rounds.begun > rounds.ended {
                rounds = self.changed.wait(rounds).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            rounds.begun += 1;
            drop(rounds);
            let _end = EndRound(self);
            let covered = self.written.load(SeqCst);
            latch.check()?;
            sync()?;
            self.synced.store(covered, SeqCst);
            return Ok(());
        }
        latch.check()
    }
}

/// Ends the round also when `sync` panics, so that no caller waits for ever.
struct EndRound<'a>(&'a GroupCommit);

impl Drop for EndRound<'_> {
    fn drop(&mut self) {
        let mut rounds = self.0.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        rounds.ended = rounds.begun;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flush_returns_before_a_sync_that_saw_its_write() {
        let (group, latch) = (GroupCommit::new(), Latch::default());
        let (written, synced) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mine = written.fetch_add(1, SeqCst) + 1;
                        group.count_write();
                        let sync = || {
                            let seen = written.load(SeqCst);
                            std::thread::yield_now();
                            synced.store(seen, SeqCst);
                            Ok(())
                        };
                        group.flush(&latch, sync).unwrap();
                        assert!(synced.load(SeqCst) >= mine);
                    }
                });
            }
        });
        group.flush(&latch, || panic!("nothing is left to sync")).unwrap();
    }

    #[test]
    fn a_failed_sync_fails_everyone_who_flushes_after_it() {
        let (group, latch) = (GroupCommit::new(), Latch::default());
        let broken = || latch.sync(Err(std::io::ErrorKind::Other.into()));
        assert!(group.flush(&latch, broken).is_err());
        assert!(group.flush(&latch, || Ok(())).is_err());
    }
}
