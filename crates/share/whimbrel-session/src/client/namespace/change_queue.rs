//! Change queue: changes of names on their way to the server.
//!
//! They wait in the journal, where unsent ones are merged (`change_merge.rs`), and are sent in batches
//! (`change_batch.rs`), all of a batch at once on one ordered stream. A change leaves the journal when it is
//! durable on the server. That, and the number below which changes may be sent next, is durable here before
//! the next batch is sent. After any crash, therefore, only changes are repeated whose results are unaltered,
//! and only changes are merged that were never sent. Needs the write-back lock.

use super::{change_batch::next_batch, change_merge::merge};
use crate::client::{
    connection::server_connection::CallFailure,
    session::{Core, errno_of, errno_of_fail},
};
use crate::{
    cache::{CacheError, FileId},
    proto::{Attr, FileRef, Ident, Lookup, LookupCall, Op, OpCall, OpDone, RelPath, Sync, SyncCall, errno},
};
use bytes::Bytes;
use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
};
use tokio::{sync::Semaphore, task::JoinSet};
use whimbrel_fuse::{Errno, Result};

/// Changes sent before the first answer is awaited.
const MAX_BATCH: usize = 512;
/// Changes considered for one batch, and for one merge.
const MAX_CONSIDERED: usize = 4 * MAX_BATCH;
/// Directories that the server is asked to sync at once.
const MAX_SYNCS: usize = 256;

type CallResult<T> = std::result::Result<T, CallFailure>;

struct Change {
    number: u64,
    op: Op,
    /// Whether it was sent before, and may already have been made.
    repeated: bool,
}

impl Change {
    /// Whether it counts as done if the server finds nothing to do.
    fn may_be_done(&self) -> bool {
        self.repeated || matches!(self.op, Op::Unlink { ident: None, .. })
    }
}

/// The journal cannot be written and is latched.
fn latched(error: CacheError) -> CallFailure {
    errno_of(error);
    CallFailure::InvalidReply
}

impl Core {
    /// Sends pending renames before a request by path, because the server still has files under their old
    /// names.
    pub(in crate::client) fn flush_changes(&self) -> Result<()> {
        if !self.writeback.has_renames() {
            return Ok(());
        }
        let _waits = self.connection.waiting();
        let _turn = self.writeback.lock();
        self.send_changes().map_err(errno_of_fail)
    }

    /// Makes a change on the server now, after all queued ones. Returns the attributes of its name after
    /// that.
    pub(in crate::client) fn make_change_now(&self, op: Op) -> Result<Option<Attr>> {
        if self.writeback.queued() > 0 {
            let _turn = self.writeback.lock();
            self.send_changes().map_err(errno_of_fail)?;
        }
        let _waits = self.connection.waiting();
        self.writeback.changed();
        let (asked, again) = self.connection.runtime().block_on(self.connection.send::<OpCall, _>(
            op.clone(),
            Bytes::new(),
            Some(0),
        ));
        match asked {
            Ok((OpDone { attr }, _)) => Ok(attr),
            Err(fail) if again && was_already_made(&op, &fail) => {
                self.attr_at(op.path()).map_err(errno_of_fail)
            }
            Err(fail) => Err(fail.errno()),
        }
    }

    pub(in crate::client) fn attr_at(&self, path: &RelPath) -> CallResult<Option<Attr>> {
        let wanted = Lookup { dir: path.clone(), name: None, list: 0 };
        self.connection.call::<LookupCall, _>(wanted).map(|(found, _)| found.attr)
    }

    /// Sends every queued change. Needs the write-back lock.
    pub(in crate::client) fn send_changes(&self) -> CallResult<()> {
        loop {
            let confirmed = self.confirm()?;
            let changes = self.next_changes()?;
            if confirmed || !changes.is_empty() {
                self.cache.sync().map_err(latched)?;
                self.writeback.confirmed();
            }
            if changes.is_empty() {
                return Ok(());
            }
            let ops: Vec<&Op> = changes.iter().map(|change| &change.op).collect();
            let answers = self.connection.runtime().block_on(self.connection.send_in_order(&ops));
            self.apply_answers(&changes, answers)?;
        }
    }

