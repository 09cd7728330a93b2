//! Change queue: changes of names on their way to the server.
//!
//! They wait in the journal, where unsent ones are merged (`change_merge.rs`), and are sent in batches
//! (`change_batch.rs`), all of a batch at once on one ordered stream. A change takes effect here and leaves
//! the journal when it is durable on the server: one that a power failure there may have undone is sent
//! again. That, and the number below which changes may be sent next, is durable here before
//! the next batch is sent. After any crash, therefore, only changes are repeated whose results are unaltered,
//! and only changes are merged that were never sent.

use super::{change_batch::next_batch, change_merge::merge};
use crate::client::{
    connection::server_connection::CallFailure,
    session::{Core, errno_of, errno_of_fail},
};
use crate::{
    cache::{CacheError, FileId},
    proto::{
        Attr, EntryKind, FileRef, Ident, Lookup, LookupCall, Op, OpCall, OpDone, RelPath, Sync, SyncCall,
        Version, code, errno, version_before,
    },
};
use bytes::Bytes;
use std::{collections::HashSet, sync::Arc, time::Instant};
use tokio::{sync::Semaphore, task::JoinSet};
use whimbrel_core::lock;
use whimbrel_fuse::{Errno, Result};

/// Changes sent before the first answer is awaited.
const MAX_BATCH: usize = 512;
/// Changes considered for one batch, and for one merge.
const MAX_CONSIDERED: usize = 4 * MAX_BATCH;
/// Directories that the server is asked to sync at once.
const MAX_SYNCS: usize = 256;

type CallResult<T> = std::result::Result<T, CallFailure>;

/// Answer of the server to a change that it made.
pub(in crate::client) struct MadeChange {
    /// Attributes of the file that the path names now, if any.
    pub(super) attr: Option<Attr>,
    /// Version of the file before the change, if the server tells it.
    pub(super) before: Option<Version>,
    /// Moment at which the server was asked.
    pub(super) asked: Instant,
}

impl MadeChange {
    fn answered((OpDone { attr }, payload): (OpDone, Bytes), asked: Instant) -> Self {
        Self { attr, before: version_before(&payload), asked }
    }

    /// A change that was made before, without an answer.
    fn unanswered(attr: Option<Attr>, asked: Instant) -> Self {
        Self { attr, before: None, asked }
    }
}

/// Changes that the server made but may not have synced.
#[derive(Default)]
pub(in crate::client) struct UnsyncedChanges {
    changes: Vec<(Change, MadeChange)>,
    /// Restarts of the server known before the first was sent.
    restarts: u64,
}

impl UnsyncedChanges {
    pub(in crate::client) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// One change to send.
struct Change {
    number: u64,
    op: Op,
    /// Whether it was sent before, and may already have been made.
    repeated: bool,
}

impl Change {
    /// Whether it counts as done if the server finds nothing to do.
    fn may_be_done(&self) -> bool {
        self.repeated || matches!(self.op.plain(), Op::Unlink { ident: None, .. })
    }
}

/// The journal cannot be written and is latched.
fn latched(error: CacheError) -> CallFailure {
    errno_of(error);
    CallFailure::InvalidReply
}

impl Core {
    /// Sends pending changes before a request by path if the server still has the file or its directory under
    /// an old name.
    pub(in crate::client) fn flush_changes(&self, id: u64) -> Result<()> {
        if !self.writeback.has_renames() || !self.is_affected(id) {
            return Ok(());
        }
        let _waits = self.connection.waiting();
        self.send_changes().map_err(errno_of_fail)
    }

    /// Makes a change on the server now, after all queued ones.
    pub(in crate::client) fn make_change_now(&self, op: &Op) -> Result<MadeChange> {
        if self.writeback.queued() > 0 {
            self.send_changes().map_err(errno_of_fail)?;
        }
        let _waits = self.connection.waiting();
        self.writeback.changed();
        let restarts = self.connection.restarts();
        for dir in dirs_of(op) {
            lock(&self.writeback.unsynced).dir_sent(dir, restarts);
        }
        let (sent, begun) = (self.connection.understood(op), Instant::now());
        let (asked, again) = self.connection.runtime().block_on(self.connection.send::<OpCall, _>(
            sent,
            Bytes::new(),
            Some(0),
        ));
        match asked {
            Ok(answer) => Ok(MadeChange::answered(answer, begun)),
            Err(fail) if again && was_already_made(op, &fail) => {
                let begun = Instant::now();
                let attr = self.attr_at(op.path()).map_err(errno_of_fail)?;
                Ok(MadeChange::unanswered(attr, begun))
            }
            // The kernel would look again and repeat a rename that fails with ESTALE.
            Err(fail) if fail.is(code::CONFLICT) && op.is_rename() => Err(self.newer_file(op.path())),
            Err(fail) => {
                if fail.is(code::CONFLICT) {
                    self.inodes().expire_all();
                }
                Err(fail.errno())
            }
        }
    }

