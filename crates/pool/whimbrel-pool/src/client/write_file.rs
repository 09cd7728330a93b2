//! A file being written: sequential writes are streamed; other writes go to a local overlay until the commit.
//!
//! A file consists of the chunks that are durable in the pool, a stream that grows at its end, and an overlay
//! of changed ranges in a local file. Checkpoints are written from front to back and never use the overlay.
//! [`WriteFile::commit`] ends the stream, rewrites the chunks that the overlay changes, and makes the result
//! visible in one step. A file that is dropped without a commit leaves nothing.
//!
//! The write modes of the paper (IV.B) differ in the buffer between program and stream: memory (sliding
//! window), files of limited size (incremental), or one file that is sent after close (complete local write).
//! In the last mode, [`WriteFile::close_locally`] gives the file a name, under which it outlives the process.

use super::{
    Pool, PoolError, ReadFile, Result,
    byte_ranges::ByteRanges,
    chunk_pipeline::ChunkPipeline,
    map_seal::{self, Sealed},
    spool::{self, ClosedFile, LeftFile, LocalFile},
    stream_memory::StreamMemory,
    write_session::WriteSession,
};
use crate::{
    chunk::Chunking,
    chunk_map::{self, ChunkRef, MAX_MAP},
    policy::Policy,
    protocol::{Commit, CommitFile, NewNode, Node, NodeId},
};
use bytes::{Bytes, BytesMut};
use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};
use whimbrel_core::lock;

/// Longest hole that a write past the end may leave; holes are written as zeros.
const LONGEST_HOLE: u64 = 16 << 30;
/// Bytes copied at once.
const BLOCK: usize = 1 << 20;

/// The buffer between the program and the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteMode {
    /// A buffer in memory.
    #[default]
    SlidingWindow,
    /// Local files of this size, each sent while the next is written.
    Incremental {
        /// Bytes of one local file.
        file: u64,
    },
    /// One local file, sent after close has returned.
    CompleteLocal,
}

/// Options for writing files.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// The buffer between the program and the pool.
    pub mode: WriteMode,
    /// Most bytes of memory in flight.
    pub buffer: usize,
    /// Folder of local files.
    pub spool: PathBuf,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { mode: WriteMode::default(), buffer: 64 << 20, spool: std::env::temp_dir() }
    }
}

#[derive(Debug)]
struct Inner {
    node: Option<Node>,
    /// Durable chunks, from the start of the file.
    pieces: Vec<ChunkRef>,
    mapped: u64,
    /// End of the stream; bytes after `mapped` are being sent.
    streamed: u64,
    pipeline: Option<ChunkPipeline>,
    memory: StreamMemory,
    /// The growing local file of the write mode.
    local: Option<LocalFile>,
    /// The file in the spool folder, if it was closed and is not committed yet.
    closed: Option<LeftFile>,
    /// Ranges below `mapped` that are in the overlay.
    dirty: ByteRanges,
    overlay: Option<File>,
    changed: bool,
    /// Name of the file, for the seal.
    name: String,
    /// Whether the content from which it was opened was sealed.
    sealed: bool,
    broken: Option<PoolError>,
}

/// A file being written.
#[derive(Debug)]
pub struct WriteFile {
    pool: Pool,
    options: WriteOptions,
    policy: Policy,
    make: NewNode,
    /// Time of the content, if it is not that of the commit.
    content_time: Option<i64>,
    inner: Mutex<Inner>,
}

