//! Write-back: sends changes of names (`change_queue.rs`) to the server, and then content.
//!
//! One write-back runs at a time. Content of a file is sent after every change of names. Each write names the
//! last changes that it expects to find and sets a new one, which is in the journal before. An interrupted
//! write-back can therefore be told from a change by somebody else, even after a crash. With policy `back`
//! nothing is clean here before it is durable on the server, so data that a program has synced is on a disk
//! at every moment.

use crate::client::{
    connection::server_connection::CallFailure,
    dedup::write_dedup::ServerDigests,
    policy::Policy,
    session::{Core, errno_of, errno_of_fail},
};
use crate::{
    cache::{CacheError, DirtyBlock, FileId, FileRecord, Recovered},
    proto::{Attr, FileRef, Sync, SyncCall, Time, Write, WriteCall, code, pack_pages},
};
use bytes::Bytes;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinSet};
use whimbrel_core::lock;
use whimbrel_fuse::{Errno, Result};

/// Blocks of one file in transit at once.
const MAX_BLOCKS_IN_TRANSIT: usize = 32;
/// Blocks of a file sent before the server is asked to sync it.
const SYNC_BLOCKS: usize = 256;
/// Attempts to send a file if the server may have been restarted in the middle.
const TRIES: usize = 8;
/// Stamps remembered of attempts with an unknown result.
const MAX_STAMPS: usize = 16;
const MAX_FILES_IN_TRANSIT: usize = 32;
/// Time until a file that the server refused is tried again.
const REFUSED_RETRY: Duration = Duration::from_secs(30);

/// Whether the server found another file under the path of a write, or none: ENOENT or ENOTDIR.
fn is_other_file(fail: &CallFailure) -> bool {
    fail.is(code::STALE) || fail.is_errno(&[2, 20])
}

pub(in crate::client) struct FileWriteBack {
    pub(in crate::client) file: FileId,
    pub(in crate::client) record: FileRecord,
    pub(in crate::client) file_ref: FileRef,
    stamp: Time,
    pub(in crate::client) expect: Vec<Time>,
    content: u64,
    /// Whether blocks stay dirty until they are durable on the server.
    durable: bool,
}

impl Core {
    pub(super) fn is_due(&self) -> bool {
        if !self.connection.is_up() {
            return false;
        }
        let stats = self.cache.stats();
        if stats.dirty > stats.capacity / 2 {
            return true;
        }
        let Some(delay) = self.settings().delay.map(Duration::from_secs) else { return false };
        if !lock(&self.writeback.made).is_empty() {
            return true;
        }
        let state = self.writeback.state();
        let refused = |file: &FileId| state.refused.get(file).is_some_and(|at| at.elapsed() < REFUSED_RETRY);
        state.oldest.is_some_and(|at| at.elapsed() >= delay)
            || state.since.iter().any(|(file, at)| at.elapsed() >= delay && !refused(file))
    }

    /// Writes back what an earlier session left, before anything new begins.
    pub(in crate::client) fn recover(&self, recovered: &Recovered) {
        let ops = self.cache.ops();
        for (number, op) in &ops {
            // A change of an earlier session has no inode.
            match op.is_rename() {
                true => self.writeback.queue_rename(*number, 0, &[]),
                false => self.writeback.queue(*number, 0, &[]),
            }
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
            self.event(format!("the changes of an earlier session are not all written back yet: {errno}"));
        }
    }

    /// Writes one file back, after all changes of names; with `durable`, to the server's disk.
    pub(in crate::client) fn flush_file(&self, file: FileId, durable: bool) -> Result<()> {
        let _turn = self.writeback.lock();
        self.send_files(|| vec![file], durable)
    }

    /// Writes files back, then passes the result to `then` before another write-back can run.
    pub(in crate::client) fn with_flushed<T>(
        &self,
        files: Vec<FileId>,
        then: impl FnOnce(Result<()>) -> T,
    ) -> T {
        let _turn = self.writeback.lock();
        then(self.send_files(|| files, false))
    }

    /// Writes everything back; with `durable` it is on the server's disk when this returns.
    pub(in crate::client) fn flush_all(&self, durable: bool) -> Result<()> {
        let _turn = self.writeback.lock();
        let dirty = || {
            let dirty = self.cache.dirty_files();
            self.writeback.state().since.retain(|file, _| dirty.contains(file));
            dirty
        };
        self.send_files(dirty, durable)
    }

