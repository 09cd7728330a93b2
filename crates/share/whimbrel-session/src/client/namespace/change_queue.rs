//! Change queue: changes of names on their way to the server.
//!
//! They wait in the journal, where unsent ones are merged (`change_merge.rs`), and are sent in batches
//! (`change_batch.rs`), all of a batch at once on one ordered stream. A change leaves the journal when it is
//! durable on the server. That, and the number below which changes may be sent next, is durable here before
//! the next batch is sent. After any crash, therefore, only changes are repeated whose results are unaltered,
//! and only changes are merged that were never sent. Needs the write-back lock.

use super::{change_batch::batch, change_merge::fold};
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
const CHANGES: usize = 512;
/// Changes considered for one batch, and for one merge.
const LOOKED_AT: usize = 4 * CHANGES;
/// Directories that the server is asked to sync at once.
const DIRECTORIES: usize = 256;

type Asked<T> = std::result::Result<T, CallFailure>;

/// One change to send.
struct Change {
    number: u64,
    op: Op,
    /// Whether it was sent before, and may already have been made.
    again: bool,
}

impl Change {
    /// Whether it counts as done if the server finds nothing to do.
    fn may_be_made(&self) -> bool {
        self.again || matches!(self.op, Op::Unlink { ident: None, .. })
    }
}

/// The journal cannot be written and is latched.
fn latched(error: CacheError) -> CallFailure {
    errno_of(error);
    CallFailure::Nonsense
}

impl Core {
    /// Sends pending renames before a request by path, because the server still has files under their old
    /// names.
    pub(in crate::client) fn flush_changes(&self) -> Result<()> {
        if !self.writeback.has_renames() {
            return Ok(());
        }
        let _waits = self.link.waiting();
        let _turn = self.writeback.turn();
        self.drain().map_err(errno_of_fail)
    }

    /// Makes a change on the server now, after all queued ones. Returns the attributes of its name after
    /// that.
    pub(in crate::client) fn make(&self, op: Op) -> Result<Option<Attr>> {
        if self.writeback.queued() > 0 {
            let _turn = self.writeback.turn();
            self.drain().map_err(errno_of_fail)?;
        }
        let _waits = self.link.waiting();
        self.writeback.changed();
        let (asked, again) =
            self.link.runtime().block_on(self.link.ask::<OpCall, _>(op.clone(), Bytes::new(), Some(0)));
        match asked {
            Ok((OpDone { attr }, _)) => Ok(attr),
            Err(fail) if again && was_done(&op, &fail) => self.attr_at(op.path()).map_err(errno_of_fail),
            Err(fail) => Err(fail.errno()),
        }
    }

    pub(in crate::client) fn attr_at(&self, path: &RelPath) -> Asked<Option<Attr>> {
        let wanted = Lookup { dir: path.clone(), name: None, list: 0 };
        self.link.call::<LookupCall, _>(wanted).map(|(found, _)| found.attr)
    }