impl WriteFile {
    /// Opens the file `make` for writing, over `node` if it exists, from its present content unless `empty`.
    pub async fn open(
        pool: &Pool,
        make: NewNode,
        node: Option<Node>,
        empty: bool,
        options: WriteOptions,
    ) -> Result<Self> {
        let policy = pool.policy(node.as_ref().map_or(make.parent, |node| node.id)).await?.1;
        let (mut pieces, mut sealed) = (Vec::new(), false);
        if let Some(node) = node.as_ref().filter(|node| !empty && node.version > 0) {
            let present = pool.read(node.version).await?;
            present.check_name(&make.name)?;
            (pieces, sealed) = (present.pieces().to_vec(), present.is_sealed());
        }
        let mapped = pieces.iter().map(|piece| u64::from(piece.length)).sum();
        // A new empty file must be committed, and so must one that is emptied.
        let changed = node.as_ref().is_none_or(|node| node.version == 0 || (empty && node.size > 0));
        let inner = Inner {
            node,
            pieces,
            mapped,
            streamed: mapped,
            pipeline: None,
            memory: StreamMemory::default(),
            local: None,
            closed: None,
            dirty: ByteRanges::default(),
            overlay: None,
            changed,
            name: make.name.clone(),
            sealed,
            broken: None,
        };
        Ok(Self { pool: pool.clone(), options, policy, make, content_time: None, inner: Mutex::new(inner) })
    }

    /// Seals the file under another name, which it has by the time of the commit.
    #[must_use]
    pub(super) fn with_name(self, name: &str) -> Self {
        self.renamed(name);
        lock(&self.inner).changed = true;
        self
    }

    /// Records that the file has another name now.
    pub(crate) fn renamed(&self, name: &str) {
        name.clone_into(&mut lock(&self.inner).name);
    }

    /// Whether the content from which it was opened was sealed.
    pub(super) fn is_sealed(&self) -> bool {
        lock(&self.inner).sealed
    }

    /// Replaces the chunking of the policy, for a caller that knows the content.
    #[must_use]
    pub fn with_chunking(mut self, cutting: Chunking) -> Self {
        self.policy.cutting = cutting;
        self
    }

    /// Sets the time of the content in nanoseconds since 1970, instead of the time of the commit.
    #[must_use]
    pub fn with_content_time(mut self, time: i64) -> Self {
        self.content_time = Some(time);
        self
    }

    /// Current size in bytes.
    pub fn size(&self) -> u64 {
        lock(&self.inner).streamed
    }

    /// The file, if it exists or was committed.
    pub fn node(&self) -> Option<NodeId> {
        lock(&self.inner).node.as_ref().map(|node| node.id)
    }

    /// Whether there is something to commit.
    pub(crate) fn is_changed(&self) -> bool {
        lock(&self.inner).changed
    }