    /// The server has a file under a name that was to get another, and this client did not know it: it is
    /// looked up again. The error number is for the program, which may try again.
    pub(in crate::client) fn newer_file(&self, path: &RelPath) -> Errno {
        self.event(format!("{path}: not replaced, because somebody else changed the file on the server"));
        let mut nodes = self.inodes();
        nodes.name_changed(path);
        nodes.expire_all();
        drop(nodes);
        self.invalidate_kernel_names();
        Errno::EBUSY
    }

    pub(in crate::client) fn attr_at(&self, path: &RelPath) -> CallResult<Option<Attr>> {
        let wanted = Lookup { dir: path.clone(), name: None, list: 0 };
        self.connection.call::<LookupCall, _>(wanted).map(|(found, _)| found.attr)
    }

    /// Sends every queued change. Content may be sent meanwhile: it is by path and identity.
    pub(in crate::client) fn send_changes(&self) -> CallResult<()> {
        let _names = self.writeback.lock_names();
        loop {
            let confirmed = self.confirm()?;
            let changes = self.next_changes()?;
            if confirmed || !changes.is_empty() {
                self.cache.sync().map_err(latched)?;
            }
            if changes.is_empty() {
                return Ok(());
            }
            let ops: Vec<&Op> = changes.iter().map(|change| &change.op).collect();
            let (restarts, asked) = (self.connection.restarts(), Instant::now());
            let answers = self.connection.runtime().block_on(self.connection.send_in_order(&ops));
            self.apply_answers(changes, answers, (restarts, asked))?;
        }
    }