    fn apply_answers(&self, changes: &[Change], answers: Vec<Option<CallResult<OpDone>>>) -> CallResult<()> {
        let mut later = None;
        for (change, answer) in changes.iter().zip(answers) {
            match answer {
                Some(Ok(OpDone { attr })) => self.change_made(change, attr),
                Some(Err(fail)) if change.may_be_done() && was_already_made(&change.op, &fail) => {
                    self.change_made(change, self.attr_at(change.op.path())?);
                }
                // A later attempt may succeed; following changes may have been refused because this one is
                // missing.
                Some(Err(fail)) if later.is_some() || is_temporary(&fail) => _ = later.get_or_insert(fail),
                Some(Err(fail)) => self.change_refused(change, &fail),
                // The connection broke before its answer: the change may have been made, and is sent again.
                None => {}
            }
        }
        later.map_or(Ok(()), Err)
    }

    /// The next changes to send, which cannot be merged any more.
    fn next_changes(&self) -> CallResult<Vec<Change>> {
        // The inodes are locked until a new change is in both the journal and the queue.
        let _nodes = self.inodes();
        while self.merge_unsent()? {}
        let waiting = self.writeback.waiting();
        let queue = self.cache.first_ops(MAX_CONSIDERED, |number| waiting.contains(number));
        let chosen = next_batch(queue, MAX_BATCH).into_iter();
        let changes: Vec<Change> = chosen
            .map(|(number, op)| Change { repeated: self.writeback.mark_sending(number), number, op })
            .collect();
        let below = changes.iter().map(|change| change.number + 1).max().unwrap_or_default();
        self.cache.mark_sent_below(below).map_err(latched)?;
        Ok(changes)
    }

    /// Merges the first unsent changes; true if more may be merged now. Needs the inodes, so that no change
    /// is added.
    fn merge_unsent(&self) -> CallResult<bool> {
        let (waiting, from) = (self.writeback.waiting(), self.cache.first_unsent_op());
        let queue =
            self.cache.first_ops(MAX_CONSIDERED, |number| *number >= from && waiting.contains(number));
        let folded = merge(queue);
        if folded.is_empty() {
            return Ok(false);
        }
        self.writeback.changes_merged(&folded);
        self.cache.merge_ops(folded).map_err(latched)?;
        Ok(true)
    }

    fn change_made(&self, change: &Change, attr: Option<Attr>) {
        let number = change.number;
        let node = self.writeback.change_made(number, dirs_of(&change.op));
        let Some(attr) = attr else { return };
        if let Some(file) = self.file_created_by(number, node) {
            let updated = self.cache.update_file(file, |record| {
                record.ident = Some(attr.ident);
                record.made_by = None;
                record.base = attr.version();
            });
            if let Err(error) = updated {
                errno_of(error);
            }
            self.known_files.lock().unwrap_or_else(PoisonError::into_inner).insert(attr.ident, file);
        }
        self.update_inode(number, node, attr);
    }

    /// Has the server sync the changes that it made, then removes them from the journal, which must be
    /// durable before anything builds on it. Returns whether there were any.
    fn confirm(&self) -> CallResult<bool> {
        let made = self.writeback.unconfirmed();
        if made.is_empty() {
            return Ok(false);
        }
        let dirs: HashSet<RelPath> = made.iter().flat_map(|(_, dirs)| dirs.iter().cloned()).collect();
        self.connection.runtime().block_on(self.sync_dirs(dirs))?;
        made.iter().try_for_each(|(number, _)| self.cache.op_done(*number)).map_err(latched)?;
        Ok(true)
    }