    /// Sends every queued change. Needs the write-back lock.
    pub(in crate::client) fn drain(&self) -> Asked<()> {
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
            let answers = self.link.runtime().block_on(self.link.ask_in_order(&ops));
            self.answered(&changes, answers)?;
        }
    }

    fn answered(&self, changes: &[Change], answers: Vec<Option<Asked<OpDone>>>) -> Asked<()> {
        let mut later = None;
        for (change, answer) in changes.iter().zip(answers) {
            match answer {
                Some(Ok(OpDone { attr })) => self.made(change, attr),
                Some(Err(fail)) if change.may_be_made() && was_done(&change.op, &fail) => {
                    self.made(change, self.attr_at(change.op.path())?);
                }
                // A later attempt may succeed; following changes may have been refused because this one is
                // missing.
                Some(Err(fail)) if later.is_some() || may_pass(&fail) => _ = later.get_or_insert(fail),
                Some(Err(fail)) => self.not_made(change, &fail),
                // The connection broke before its answer: the change may have been made, and is sent again.
                None => {}
            }
        }
        later.map_or(Ok(()), Err)
    }

    /// The next changes to send, which cannot be merged any more.
    fn next_changes(&self) -> Asked<Vec<Change>> {
        // The inodes are locked until a new change is in both the journal and the queue.
        let _nodes = self.nodes();
        while self.fold_some()? {}
        let waiting = self.writeback.waiting();
        let queue = self.cache.first_ops(LOOKED_AT, |number| waiting.contains(number));
        let chosen = batch(queue, CHANGES).into_iter();
        let changes: Vec<Change> =
            chosen.map(|(number, op)| Change { again: self.writeback.sends(number), number, op }).collect();
        let below = changes.iter().map(|change| change.number + 1).max().unwrap_or_default();
        self.cache.send_below(below).map_err(latched)?;
        Ok(changes)
    }

    /// Merges the first unsent changes; true if more may be merged now. Needs the inodes, so that no change
    /// is added.
    fn fold_some(&self) -> Asked<bool> {
        let (waiting, from) = (self.writeback.waiting(), self.cache.unsent());
        let queue = self.cache.first_ops(LOOKED_AT, |number| *number >= from && waiting.contains(number));
        let folded = fold(queue);
        if folded.is_nothing() {
            return Ok(false);
        }
        self.writeback.folded(&folded);
        self.cache.fold_ops(folded).map_err(latched)?;
        Ok(true)
    }

    /// Records that the server made a change.
    fn made(&self, change: &Change, attr: Option<Attr>) {
        let number = change.number;
        let node = self.writeback.made(number, dirs_of(&change.op));
        let Some(attr) = attr else { return };
        if let Some(file) = self.made_file(number, node) {
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
        self.tell_node(number, node, attr);
    }

    /// Has the server sync the changes that it made, then removes them from the journal, which must be
    /// durable before anything builds on it. Returns whether there were any.
    fn confirm(&self) -> Asked<bool> {
        let made = self.writeback.unconfirmed();
        if made.is_empty() {
            return Ok(false);
        }
        let dirs: HashSet<RelPath> = made.iter().flat_map(|(_, dirs)| dirs.iter().cloned()).collect();
        self.link.runtime().block_on(self.sync_dirs(dirs))?;
        made.iter().try_for_each(|(number, _)| self.cache.op_done(*number)).map_err(latched)?;
        Ok(true)
    }

    async fn sync_dirs(&self, dirs: HashSet<RelPath>) -> Asked<()> {
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(DIRECTORIES)));
        for path in dirs {
            let (link, places) = (self.link.clone(), places.clone());
            tasks.spawn(async move {
                // The semaphore is never closed.
                let _place = places.acquire().await;
                let body = Sync { file: FileRef { path, ident: Ident::default() } };
                match link.ask::<SyncCall, _>(body, Bytes::new(), None).await.0 {
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
        let Some(path) = self.nodes().path(id) else { return Ok(()) };
        self.link.runtime().block_on(self.sync_dirs(HashSet::from([path]))).map_err(errno_of_fail)
    }

    /// The file that a change creates.
    fn made_file(&self, number: u64, node: Option<u64>) -> Option<FileId> {
        let makes =
            |file: &FileId| self.cache.file(*file).is_some_and(|record| record.made_by == Some(number));
        match node {
            // A change of an earlier session has no inode.
            None | Some(0) => self.cache.files().into_iter().map(|(file, _)| file).find(makes),
            Some(id) => self.nodes().get(id)?.file.filter(makes),
        }
    }

    fn tell_node(&self, number: u64, node: Option<u64>, attr: Attr) {
        let Some(id) = node else { return };
        let local = {
            let mut nodes = self.nodes();
            let Some(found) = nodes.get_mut(id) else { return };
            let makes = found.local && found.ops.first() == Some(&number);
            found.ops.retain(|op| *op != number);
            // The change created the file, whatever its name is now.
            let made = makes || (found.local && found.attr.kind == attr.kind);
            if made {
                nodes.made(id, attr);
            }
            made
        };
        if !local {
            self.own_change(id, attr);
        }
    }

    /// The server refused a change: reports it, and saves what was written to its file as a conflict.
    fn not_made(&self, Change { number, op, .. }: &Change, fail: &CallFailure) {
        self.event(format!("cannot {} {} on the server: {fail}", op.verb(), op.path()));
        let node = self.writeback.done(*number);
        if let Some(file) = self.made_file(*number, node) {
            self.conflict(file, "the server refused to create the file");
        }
        if let Err(error) = self.cache.op_done(*number) {
            errno_of(error);
        }
        // What is cached about the affected names is wrong.
        let mut nodes = self.nodes();
        if let Some(id) = node {
            let names = nodes.get(id).map(|node| node.names.clone()).unwrap_or_default();
            let local = nodes.get(id).is_some_and(|node| node.local);
            for (parent, name) in names {
                if local {
                    nodes.unlink(parent, &name);
                }
            }
            nodes.reap(id);
        }
        nodes.doubt();
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
fn may_pass(fail: &CallFailure) -> bool {
    // The numbers are ENOMEM, ENFILE, EMFILE, ENOSPC and EDQUOT.
    matches!(fail, CallFailure::Gone) || fail.is_errno(&[12, 23, 24, 28, 122])
}

/// Whether this refusal of a repeated change means that the first attempt was made.
fn was_done(op: &Op, fail: &CallFailure) -> bool {
    let CallFailure::Refused(refusal) = fail else { return false };
    let number = errno(refusal).map(Errno::from_number);
    match op {
        Op::Mkdir { .. } | Op::Link { .. } | Op::Symlink { .. } => number == Some(Errno::EEXIST),
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => number == Some(Errno::ENOENT),
        Op::Create { .. } | Op::Replace { .. } | Op::SetAttr { .. } => false,
    }
}
