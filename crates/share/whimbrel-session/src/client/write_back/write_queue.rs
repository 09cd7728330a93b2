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
use whimbrel_core::lock;

/// Interval between checks whether a write-back is due.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct State {
    /// Changes of names, each with its inode.
    queue: BTreeMap<u64, u64>,
    /// Directories whose names a change affects, by the number of the change.
    dirs: HashMap<u64, Vec<u64>>,
    /// How many changes affect an inode or the names in it.
    affected: HashMap<u64, Affected>,
    renames: HashSet<u64>,
    sending: HashSet<u64>,
    pub(super) since: HashMap<FileId, Instant>,
    pub(super) oldest: Option<Instant>,
    pub(super) refused: HashMap<FileId, Instant>,
    stopped: bool,
}

/// Pending changes of an inode.
#[derive(Default)]
struct Affected {
    /// Changes of its own names and attributes.
    itself: u32,
    /// Changes of the names in it.
    names: u32,
}

impl State {
    fn add(&mut self, number: u64, node: u64, dirs: &[u64]) {
        self.queue.insert(number, node);
        self.dirs.insert(number, [&[node], dirs].concat());
        self.affected.entry(node).or_default().itself += 1;
        dirs.iter().for_each(|dir| self.affected.entry(*dir).or_default().names += 1);
        self.oldest.get_or_insert_with(Instant::now);
    }

    /// Removes a change; returns its inode.
    fn remove(&mut self, number: u64) -> Option<u64> {
        for (at, id) in self.dirs.remove(&number).into_iter().flatten().enumerate() {
            let Some(affected) = self.affected.get_mut(&id) else { continue };
            let count = if at == 0 { &mut affected.itself } else { &mut affected.names };
            *count = count.saturating_sub(1);
            if affected.itself == 0 && affected.names == 0 {
                self.affected.remove(&id);
            }
        }
        self.queue.remove(&number)
    }
}

#[derive(Default)]
pub(in crate::client) struct WriteBack {
    state: Mutex<State>,
    wake: Condvar,
    lock: Mutex<()>,
    names: Mutex<()>,
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

    /// Queues a change of an inode and of the names in `dirs`. Inode 0 stands for one that is not known,
    /// because the change is of an earlier session.
    pub(in crate::client) fn queue(&self, number: u64, node: u64, dirs: &[u64]) {
        self.changed();
        let mut state = self.state();
        state.add(number, node, dirs);
        self.queued.store(state.queue.len() as u64, Ordering::Release);
    }

    /// Whether the server has yet to make a change of this inode, of the names in it, or of a directory above
    /// it. `above` are those directories.
    pub(in crate::client) fn affects(&self, id: u64, above: &[u64]) -> bool {
        if self.queued() == 0 {
            return false;
        }
        let state = self.state();
        let itself = |id: &u64| state.affected.get(id).is_some_and(|affected| affected.itself > 0);
        state.affected.contains_key(&id) || itself(&0) || above.iter().any(itself)
    }

    pub(in crate::client) fn queue_rename(&self, number: u64, node: u64, dirs: &[u64]) {
        self.queue(number, node, dirs);
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
            state.remove(*number);
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
        folded.gone.iter().for_each(|number| _ = state.remove(*number));
        self.queued.store(state.queue.len() as u64, Ordering::Release);
    }

    /// Locks the changes of names: one thread at a time sends them. It may have locked the write-back before.
    pub(in crate::client) fn lock_names(&self) -> MutexGuard<'_, ()> {
        lock(&self.names)
    }

    /// Locks the write-back of content: one runs at a time.
    pub(in crate::client) fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the write-back of content and of names, unless one of them is in progress.
    pub(in crate::client) fn try_lock(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = self.lock.try_lock().ok()?;
        // Sending the names locks them again.
        self.names.try_lock().is_ok().then_some(turn)
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
        let node = state.remove(number);
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