    fn apply_answers(
        &self,
        changes: Vec<Change>,
        answers: Vec<Option<CallResult<(OpDone, Bytes)>>>,
        (restarts, asked): (u64, Instant),
    ) -> CallResult<()> {
        let made = |change, made| {
            let mut unsynced = lock(&self.writeback.made);
            if unsynced.is_empty() {
                unsynced.restarts = restarts;
            }
            unsynced.changes.push((change, made));
        };
        let mut later = None;
        for (change, answer) in changes.into_iter().zip(answers) {
            match answer {
                Some(Ok(answer)) => made(change, MadeChange::answered(answer, asked)),
                Some(Err(fail)) if change.may_be_done() && was_already_made(&change.op, &fail) => {
                    let asked = Instant::now();
                    let attr = self.attr_at(change.op.path())?;
                    made(change, MadeChange::unanswered(attr, asked));
                }
                // A later attempt may succeed; following changes may have been refused because this one is
                // missing.
                Some(Err(fail)) if later.is_some() || is_temporary(&fail) => _ = later.get_or_insert(fail),
                Some(Err(fail)) => self.change_refused(&change, &fail),
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

    /// Records that the server made a change.
    fn change_made(&self, change: &Change, made: MadeChange) {
        let number = change.number;
        let node = self.writeback.done(number);
        let Some(attr) = made.attr else { return };
        if let Some(file) = self.file_created_by(number, node) {
            let updated = self.cache.update_file(file, |record| {
                record.ident = Some(attr.ident);
                record.made_by = None;
                record.base = attr.version();
            });
            if let Err(error) = updated {
                errno_of(error);
            }
            lock(&self.known_files).insert(attr.ident, file);
        }
        self.update_inode(change, node, attr, &made);
    }

    /// Has the server sync the changes that it made, then removes them from the journal, which must be
    /// durable before anything builds on it. Returns whether there were any. Those that a restarted server
    /// may have lost stay in the queue and are sent again.
    fn confirm(&self) -> CallResult<bool> {
        let made = std::mem::take(&mut *lock(&self.writeback.made));
        if made.is_empty() {
            return Ok(false);
        }
        let dirs: HashSet<RelPath> =
            made.changes.iter().flat_map(|(change, _)| dirs_of(&change.op)).collect();
        if let Err(fail) = self.connection.runtime().block_on(self.sync_dirs(dirs)) {
            *lock(&self.writeback.made) = made;
            return Err(fail);
        }
        if self.connection.restarts() != made.restarts {
            return Ok(false);
        }
        for (change, made) in made.changes {
            self.change_made(&change, made);
            self.cache.op_done(change.number).map_err(latched)?;
        }
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
        let since = lock(&self.writeback.unsynced).take_dir(&path);
        let dirs = HashSet::from([path.clone()]);
        let synced = self.connection.runtime().block_on(self.sync_dirs(dirs)).map_err(errno_of_fail);
        match since {
            Some(since) if synced.is_err() => lock(&self.writeback.unsynced).dir_sent(path, since),
            Some(since) => self.check_restarts(since, &path)?,
            None => {}
        }
        synced
    }

    /// Fails if the server may have lost what it got since it had restarted `since` times.
    pub(in crate::client) fn check_restarts(&self, since: u64, path: &RelPath) -> Result<()> {
        if self.connection.restarts() == since {
            return Ok(());
        }
        self.event(format!(
            "{path}: the server restarted before it had synced all changes; some may be lost"
        ));
        Err(Errno::EIO)
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

    fn update_inode(&self, change: &Change, node: Option<u64>, attr: Attr, done: &MadeChange) {
        let (Some(id), number) = (node, change.number) else { return };
        let local = {
            let mut nodes = self.inodes();
            let Some(found) = nodes.get_mut(id) else { return };
            let makes = found.local && found.ops.first() == Some(&number);
            found.ops.retain(|op| *op != number);
            // The change created the file, whatever its name is now.
            let made = makes || (found.local && found.attr.kind == attr.kind);
            if made {
                nodes.set_created(id, attr, done.asked);
                // Others can see it now, and not yet what is in it.
                self.claim(&nodes, &[id]);
            }
            made
        };
        if local {
            return;
        }
        match self.is_affected(id) {
            // Later changes are in the attributes here, and not in those of this answer.
            true => {
                self.adopt_own_version(id, &change.op, &attr, done.before);
                self.attr_changed(id);
            }
            false => self.adopt_own_change(id, &change.op, attr, (done.before, done.asked)),
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
        for path in op.from_path().into_iter().chain([op.path()]) {
            nodes.name_changed(path);
        }
        nodes.expire_all();
        drop(nodes);
        self.invalidate_kernel_names();
    }
}

/// Directories that a change modifies.
fn dirs_of(op: &Op) -> Vec<RelPath> {
    op.from_path()
        .filter(|_| op.is_rename())
        .into_iter()
        .chain([op.path()])
        .filter_map(|path| Some(path.split()?.0))
        .collect()
}

/// Error numbers of the server that say nothing against the change itself: its memory, descriptors, disk or
/// network failed, or its file system is read-only or busy for a while.
/// In order: EINTR, EIO, ENXIO, EAGAIN, ENOMEM, EBUSY, ENODEV, ENFILE, EMFILE, ENOSPC, EROFS, ENOLINK,
/// ENETUNREACH, ENOTCONN, ETIMEDOUT, EHOSTDOWN, EHOSTUNREACH, ESTALE, EDQUOT.
const TEMPORARY: [i32; 19] = [4, 5, 6, 11, 12, 16, 19, 23, 24, 28, 30, 67, 101, 107, 110, 112, 113, 116, 122];

/// Whether the same change may succeed later, so that it must not be dropped.
fn is_temporary(fail: &CallFailure) -> bool {
    let refused = matches!(fail, CallFailure::Refused(_));
    !refused || fail.is(whimbrel_wire::Code::INTERNAL) || fail.is_errno(&TEMPORARY)
}

/// Whether this refusal of a repeated change means that the first attempt was made.
fn was_already_made(op: &Op, fail: &CallFailure) -> bool {
    let CallFailure::Refused(refusal) = fail else { return false };
    let number = errno(refusal).map(Errno::from_number);
    match op.plain() {
        Op::Mkdir { .. } | Op::Link { .. } | Op::Symlink { .. } => number == Some(Errno::EEXIST),
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => number == Some(Errno::ENOENT),
        // A regular file is recognised by its stamp.
        Op::Make { node, .. } => node != EntryKind::File && number == Some(Errno::EEXIST),
        Op::Create { .. } | Op::Replace { .. } | Op::SetAttr { .. } | Op::SetTimes { .. } | Op::If { .. } => {
            false
        }
    }
}
