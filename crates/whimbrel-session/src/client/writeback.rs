//! What goes to the server: changes of names in their order, then content.
//!
//! One write-back runs at a time. Changes travel on one ordered stream, all at once. Content of a file goes after every
//! change; it says which last change it expects to find, and sets a new one, which is in the journal before. So a
//! write-back that was cut off is told from a change by somebody else, also after a crash.

use super::{
    link::Fail,
    session::{Core, errno_of, errno_of_fail},
};
use crate::{
    cache::{DirtyBlock, FileId, FileRecord, Recovered},
    proto::{
        Attr, FileRef, Lookup, LookupCall, Op, OpCall, OpDone, RelPath, Time, Write, WriteCall, code, errno,
        pack_pages,
    },
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinSet};
use whimbrel_fuse::{Errno, Result};

/// Blocks of one file under way at once.
const UNDER_WAY: usize = 32;
/// Files under way at once.
const FILES: usize = 32;
/// Changes sent before the first answer is waited for.
const CHANGES: usize = 512;
/// How often the thread looks whether something is due.
const LOOK: Duration = Duration::from_millis(250);
/// A file the server refuses is tried again after so long.
const REFUSED: Duration = Duration::from_secs(30);

#[derive(Default)]
struct State {
    /// Changes and the nodes they are about.
    queue: BTreeMap<u64, u64>,
    renames: HashSet<u64>,
    sending: HashSet<u64>,
    since: HashMap<FileId, Instant>,
    oldest: Option<Instant>,
    refused: HashMap<FileId, Instant>,
    stopped: bool,
}

/// What is to be written back.
#[derive(Default)]
pub(super) struct WriteBack {
    state: Mutex<State>,
    wake: Condvar,
    turn: Mutex<()>,
    queued: AtomicU64,
    renames: AtomicU64,
}