    /// Sends all changes of names, then the content of `files`. Needs the write-back lock.
    pub(in crate::client) fn send_files(
        &self,
        files: impl FnOnce() -> Vec<FileId>,
        durable: bool,
    ) -> Result<()> {
        let (mut first, mut later) = (Ok(()), Some(files));
        let mut files = Vec::new();
        for _ in 0..TRIES {
            // A file that is renamed from here on may have another name on the server than here.
            let changes = self.writeback.changes();
            if let Err(fail) = self.send_changes() {
                files.iter().for_each(|file| self.writeback.file_written(*file));
                return Err(errno_of_fail(fail));
            }
            files.extend(later.take().into_iter().flat_map(|files| files()));
            let mut sendings = Vec::new();
            for file in std::mem::take(&mut files) {
                match self.prepare(file, durable) {
                    Ok(sending) => sendings.extend(sending),
                    Err(errno) => first = first.and(Err(errno)),
                }
            }
            if sendings.is_empty() {
                return first;
            }
            if sendings.iter().any(|sending| sending.durable) {
                // The stamps by which this client's own changes are recognised after a crash of this host.
                self.cache.sync().map_err(errno_of)?;
            }
            let asked = Instant::now();
            for (file, content, sent) in self.connection.runtime().block_on(self.send_all(sendings)) {
                match sent {
                    Err(CallFailure::Outdated) => files.push(file),
                    Err(fail) if is_other_file(&fail) && self.writeback.changes() != changes => {
                        files.push(file)
                    }
                    sent => first = first.and(self.apply_result(file, content, sent, asked)),
                }
            }
        }
        files.iter().for_each(|file| self.writeback.file_written(*file));
        if files.is_empty() { first } else { Err(Errno::EIO) }
    }

