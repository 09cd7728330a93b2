//! Write-back queue: changes of names and files that the server has yet to get, and the thread that sends
//! them when they are due.
//!
//! The changes themselves are in the journal; here is what a running session knows of them.

use super::unsynced::Unsynced;
use crate::{
    cache::{FileId, MergedChanges},
    client::{namespace::change_queue::UnsyncedChanges, session::Core},
    proto::Op,
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Interval between checks whether a write-back is due.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct State {
    /// Changes of names, each with its inode.
    queue: BTreeMap<u64, u64>,
    renames: HashSet<u64>,
    sending: HashSet<u64>,
    pub(super) since: HashMap<FileId, Instant>,
    pub(super) oldest: Option<Instant>,
    pub(super) refused: HashMap<FileId, Instant>,
    stopped: bool,
}

#[derive(Default)]
pub(in crate::client) struct WriteBack {
    state: Mutex<State>,
    wake: Condvar,
    lock: Mutex<()>,
    queued: AtomicU64,
    renames: AtomicU64,
    changes: AtomicU64,
    pub(in crate::client) made: Mutex<UnsyncedChanges>,
    pub(in crate::client) unsynced: Mutex<Unsynced>,
}

impl WriteBack {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of changes that the server has yet to make.
    pub(in crate::client) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Acquire)
    }

    /// Number of changes made here so far, including those sent at once.
    pub(in crate::client) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(in crate::client) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    pub(in crate::client) fn queue(&self, number: u64, node: u64) {
        self.changed();
        let mut state = self.state();
        state.queue.insert(number, node);
        state.oldest.get_or_insert_with(Instant::now);
        self.queued.store(state.queue.len() as u64, Ordering::Release);
    }

    pub(in crate::client) fn queue_rename(&self, number: u64, node: u64) {
        self.queue(number, node);
        self.state().renames.insert(number);
        self.renames.fetch_add(1, Ordering::AcqRel);
    }

    /// Cancels changes that were not sent yet: all of them or none.
    pub(in crate::client) fn cancel(&self, numbers: &[u64]) -> bool {
        let mut state = self.state();
        if numbers.is_empty()
            || numbers
                .iter()
                .any(|number| state.sending.contains(number) || !state.queue.contains_key(number))
        {
            return false;
        }
        for number in numbers {
            state.queue.remove(number);
        }
        self.queued.store(state.queue.len() as u64, Ordering::Release);
        true
    }

    /// Replaces unsent changes by merged ones.
    pub(in crate::client) fn changes_merged(&self, folded: &MergedChanges) {
        let mut state = self.state();
        for (number, op) in &folded.now {
            if matches!(op.plain(), Op::Unlink { .. }) {
                // The inode has another name now.
                state.queue.insert(*number, 0);
            }
        }
        let moved = folded.now.iter().map(|(number, _)| number);
        for number in folded.gone.iter().chain(moved) {
            // The server knows no older name of the file that is created instead.
            if state.renames.remove(number) {
                self.renames.fetch_sub(1, Ordering::AcqRel);
            }
        }
        folded.gone.iter().for_each(|number| _ = state.queue.remove(number));
        self.queued.store(state.queue.len() as u64, Ordering::Release);
    }

    /// Locks the write-back: one runs at a time.
    pub(in crate::client) fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::client) fn has_renames(&self) -> bool {
        self.renames.load(Ordering::Acquire) > 0
    }

    /// Numbers of all changes that the server has yet to make.
    pub(in crate::client) fn waiting(&self) -> HashSet<u64> {
        self.state().queue.keys().copied().collect()
    }

    /// Marks a change as sent; true if it may have been sent before.
    pub(in crate::client) fn mark_sending(&self, number: u64) -> bool {
        let mut state = self.state();
        // A change without an inode is of an earlier session.
        let old = state.queue.get(&number) == Some(&0);
        !state.sending.insert(number) || old
    }

    /// Removes a change from the queue; returns its inode.
    pub(in crate::client) fn done(&self, number: u64) -> Option<u64> {
        let mut state = self.state();
        let node = state.queue.remove(&number);
        state.sending.remove(&number);
        if state.renames.remove(&number) {
            self.renames.fetch_sub(1, Ordering::AcqRel);
        }
        if state.queue.is_empty() {
            state.oldest = None;
        }
        self.queued.store(state.queue.len() as u64, Ordering::Release);
        node
    }

    pub(in crate::client) fn file_written(&self, file: FileId) {
        self.state().since.entry(file).or_insert_with(Instant::now);
    }

    pub(in crate::client) fn wake(&self) {
        self.wake.notify_all();
    }

    pub(in crate::client) fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    pub(in crate::client) fn stop(&self) {
        self.state().stopped = true;
        self.wake.notify_all();
    }

    /// Starts the thread that writes back what is due, until the session ends.
    pub(in crate::client) fn start(core: &Arc<Core>) {
        let weak = core.me.clone();
        std::thread::spawn(move || {
            while let Some(core) = weak.upgrade() {
                let state = core.writeback.state();
                let waited = core.writeback.wake.wait_timeout(state, POLL_INTERVAL);
                if waited.unwrap_or_else(PoisonError::into_inner).0.stopped {
                    return;
                }
                if core.is_due() {
                    // A failure is reported as an event, and tried again.
                    let _ = core.flush_all(false);
                }
            }
        });
    }
}