    async fn sync_dirs(&self, dirs: HashSet<RelPath>) -> CallResult<()> {
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(MAX_SYNCS)));
        for path in dirs {
            let (link, places) = (self.connection.clone(), places.clone());
            tasks.spawn(async move {
                // The semaphore is never closed.
                let _place = places.acquire().await;
                let body = Sync { file: FileRef { path, ident: Ident::default() } };
                match link.send::<SyncCall, _>(body, Bytes::new(), None).await.0 {
                    // The directory was removed by a later change, or cannot be opened.
                    Err(fail) if !fail.is_errno(&[5]) && matches!(fail, CallFailure::Refused(_)) => Ok(()),
                    synced => synced.map(drop),
                }
            });
        }
        tasks.join_all().await.into_iter().collect()
    }

    /// Makes a directory durable on the server.
    pub(in crate::client) fn sync_dir(&self, id: u64) -> Result<()> {
        let Some(path) = self.inodes().path(id) else { return Ok(()) };
        self.connection.runtime().block_on(self.sync_dirs(HashSet::from([path]))).map_err(errno_of_fail)
    }

    fn file_created_by(&self, number: u64, node: Option<u64>) -> Option<FileId> {
        let makes =
            |file: &FileId| self.cache.file(*file).is_some_and(|record| record.made_by == Some(number));
        match node {
            // A change of an earlier session has no inode.
            None | Some(0) => self.cache.files().into_iter().map(|(file, _)| file).find(makes),
            Some(id) => self.inodes().get(id)?.file.filter(makes),
        }
    }

    fn update_inode(&self, number: u64, node: Option<u64>, attr: Attr) {
        let Some(id) = node else { return };
        let local = {
            let mut nodes = self.inodes();
            let Some(found) = nodes.get_mut(id) else { return };
            let makes = found.local && found.ops.first() == Some(&number);
            found.ops.retain(|op| *op != number);
            // The change created the file, whatever its name is now.
            let made = makes || (found.local && found.attr.kind == attr.kind);
            if made {
                nodes.set_created(id, attr);
            }
            made
        };
        if !local {
            self.adopt_own_change(id, attr);
        }
    }

    /// The server refused a change: reports it, and saves what was written to its file as a conflict.
    fn change_refused(&self, Change { number, op, .. }: &Change, fail: &CallFailure) {
        self.event(format!("cannot {} {} on the server: {fail}", op.verb(), op.path()));
        let node = self.writeback.done(*number);
        if let Some(file) = self.file_created_by(*number, node) {
            self.conflict(file, "the server refused to create the file");
        }
        if let Err(error) = self.cache.op_done(*number) {
            errno_of(error);
        }
        // What is cached about the affected names is wrong.
        let mut nodes = self.inodes();
        if let Some(id) = node {
            let names = nodes.get(id).map(|node| node.names.clone()).unwrap_or_default();
            let local = nodes.get(id).is_some_and(|node| node.local);
            for (parent, name) in names {
                if local {
                    nodes.unlink(parent, &name);
                }
            }
            nodes.remove_unused(id);
        }
        nodes.expire_all();
    }
}

/// Directories that a change modifies.
fn dirs_of(op: &Op) -> Vec<RelPath> {
    let from = match op {
        Op::Rename { from, .. } => Some(from),
        _ => None,
    };
    from.into_iter().chain([op.path()]).filter_map(|path| Some(path.split()?.0)).collect()
}

/// Whether the same change may succeed later.
fn is_temporary(fail: &CallFailure) -> bool {
    // The numbers are ENOMEM, ENFILE, EMFILE, ENOSPC and EDQUOT.
    matches!(fail, CallFailure::Unreachable) || fail.is_errno(&[12, 23, 24, 28, 122])
}

/// Whether this refusal of a repeated change means that the first attempt was made.
fn was_already_made(op: &Op, fail: &CallFailure) -> bool {
    let CallFailure::Refused(refusal) = fail else { return false };
    let number = errno(refusal).map(Errno::from_number);
    match op {
        Op::Mkdir { .. } | Op::Link { .. } | Op::Symlink { .. } => number == Some(Errno::EEXIST),
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => number == Some(Errno::ENOENT),
        Op::Create { .. } | Op::Replace { .. } | Op::SetAttr { .. } => false,
    }
}
