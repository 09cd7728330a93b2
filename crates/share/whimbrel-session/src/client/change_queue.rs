//! Changes of names on their way to the server.
//!
//! They wait in the journal, where those that were never sent are folded (`fold.rs`), and are sent in batches
//! (`batch.rs`), each on one ordered stream, all at once. A change leaves the journal when the server has it
//! on its disk, and that is durable here before the next batch builds on it, together with how far that one
//! goes; so after any crash only changes are sent again whose traces are still as they left them, and only
//! changes are folded that left none. Needs the turn of the write-back.

use super::{
    change_batch::batch,
    change_merge::fold,
    server_connection::CallFailure,
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

/// Changes sent before the first answer is waited for.
const CHANGES: usize = 512;
/// Changes looked at to find these, and to be folded at once.
const LOOKED_AT: usize = 4 * CHANGES;
/// Directories that the server is asked at once to have on its disk.
const DIRECTORIES: usize = 256;

type Asked<T> = std::result::Result<T, CallFailure>;

/// A change that is sent.
struct Change {
    number: u64,
    op: Op,
    /// It was sent before, and may have been made.
    again: bool,
}

impl Change {
    /// Whether it is done if the server finds nothing to be done.
    fn may_be_made(&self) -> bool {
        self.again || matches!(self.op, Op::Unlink { ident: None, .. })
    }
}

/// The journal could not be written, and takes nothing more.
fn latched(error: CacheError) -> CallFailure {
    errno_of(error);
    CallFailure::Nonsense
}

impl Core {
    /// Before the server is asked by path: as long as it knows files by older names, those are made known
    /// first.
    pub(super) fn flush_changes(&self) -> Result<()> {
        if !self.writeback.has_renames() {
            return Ok(());
        }
        let _waits = self.link.waiting();
        let _turn = self.writeback.turn();
        self.drain().map_err(errno_of_fail)
    }

    /// Makes a change on the server now, after all that were to be made before. What its name is then.
    pub(super) fn make(&self, op: Op) -> Result<Option<Attr>> {
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

    pub(super) fn attr_at(&self, path: &RelPath) -> Asked<Option<Attr>> {
        let wanted = Lookup { dir: path.clone(), name: None, list: 0 };
        self.link.call::<LookupCall, _>(wanted).map(|(found, _)| found.attr)
    }

    /// Sends every change that is queued. Needs the turn.
    pub(super) fn drain(&self) -> Asked<()> {
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
                // There may be room, or a server, later. What follows may be refused for the lack of this
                // one.
                Some(Err(fail)) if later.is_some() || may_pass(&fail) => _ = later.get_or_insert(fail),
                Some(Err(fail)) => self.not_made(change, &fail),
                // The connection broke before its answer: it may have been made, and is sent again.
                None => {}
            }
        }
        later.map_or(Ok(()), Err)
    }

    /// The next changes to send, which can be taken back no more.
    fn next_changes(&self) -> Asked<Vec<Change>> {
        // A change is in the journal and in the queue before its maker lets go of the nodes.
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

    /// Folds the first changes that were not sent yet. Whether that may let others be folded. Needs the
    /// nodes, so that nobody adds one.
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

    /// The server made a change.
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

    /// Has the server keep what was made for good, and then forgets that it was to be made: which is to be
    /// durable before anything builds on it. Whether there was something.
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
                    // It has gone with a later change, or nobody may open it.
                    Err(fail) if !fail.is_errno(&[5]) && matches!(fail, CallFailure::Refused(_)) => Ok(()),
                    synced => synced.map(drop),
                }
            });
        }
        tasks.join_all().await.into_iter().collect()
    }

    /// Makes a directory durable on the server.
    pub(super) fn sync_dir(&self, id: u64) -> Result<()> {
        let Some(path) = self.nodes().path(id) else { return Ok(()) };
        self.link.runtime().block_on(self.sync_dirs(HashSet::from([path]))).map_err(errno_of_fail)
    }

    /// The file that a change makes.
    fn made_file(&self, number: u64, node: Option<u64>) -> Option<FileId> {
        let makes =
            |file: &FileId| self.cache.file(*file).is_some_and(|record| record.made_by == Some(number));
        match node {
            // Of an earlier session: no node knows it.
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
            // A change that made it, however it is called by now.
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

    /// The server will not make a change: it is said, and what was written for it is kept.
    fn not_made(&self, Change { number, op, .. }: &Change, fail: &CallFailure) {
        self.event(format!("cannot {} {} on the server: {fail}", op.verb(), op.path()));
        let node = self.writeback.done(*number);
        if let Some(file) = self.made_file(*number, node) {
            self.conflict(file, "the server does not take it");
        }
        if let Err(error) = self.cache.op_done(*number) {
            errno_of(error);
        }
        // What is believed of the places it is about is not so.
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

/// Directories that a change alters.
fn dirs_of(op: &Op) -> Vec<RelPath> {
    let from = match op {
        Op::Rename { from, .. } => Some(from),
        _ => None,
    };
    from.into_iter().chain([op.path()]).filter_map(|path| Some(path.split()?.0)).collect()
}

/// Whether the same change may be made later.
fn may_pass(fail: &CallFailure) -> bool {
    // ENOMEM, ENFILE, EMFILE, ENOSPC, EDQUOT.
    matches!(fail, CallFailure::Gone) || fail.is_errno(&[12, 23, 24, 28, 122])
}

/// Whether a change that is refused like this was made when it was asked for the first time.
fn was_done(op: &Op, fail: &CallFailure) -> bool {
    let CallFailure::Refused(refusal) = fail else { return false };
    let number = errno(refusal).map(Errno::from_number);
    match op {
        Op::Mkdir { .. } | Op::Link { .. } | Op::Symlink { .. } => number == Some(Errno::EEXIST),
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => number == Some(Errno::ENOENT),
        Op::Create { .. } | Op::Replace { .. } | Op::SetAttr { .. } => false,
    }
}