    async fn send_all(
        &self,
        sendings: Vec<FileWriteBack>,
    ) -> Vec<(FileId, u64, std::result::Result<Attr, CallFailure>)> {
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(MAX_FILES_IN_TRANSIT)));
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

    /// Records in the journal which modification time the server will have.
    fn prepare(&self, file: FileId, durable: bool) -> Result<Option<FileWriteBack>> {
        let dirty =
            |file| self.cache.file(file).filter(|record: &FileRecord| record.dirty && !record.removed);
        let Some(record) = dirty(file) else { return Ok(None) };
        let Some(ident) = record.ident else { return self.handle_uncreated(file) };
        if self.can_compare() {
            self.cache.avoid_truncation(file).map_err(errno_of)?;
        }
        // A change that replaces or removes the file takes its stamps from the record: either it is seen
        // here, or it sees the stamp of this attempt.
        let _nodes = self.inodes();
        let content = self.cache.content_epoch(file).unwrap_or_default();
        // Read it again, so that the record is not older than the epoch.
        let Some(record) = dirty(file) else { return Ok(None) };
        // Each attempt has its own stamp: a delayed write of an earlier attempt must not overwrite this one.
        let again = record.stamps.last().filter(|_| record.stamps.len() >= MAX_STAMPS);
        let stamp = record.mtime.or(again.copied()).unwrap_or_else(|| self.stamp());
        let expect = self.expect(file, &record, stamp)?;
        self.writeback.state().since.remove(&file);
        let durable = durable || self.policy_of(&record.path) == Policy::Back;
        if !durable {
            lock(&self.writeback.unsynced).file_sent(file, self.connection.restarts());
        }
        let wanted = FileRef { path: record.path.clone(), ident };
        Ok(Some(FileWriteBack { file, record, file_ref: wanted, stamp, expect, content, durable }))
    }

    /// Modification times that the file may have on the server, including `stamp`, which is recorded as this
    /// client's own.
    pub(in crate::client) fn expect(
        &self,
        file: FileId,
        record: &FileRecord,
        stamp: Time,
    ) -> Result<Vec<Time>> {
        let mut stamps = record.stamps.clone();
        stamps.retain(|known| *known != stamp);
        stamps.push(stamp);
        let old = stamps.len().saturating_sub(MAX_STAMPS);
        stamps.drain(..old);
        let expect = std::iter::once(record.base.mtime).chain(stamps.iter().copied()).collect();
        self.cache.update_file(file, |record| record.stamps = stamps).map_err(errno_of)?;
        Ok(expect)
    }

    /// Handles a file that the server has not created: if no queued change will create it, because of a crash
    /// in between, its content becomes a conflict.
    fn handle_uncreated(&self, file: FileId) -> Result<Option<FileWriteBack>> {
        let comes = {
            // A thread that creates or removes a file holds the inodes until journal and queue agree.
            let _nodes = self.inodes();
            let record = self.cache.file(file).filter(|record| record.ident.is_none());
            record
                .is_none_or(|record| record.made_by.is_some_and(|by| self.writeback.waiting().contains(&by)))
        };
        if comes {
            return Ok(None);
        }
        self.conflict(file, "the server was never asked to create it");
        Err(Errno::ESTALE)
    }

    async fn send(self: Arc<Self>, sending: FileWriteBack) -> std::result::Result<Attr, CallFailure> {
        let blocks = self.cache.dirty_blocks(sending.file);
        let mut cut =
            (sending.record.zero_from < sending.record.base.size).then_some(sending.record.zero_from);
        let sending = Arc::new(sending);
        let (last, rest) = match blocks.split_last() {
            Some((last, rest)) => (Some(*last), rest),
            None => (None, &[][..]),
        };
        if let Some(at) = cut.filter(|_| !rest.is_empty()) {
            let server = self.connection.restarts();
            self.clone().send_piece(sending.clone(), cut.take(), None, 0, &[]).await?;
            self.sync_sent(&sending, server).await?;
            // A second attempt must not truncate away the content that is sent next.
            let noted =
                self.cache.update_file(sending.file, |record| record.base.size = at.min(record.base.size));
            noted.map_err(|error| self.report_unsendable(&sending, &error))?;
        }
        for part in rest.chunks(SYNC_BLOCKS) {
            self.send_part(&sending, part, (None, false)).await?;
        }
        // The last block carries the size; for a small file it is the only request.
        let sent = self.send_part(&sending, last.as_slice(), (cut, true)).await?;
        sent.ok_or(CallFailure::InvalidReply)
    }

    /// Sends blocks, and marks them clean when the server has them as required. The `last` part, of one block
    /// or none, carries the current size: the file may have grown since the start, and that content must not
    /// be cut off.
    async fn send_part(
        self: &Arc<Self>,
        sending: &Arc<FileWriteBack>,
        blocks: &[u64],
        (cut, last): (Option<u64>, bool),
    ) -> std::result::Result<Option<Attr>, CallFailure> {
        let server = self.connection.restarts();
        let there = Arc::new(self.server_digests(sending, blocks).await);
        let (mut tasks, places) = (JoinSet::new(), Arc::new(Semaphore::new(MAX_BLOCKS_IN_TRANSIT)));
        for block in blocks.iter().copied() {
            let (core, sending, places) = (self.clone(), sending.clone(), places.clone());
            let there = there.clone();
            tasks.spawn(async move {
                let _place = places.acquire().await;
                core.send_block(sending, block, &there, (cut, last)).await
            });
        }
        let (mut attr, mut sent) = (None, Vec::new());
        for block in tasks.join_all().await {
            if let Some((said, dirty)) = block? {
                attr = said.or(attr);
                sent.push((dirty, said.map(|said| said.version())));
            }
        }
        if attr.is_none() && last {
            let size = self.cache.file(sending.file).map(|record| record.size);
            attr = Some(self.clone().send_piece(sending.clone(), cut, size, 0, &[]).await?);
        }
        self.sync_sent(sending, server).await?;
        for (dirty, seen) in sent {
            let noted = self.cache.mark_sent(sending.file, sending.content, &dirty, seen);
            noted.map_err(|error| self.report_unsendable(sending, &error))?;
        }
        Ok(attr)
    }

    /// Has the server sync what was sent since it had restarted `restarts` times, if that is required.
    async fn sync_sent(
        &self,
        sending: &FileWriteBack,
        restarts: u64,
    ) -> std::result::Result<(), CallFailure> {
        if !sending.durable {
            return Ok(());
        }
        let body = Sync { file: sending.file_ref.clone() };
        self.connection.send::<SyncCall, _>(body, Bytes::new(), None).await.0?;
        // A restarted server may have lost the writes that this sync was to cover.
        if self.connection.restarts() == restarts { Ok(()) } else { Err(CallFailure::Outdated) }
    }

    async fn send_block(
        self: Arc<Self>,
        sending: Arc<FileWriteBack>,
        block: u64,
        there: &ServerDigests,
        (mut cut, last): (Option<u64>, bool),
    ) -> std::result::Result<Option<(Option<Attr>, DirtyBlock)>, CallFailure> {
        let taken = match self.cache.take_dirty(sending.file, block) {
            // The file was removed meanwhile.
            Err(CacheError::NoSuchFile) => None,
            taken => taken.map_err(|error| self.report_unsendable(&sending, &error))?,
        };
        let Some(mut dirty) = taken else { return Ok(None) };
        let mut attr = None;
        let runs = self.differing_runs(&sending, there, std::mem::take(&mut dirty.runs));
        for (number, (offset, run)) in runs.iter().enumerate() {
            let size = (last && number + 1 == runs.len()).then_some(dirty.size);
            attr = Some(self.clone().send_piece(sending.clone(), cut.take(), size, *offset, run).await?);
        }
        // Without runs, its dirty pages are beyond the end, or the server had them.
        Ok(Some((attr, dirty)))
    }

    pub(in crate::client) async fn send_piece(
        self: Arc<Self>,
        sending: Arc<FileWriteBack>,
        cut: Option<u64>,
        size: Option<u64>,
        offset: u64,
        content: &[u8],
    ) -> std::result::Result<Attr, CallFailure> {
        let (pages, packed) = pack_pages(content, self.connection.compression_level().map(i32::from));
        let write = Write {
            file: sending.file_ref.clone(),
            offset,
            expect: sending.expect.clone(),
            stamp: sending.stamp,
            cut,
            size,
            pages,
        };
        let (grown, _) = self.connection.send::<WriteCall, _>(write, packed.into(), None).await.0?;
        if sending.expect.len() > 2 {
            // Delayed writes of earlier attempts are refused from now on.
            let noted = self.cache.update_file(sending.file, |record| record.stamps = vec![sending.stamp]);
            noted.map_err(|error| self.report_unsendable(&sending, &error))?;
        }
        Ok(grown.attr)
    }

    fn apply_result(
        &self,
        file: FileId,
        content: u64,
        sent: std::result::Result<Attr, CallFailure>,
        asked: Instant,
    ) -> Result<()> {
        if self.cache.file(file).is_none_or(|record| record.removed) {
            // The file was removed meanwhile: its content is dropped.
            return Ok(());
        }
        match sent {
            Ok(attr) => self.written_back(file, content, attr, asked),
            Err(fail) if fail.is(code::CONFLICT) || is_other_file(&fail) => {
                self.conflict(file, "the file on the server was changed or replaced");
                Err(Errno::ESTALE)
            }
            Err(fail) => {
                self.writeback.file_written(file);
                if let CallFailure::Refused(refusal) = &fail {
                    self.report_once(file, &format!("the server refused the written data: {}", refusal.text));
                }
                Err(fail.errno())
            }
        }
    }

    /// Reports once why a file is not written back, until it is.
    fn report_once(&self, file: FileId, why: &str) {
        let path = self.cache.file(file).map(|record| record.path).unwrap_or_default();
        if self.writeback.state().refused.insert(file, Instant::now()).is_none() {
            self.event(format!("{path}: {why}"));
        }
    }

    fn report_unsendable(&self, sending: &FileWriteBack, error: &CacheError) -> CallFailure {
        // An error is no loss if the file was removed meanwhile.
        if !matches!(error, CacheError::NoSuchFile) {
            self.report_once(sending.file, &format!("the written data cannot be written back: {error}"));
        }
        CallFailure::InvalidReply
    }

    fn written_back(&self, file: FileId, content: u64, attr: Attr, asked: Instant) -> Result<()> {
        self.writeback.state().refused.remove(&file);
        // If it was written or truncated meanwhile, it is sent again.
        self.cache.mark_clean(file, content, attr.version()).map_err(errno_of)?;
        if self.cache.file(file).is_some_and(|record| record.dirty) {
            self.writeback.file_written(file);
        }
        let id = self.inodes().by_ident(&attr.ident);
        id.into_iter().for_each(|id| self.adopt_written(id, attr, asked));
        Ok(())
    }
}