    /// Writes `data` at `offset`; blocks.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut inner = self.change()?;
        let done = self.write(&mut inner, offset, data);
        inner.record_error(done)
    }

    /// The file, to be changed. One that was closed is committed first, as it was then.
    fn change(&self) -> Result<std::sync::MutexGuard<'_, Inner>> {
        let mut inner = lock(&self.inner);
        inner.usable()?;
        if inner.closed.is_some() {
            let done = self.publish(&mut inner);
            inner.record_error(done)?;
        }
        inner.changed = true;
        Ok(inner)
    }

    fn write(&self, inner: &mut Inner, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).ok_or(PoolError::Answer { what: "offset" })?;
        if offset > inner.streamed {
            self.zeros(inner, offset)?;
        }
        if offset < inner.streamed {
            self.drain(inner)?;
            let over = (inner.streamed.min(end) - offset) as usize;
            self.overwrite(inner, offset, &data[..over])?;
            return if over < data.len() { self.append(inner, &data[over..]) } else { Ok(()) };
        }
        self.append(inner, data)
    }

    /// Appends chunks of an older version without reading or sending them. If they no longer exist at the
    /// commit, it is refused. Blocks.
    pub fn append_known(&self, pieces: &[ChunkRef]) -> Result<()> {
        let mut inner = self.change()?;
        let done = self.reuse_chunks(&mut inner, pieces);
        inner.record_error(done)
    }

    /// Sends what the local file has.
    fn send_local(&self, inner: &mut Inner) -> Result<()> {
        match inner.local.take() {
            Some(local) => self.pipeline(inner)?.spooled(local.file, local.length),
            None => Ok(()),
        }
    }

    fn reuse_chunks(&self, inner: &mut Inner, pieces: &[ChunkRef]) -> Result<()> {
        self.send_local(inner)?;
        self.pipeline(inner)?.known(pieces.to_vec())?;
        inner.streamed += pieces.iter().map(|piece| u64::from(piece.length)).sum::<u64>();
        Ok(())
    }

    fn overwrite(&self, inner: &mut Inner, offset: u64, data: &[u8]) -> Result<()> {
        let overlay = match inner.overlay.take() {
            Some(file) => file,
            None => spool::unnamed(&self.options.spool)?,
        };
        let written = overlay.write_all_at(data, offset).map_err(PoolError::local("write to the local file"));
        inner.overlay = Some(overlay);
        written?;
        inner.dirty.add(offset..offset + data.len() as u64);
        Ok(())
    }

    /// Appends zeros until the file has `size` bytes.
    fn zeros(&self, inner: &mut Inner, size: u64) -> Result<()> {
        if size - inner.streamed > LONGEST_HOLE {
            return Err(PoolError::local("write so long a hole")(io::ErrorKind::FileTooLarge.into()));
        }
        let zeros = vec![0; BLOCK];
        while inner.streamed < size {
            let length = (size - inner.streamed).min(BLOCK as u64) as usize;
            self.append(inner, &zeros[..length])?;
        }
        Ok(())
    }

    async fn start(&self) -> Result<Arc<WriteSession>> {
        let session = WriteSession::start(&self.pool, &self.policy, self.options.buffer).await?;
        if let Some(before) = self.pool.inner.previous_versions.find(&self.make) {
            session.reuse_version(&before).await;
        }
        Ok(session)
    }

    fn pipeline<'a>(&self, inner: &'a mut Inner) -> Result<&'a ChunkPipeline> {
        if inner.pipeline.is_none() {
            let session = self.pool.block(self.start())?;
            let secret = self.pool.inner.options.secret.clone();
            inner.pipeline = Some(ChunkPipeline::start(session, self.policy.cutting, secret));
        }
        inner.pipeline.as_ref().ok_or(PoolError::Abandoned)
    }

    fn append(&self, inner: &mut Inner, data: &[u8]) -> Result<()> {
        let length = data.len() as u64;
        let limit = match self.options.mode {
            WriteMode::SlidingWindow => {
                let data = inner.memory.copy(data);
                self.pipeline(inner)?.data(data)?;
                inner.streamed += length;
                return Ok(());
            }
            WriteMode::Incremental { file } => file.max(1),
            WriteMode::CompleteLocal => u64::MAX,
        };
        let local = match &mut inner.local {
            Some(local) => local,
            none => none.insert(LocalFile::create(&self.options.spool)?),
        };
        local.append(data)?;
        let is_full = local.length >= limit;
        inner.streamed += length;
        if is_full { self.send_local(inner) } else { Ok(()) }
    }

    /// Waits until everything streamed is durable and adds it to the map.
    fn drain(&self, inner: &mut Inner) -> Result<()> {
        self.send_local(inner)?;
        if inner.mapped == inner.streamed {
            return Ok(());
        }
        let pieces = self.pipeline(inner)?.drain()?;
        inner.mapped += pieces.iter().map(|piece| u64::from(piece.length)).sum::<u64>();
        inner.pieces.extend(pieces);
        if inner.mapped == inner.streamed { Ok(()) } else { Err(PoolError::Answer { what: "length" }) }
    }

    /// Reads the bytes that a commit would make visible; blocks.
    pub fn read_at(&self, offset: u64, length: usize) -> Result<Bytes> {
        let mut inner = lock(&self.inner);
        inner.usable()?;
        let done = self.drain(&mut inner);
        inner.record_error(done)?;
        self.read_drained(&inner, offset..offset.saturating_add(length as u64).min(inner.streamed))
    }

    fn read_drained(&self, inner: &Inner, range: Range<u64>) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let length = (range.end - range.start) as usize;
        let file = ReadFile::new(self.pool.clone(), inner.pieces.clone());
        let base = self.pool.block(file.read_at(range.start, length))?;
        let dirty = inner.dirty.within(range.clone());
        let (Some(overlay), false) = (&inner.overlay, dirty.is_empty()) else { return Ok(base) };
        let mut bytes = BytesMut::from(&base[..]);
        for part in dirty {
            let at = (part.start - range.start) as usize..(part.end - range.start) as usize;
            overlay
                .read_exact_at(&mut bytes[at], part.start)
                .map_err(PoolError::local("read the local file"))?;
        }
        Ok(bytes.freeze())
    }

    /// Truncates the file to `size`, or extends it with zeros; blocks.
    pub fn set_size(&self, size: u64) -> Result<()> {
        let inner = lock(&self.inner);
        inner.usable()?;
        if size == inner.streamed {
            return Ok(());
        }
        drop(inner);
        let mut inner = self.change()?;
        let done = if size > inner.streamed {
            self.zeros(&mut inner, size)
        } else {
            self.drain(&mut inner).and_then(|()| self.truncate(&mut inner, size))
        };
        inner.record_error(done)
    }

    fn truncate(&self, inner: &mut Inner, size: u64) -> Result<()> {
        let (mut kept, mut count) = (0, 0);
        for piece in &inner.pieces {
            if kept + u64::from(piece.length) > size {
                break;
            }
            kept += u64::from(piece.length);
            count += 1;
        }
        // The first part of the chunk that the new end divides is written again.
        let rest = self.read_drained(inner, kept..size)?;
        inner.pieces.truncate(count);
        inner.dirty.cut(kept);
        (inner.mapped, inner.streamed) = (kept, kept);
        if rest.is_empty() { Ok(()) } else { self.append(inner, &rest) }
    }

    /// Makes the written data durable, but not visible; blocks.
    pub fn sync(&self) -> Result<()> {
        let mut inner = lock(&self.inner);
        inner.usable()?;
        let done = self.drain(&mut inner);
        inner.record_error(done)
    }

    /// With complete local write, gives the closed file a name in the spool folder and returns true: it is
    /// then committed later, here or by the next mount. False if it must be committed now, because a part of
    /// its content is in the pool only, or the folder cannot have it. Blocks only to ask for the pool's id.
    pub fn close_locally(&self) -> bool {
        // While the file is being committed, it is not changed.
        let Ok(mut inner) = self.inner.try_lock() else { return true };
        if inner.closed.is_some() {
            return true;
        }
        let whole = inner.changed && inner.usable().is_ok() && inner.pieces.is_empty();
        let (true, None, Some(local)) = (whole, &inner.pipeline, &inner.local) else { return false };
        let Ok(pool) = self.pool.block(self.pool.id()) else { return false };
        let closed = ClosedFile {
            pool,
            make: self.make.clone(),
            node: inner.node.as_ref().map(|node| node.id),
            modified: self.content_time.unwrap_or_else(now),
            encrypted: self.pool.encrypts(),
            length: 0,
            checksum: 0,
        };
        match local.give_name(&self.options.spool, closed) {
            Ok(closed) => inner.closed = Some(closed),
            Err(error) => tracing::warn!(%error, "a closed file has no name in the spool folder"),
        }
        inner.closed.is_some()
    }

    /// Commits the file as a new version, unless nothing has changed since the last commit; blocks.
    pub fn commit(&self) -> Result<Option<Node>> {
        let mut inner = lock(&self.inner);
        inner.usable()?;
        if !inner.changed {
            return Ok(inner.node.clone());
        }
        let done = self.publish(&mut inner);
        inner.record_error(done).map(Some)
    }

    fn publish(&self, inner: &mut Inner) -> Result<Node> {
        self.drain(inner)?;
        self.rewrite_changed(inner)?;
        // Creates the session if there is none, as for an empty file.
        let session = self.pipeline(inner)?.session().clone();
        let closed = inner.closed.as_ref().map(|closed| closed.description.modified);
        let modified = self.content_time.or(closed).unwrap_or_else(now);
        let map = self.map(inner, modified)?;
        let commit = Commit {
            session: session.id(),
            // Each session has one commit.
            number: 0,
            node: inner.node.as_ref().map(|node| node.id),
            make: self.make.clone(),
            size: inner.mapped,
            modified,
            copies: self.policy.copies,
            sent: session.sent(),
            base: session.base(),
        };
        let (node, _) = self.pool.block(self.pool.call_manager::<CommitFile>(&commit, map.into()))?;
        self.pool.inner.previous_versions.record(&self.make, node.version, &inner.pieces, &session);
        inner.node = Some(node.clone());
        inner.changed = false;
        if let Some(closed) = inner.closed.take() {
            closed.remove();
        }
        // The next write starts a new session, so end this one, which delays garbage collection.
        inner.pipeline = None;
        self.pool.inner.runtime.spawn(async move { session.end().await });
        Ok(node)
    }

    /// The chunk map, sealed if there is a secret.
    fn map(&self, inner: &Inner, modified: i64) -> Result<Vec<u8>> {
        let mut seal = Vec::new();
        if let Some(secret) = &self.pool.inner.options.secret {
            let sealed = Sealed { name: inner.name.clone(), modified };
            let known = map_seal::seal(secret, &sealed, &inner.pieces);
            seal = known.ok_or(PoolError::Answer { what: "digest of a chunk" })?;
        }
        let map = chunk_map::encode_sealed(&inner.pieces, &seal);
        if map.len() as u64 > MAX_MAP {
            let too_large = io::ErrorKind::FileTooLarge.into();
            return Err(PoolError::local("commit a file of so many chunks")(too_large));
        }
        Ok(map)
    }

    /// Whether a chunk at this range must be written anew: the overlay changes it, or it comes from a file
    /// without a seal, so that only reading it tells what it is.
    fn must_rewrite(&self, inner: &Inner, piece: &ChunkRef, range: Range<u64>) -> bool {
        (self.pool.encrypts() && piece.digest.is_none()) || !inner.dirty.within(range).is_empty()
    }

    /// Rewrites the chunks for which that is necessary, each run of adjacent chunks as one stream.
    fn rewrite_changed(&self, inner: &mut Inner) -> Result<()> {
        if inner.dirty.is_empty() && !self.pool.encrypts() {
            return Ok(());
        }
        let (mut folded, mut start, mut at) = (Vec::new(), 0, 0);
        while at < inner.pieces.len() {
            let first = (at, start);
            while at < inner.pieces.len() {
                let piece = inner.pieces[at];
                let end = start + u64::from(piece.length);
                if !self.must_rewrite(inner, &piece, start..end) {
                    break;
                }
                (start, at) = (end, at + 1);
            }
            if at > first.0 {
                folded.extend(self.rewrite(inner, first.1..start)?);
            }
            if let Some(piece) = inner.pieces.get(at) {
                folded.push(*piece);
                (start, at) = (start + u64::from(piece.length), at + 1);
            }
        }
        inner.pieces = folded;
        (inner.dirty, inner.overlay) = (ByteRanges::default(), None);
        Ok(())
    }

    fn rewrite(&self, inner: &mut Inner, range: Range<u64>) -> Result<Vec<ChunkRef>> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + BLOCK as u64);
            let bytes = self.read_drained(inner, at..end)?;
            let bytes = inner.memory.copy(&bytes);
            self.pipeline(inner)?.data(bytes)?;
            at = end;
        }
        self.pipeline(inner)?.drain()
    }

    /// Discards everything that was not committed.
    pub fn abandon(&self) {
        let mut inner = lock(&self.inner);
        inner.broken = Some(PoolError::Abandoned);
        if let Some(closed) = inner.closed.take() {
            closed.remove();
        }
        if let Some(feed) = inner.pipeline.take() {
            let session: Arc<WriteSession> = feed.session().clone();
            session.fail(PoolError::Abandoned);
            self.pool.inner.runtime.spawn(async move { session.end().await });
        }
    }

    /// The write mode of the file.
    pub fn mode(&self) -> WriteMode {
        self.options.mode
    }
}

/// The wall clock in nanoseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

impl Inner {
    fn usable(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Records an error: the file then stays unusable and cannot be committed.
    fn record_error<T>(&mut self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            self.broken.get_or_insert(error.clone());
        }
        done
    }
}

impl Drop for WriteFile {
    fn drop(&mut self) {
        let feed = self.inner.get_mut().map_or(None, |inner| inner.pipeline.take());
        if let Some(feed) = feed {
            let session = feed.session().clone();
            session.fail(PoolError::Abandoned);
            self.pool.inner.runtime.spawn(async move { session.end().await });
        }
    }
}
