//! Group commit: flushes that arrive while one is running share the next one.
//!
//! A flush covers what was written before it *began*, so a caller that arrives while a round is under way
//! waits for the round after it. However many callers wait, at most two rounds separate a call from its
//! answer. A caller that finds everything written already synced returns at once.

use crate::{BlockError, latch::Latch};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};

/// Lets one caller at a time sync, for all who wait.
#[derive(Debug)]
pub(crate) struct GroupCommit {
    /// Writes that returned, and how many of them a finished sync covers.
    written: AtomicU64,
    synced: AtomicU64,
    rounds: Mutex<Rounds>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    /// The newest round that ended; all before it ended too.
    ended: u64,
}

impl GroupCommit {
    /// A group that does not trust the past: whoever wrote before may not have synced.
    pub(crate) fn new() -> Self {
        let (rounds, changed) = (Mutex::default(), Condvar::new());
        Self { written: AtomicU64::new(1), synced: AtomicU64::new(0), rounds, changed }
    }

    /// Called after each change, before it is acknowledged.
    pub(crate) fn note_write(&self) {
        self.written.fetch_add(1, SeqCst);
    }

    /// Returns `Ok` once a call of `sync` succeeded that began after every change noted before this call.
    /// `sync` must leave its failure in `latch`: that is where those who waited for it find it.
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

/// Ends the round also when `sync` panics: the others must not wait for ever.
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
                        group.note_write();
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