impl WriteBack {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the server has yet to make.
    pub(super) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Acquire)
    }

    pub(super) fn queue(&self, number: u64, node: u64) {
        let mut state = self.state();
        state.queue.insert(number, node);
        state.oldest.get_or_insert_with(Instant::now);
        self.queued.store(state.queue.len() as u64, Ordering::Release);
    }

    pub(super) fn queue_rename(&self, number: u64, node: u64) {
        self.queue(number, node);
        self.state().renames.insert(number);
        self.renames.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes changes back that were not sent yet; all of them or none.
    pub(super) fn cancel(&self, numbers: &[u64]) -> bool {
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

    fn done(&self, number: u64) -> Option<u64> {
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

    pub(super) fn wrote(&self, file: FileId) {
        self.state().since.entry(file).or_insert_with(Instant::now);
    }

    pub(super) fn wake(&self) {
        self.wake.notify_all();
    }

    pub(super) fn stop(&self) {
        self.state().stopped = true;
        self.wake.notify_all();
    }

    /// The thread that writes back what is due, until the session is gone.
    pub(super) fn start(core: &Arc<Core>) {
        let weak = core.me.clone();
        std::thread::spawn(move || {
            while let Some(core) = weak.upgrade() {
                let state = core.writeback.state();
                let waited = core.writeback.wake.wait_timeout(state, LOOK);
                if waited.unwrap_or_else(PoisonError::into_inner).0.stopped {
                    return;
                }
                if core.is_due() {
                    // What fails is an event, and is tried again.
                    let _ = core.flush_all(false);
                }
            }
        });
    }
}

/// A file and its content as a write-back sends it.
struct Sending {
    file: FileId,
    record: FileRecord,
    wanted: FileRef,
    stamp: Time,
    expect: Vec<Time>,
    /// The content's count when this began.
    content: u64,
}

impl Core {
    fn is_due(&self) -> bool {
        if !self.link.is_up() {
            return false;
        }
        let stats = self.cache.stats();
        if stats.dirty > stats.capacity / 2 {
            return true;
        }
        let Some(delay) = self.settings().delay.map(Duration::from_secs) else { return false };
        let state = self.writeback.state();
        let refused = |file: &FileId| state.refused.get(file).is_some_and(|at| at.elapsed() < REFUSED);
        state.oldest.is_some_and(|at| at.elapsed() >= delay)
            || state.since.iter().any(|(file, at)| at.elapsed() >= delay && !refused(file))
    }

    /// Before the server is asked by path: as long as it knows files by older names, those are made known first.
    pub(super) fn settle_names(&self) -> Result<()> {
        if self.writeback.renames.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let _turn = self.writeback.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.drain().map_err(errno_of_fail)
    }

    /// Makes a change on the server now, after all that were to be made before. What its name is then.
    pub(super) fn make(&self, op: Op) -> Result<Option<Attr>> {
        if self.writeback.queued() > 0 {
            let _turn = self.writeback.turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.drain().map_err(errno_of_fail)?;
        }
        let (asked, again) =
            self.link.runtime().block_on(self.link.ask::<OpCall, _>(op.clone(), Bytes::new(), Some(0)));
        match asked {
            Ok((OpDone { attr }, _)) => Ok(attr),
            Err(fail) if again && was_done(&op, &fail) => self.attr_at(op.path()).map_err(errno_of_fail),
            Err(fail) => Err(fail.errno()),
        }
    }

    fn attr_at(&self, path: &RelPath) -> std::result::Result<Option<Attr>, Fail> {
        let wanted = Lookup { dir: path.clone(), name: None, list: 0 };
        self.link.call::<LookupCall, _>(wanted).map(|(found, _)| found.attr)
    }

    /// Sends every change that is queued, in order. Needs the turn.
    fn drain(&self) -> std::result::Result<(), Fail> {
        let mut again = false;
        loop {
            let ops = self.next_changes();
            if ops.is_empty() {
                return Ok(());
            }
            let answers = self.link.runtime().block_on(self.link.ask_in_order(&ops));
            for ((number, op), answer) in ops.into_iter().zip(answers) {
                match answer {
                    Some(Ok(OpDone { attr })) => self.made(number, attr),
                    Some(Err(fail)) if (again || self.writeback.is_old(number)) && was_done(&op, &fail) => {
                        self.made(number, self.attr_at(op.path())?);
                    }
                    Some(Err(Fail::Refused(refusal))) if is_full(&refusal) => {
                        return Err(Fail::Refused(refusal));
                    }
                    Some(Err(Fail::Gone)) => return Err(Fail::Gone),
                    Some(Err(fail)) => self.not_made(number, &op, &fail),
                    // The connection broke before its answer: it may have been made.
                    None => again = true,
                }
            }
        }
    }

    /// The next changes to send, which can be taken back no more.
    fn next_changes(&self) -> Vec<(u64, Op)> {
        // A change is in the journal and in the queue before its maker lets go of the nodes.
        let nodes = self.nodes();
        let mut state = self.writeback.state();
        let ops = self.cache.ops().into_iter().filter(|(number, _)| state.queue.contains_key(number));
        let ops: Vec<(u64, Op)> = ops.take(CHANGES).collect();
        state.sending.extend(ops.iter().map(|(number, _)| *number));
        drop(nodes);
        ops
    }

    /// The server made a change.
    fn made(&self, number: u64, attr: Option<Attr>) {
        let node = self.writeback.done(number);
        if let Some(attr) = attr {
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
        if let Err(error) = self.cache.op_done(number) {
            errno_of(error);
        }
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
    fn not_made(&self, number: u64, op: &Op, fail: &Fail) {
        self.event(format!("cannot {} {} on the server: {fail}", op.verb(), op.path()));
        let node = self.writeback.done(number);
        if let Some(file) = self.made_file(number, node) {
            self.conflict(file, "the server does not take it");
        }
        if let Err(error) = self.cache.op_done(number) {
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

    /// What an earlier session left, before anything new begins.
    pub(super) fn take_up(&self, recovered: &Recovered) {
        let ops = self.cache.ops();
        for (number, _) in &ops {
            // No node of this session is about it.
            self.writeback.queue(*number, 0);
        }
        if recovered.dirty.is_empty() && ops.is_empty() {
            return;
        }
        self.event(format!(
            "an earlier session left {} changed files and {} changes of names; they are written back now",
            recovered.dirty.len(),
            ops.len()
        ));
        self.writeback.state().oldest = Instant::now().checked_sub(Duration::from_secs(1 << 20));
        if let Err(errno) = self.flush_all(true) {
            self.event(format!("they are not all written back yet: {errno}"));
        }
    }

    /// Writes one file back, with every change of names before it.
    pub(super) fn flush_file(&self, file: FileId) -> Result<()> {
        let _turn = self.writeback.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.drain().map_err(errno_of_fail)?;
        let Some(sending) = self.prepare(file)? else { return Ok(()) };
        let core = self.me.upgrade().ok_or(Errno::EIO)?;
        let content = sending.content;
        let sent = self.link.runtime().block_on(core.send(sending));
        self.outcome(file, content, sent)
    }

    /// Writes everything back; with `durable` the server has it on its disk when this returns.
    pub(super) fn flush_all(&self, durable: bool) -> Result<()> {
        let _turn = self.writeback.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.drain().map_err(errno_of_fail)?;
        let mut sendings = Vec::new();
        let mut first = Ok(());
        let dirty = self.cache.dirty_files();
        self.writeback.state().since.retain(|file, _| dirty.contains(file));
        for file in dirty {
            match self.prepare(file) {
                Ok(sending) => sendings.extend(sending),
                Err(errno) => first = first.and(Err(errno)),
            }
        }
        if !sendings.is_empty() {
            // The stamps by which the server's answer to a crash is understood.
            self.cache.sync().map_err(errno_of)?;
        }
        let files: Vec<FileId> = sendings.iter().map(|sending| sending.file).collect();
        for (file, content, sent) in self.link.runtime().block_on(self.send_all(sendings)) {
            first = first.and(self.outcome(file, content, sent));
        }
        if durable {
            first = first.and(self.link.runtime().block_on(self.sync_all(files)));
        }
        first
    }

    async fn send_all(&self, sendings: Vec<Sending>) -> Vec<(FileId, u64, std::result::Result<Attr, Fail>)> {
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(FILES)));
        for sending in sendings {
            let Some(core) = self.me.upgrade() else { break };
            let places = places.clone();
            tasks.spawn(async move {
                // The semaphore is never closed.
                let _place = places.acquire().await;
                (sending.file, sending.content, core.send(sending).await)
            });
        }
        tasks.join_all().await
    }

    async fn sync_all(&self, files: Vec<FileId>) -> Result<()> {
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(FILES)));
        for file in files {
            let (Some(core), places) = (self.me.upgrade(), places.clone()) else { break };
            tasks.spawn(async move {
                let _place = places.acquire().await;
                core.server_sync(file).await
            });
        }
        tasks.join_all().await.into_iter().collect()
    }

    /// Notes in the journal what the server's last change will be.
    fn prepare(&self, file: FileId) -> Result<Option<Sending>> {
        let Some(record) = self.cache.file(file).filter(|record| record.dirty && !record.removed) else {
            return Ok(None);
        };
        let Some(ident) = record.ident else { return Ok(None) };
        let content = self.cache.content_epoch(file).unwrap_or_default();
        // Again, so that it is not older than its count.
        let Some(record) = self.cache.file(file) else { return Ok(None) };
        let stamp = record.mtime.unwrap_or_else(|| self.stamp());
        let expect = [Some(record.base.mtime), record.stamp, Some(stamp)].into_iter().flatten().collect();
        self.cache.update_file(file, |record| record.stamp = Some(stamp)).map_err(errno_of)?;
        self.writeback.state().since.remove(&file);
        let wanted = FileRef { path: record.path.clone(), ident };
        Ok(Some(Sending { file, record, wanted, stamp, expect, content }))
    }

    async fn send(self: Arc<Self>, sending: Sending) -> std::result::Result<Attr, Fail> {
        let blocks = self.cache.dirty_blocks(sending.file);
        let cut = (sending.record.zero_from < sending.record.base.size).then_some(sending.record.zero_from);
        let sending = Arc::new(sending);
        let (last, rest) = match blocks.split_last() {
            Some((last, rest)) => (Some(*last), rest.to_vec()),
            None => (None, Vec::new()),
        };
        if cut.is_some() && !rest.is_empty() {
            self.clone().send_piece(sending.clone(), cut, None, 0, &[]).await?;
        }
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(UNDER_WAY)));
        for block in rest.iter().copied() {
            let (core, sending, places) = (self.clone(), sending.clone(), places.clone());
            tasks.spawn(async move {
                let _place = places.acquire().await;
                core.send_block(sending, block, None, None).await
            });
        }
        for sent in tasks.join_all().await {
            sent?;
        }
        // The last one carries the size, and for a small file all there is to say.
        let cut = cut.filter(|_| rest.is_empty());
        let size = Some(sending.record.size);
        let done = match last {
            Some(block) => self.clone().send_block(sending.clone(), block, cut, size).await?,
            None => None,
        };
        match done {
            Some(attr) => Ok(attr),
            None => self.send_piece(sending, cut, size, 0, &[]).await,
        }
    }

    async fn send_block(
        self: Arc<Self>,
        sending: Arc<Sending>,
        block: u64,
        cut: Option<u64>,
        size: Option<u64>,
    ) -> std::result::Result<Option<Attr>, Fail> {
        let taken = self.cache.take_dirty(sending.file, block);
        let Some(dirty) = taken.map_err(|error| damaged(&error))? else { return Ok(None) };
        let (mut attr, mut cut) = (None, cut);
        for (number, (offset, run)) in dirty.runs.iter().enumerate() {
            let size = size.filter(|_| number + 1 == dirty.runs.len());
            attr = Some(self.clone().send_piece(sending.clone(), cut.take(), size, *offset, run).await?);
        }
        self.sent(sending.file, &dirty)?;
        Ok(attr)
    }

    fn sent(&self, file: FileId, dirty: &DirtyBlock) -> std::result::Result<(), Fail> {
        self.cache.flushed(file, dirty).map_err(|error| damaged(&error))
    }

    async fn send_piece(
        self: Arc<Self>,
        sending: Arc<Sending>,
        cut: Option<u64>,
        size: Option<u64>,
        offset: u64,
        content: &[u8],
    ) -> std::result::Result<Attr, Fail> {
        let (pages, packed) = pack_pages(content, self.link.level().map(i32::from));
        let write = Write {
            file: sending.wanted.clone(),
            offset,
            expect: sending.expect.clone(),
            stamp: sending.stamp,
            cut,
            size,
            pages,
        };
        let (grown, _) = self.link.ask::<WriteCall, _>(write, packed.into(), None).await.0?;
        Ok(grown.attr)
    }

    /// What a write-back of a file means for it.
    fn outcome(&self, file: FileId, content: u64, sent: std::result::Result<Attr, Fail>) -> Result<()> {
        match sent {
            Ok(attr) => self.written_back(file, content, attr),
            Err(fail) if fail.is(code::CONFLICT) || fail.is(code::STALE) || is_absent(&fail) => {
                self.conflict(file, "the server's file is another one by now");
                Err(Errno::ESTALE)
            }
            Err(fail) => {
                self.writeback.wrote(file);
                if let Fail::Refused(refusal) = &fail {
                    let path = self.cache.file(file).map(|record| record.path).unwrap_or_default();
                    let first = self.writeback.state().refused.insert(file, Instant::now()).is_none();
                    if first {
                        self.event(format!(
                            "{path}: the server does not take what was written: {}",
                            refusal.text
                        ));
                    }
                }
                Err(fail.errno())
            }
        }
    }

    fn written_back(&self, file: FileId, content: u64, attr: Attr) -> Result<()> {
        self.writeback.state().refused.remove(&file);
        // Written, cut or grown again meanwhile: there is another round.
        self.cache.settled(file, content, attr.version()).map_err(errno_of)?;
        if self.cache.file(file).is_some_and(|record| record.dirty) {
            self.writeback.wrote(file);
        }
        let mut nodes = self.nodes();
        if let Some(node) = nodes.by_ident(&attr.ident).and_then(|id| nodes.get_mut(id)) {
            let links = node.attr.links;
            node.attr = Attr { links, ..attr };
        }
        Ok(())
    }
}

impl WriteBack {
    /// Whether a change may have been sent by an earlier session.
    fn is_old(&self, number: u64) -> bool {
        self.state().queue.get(&number) == Some(&0)
    }
}

fn damaged(error: &crate::cache::CacheError) -> Fail {
    tracing::warn!(error = error as &dyn std::error::Error, "the cache");
    Fail::Nonsense
}

fn is_full(refusal: &whimbrel_wire::Refusal) -> bool {
    // ENOSPC and EDQUOT: there may be room later.
    matches!(errno(refusal), Some(28 | 122))
}

fn is_absent(fail: &Fail) -> bool {
    matches!(fail, Fail::Refused(refusal) if matches!(errno(refusal), Some(2 | 20)))
}

/// Whether a change that is refused like this was made when it was asked for the first time.
fn was_done(op: &Op, fail: &Fail) -> bool {
    let Fail::Refused(refusal) = fail else { return false };
    let number = errno(refusal).map(Errno::from_number);
    match op {
        Op::Mkdir { .. } | Op::Link { .. } | Op::Symlink { .. } => number == Some(Errno::EEXIST),
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => number == Some(Errno::ENOENT),
        Op::Create { .. } | Op::SetAttr { .. } => false,
    }
}
