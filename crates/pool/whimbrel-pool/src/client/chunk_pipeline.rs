//! The chunk pipeline of a write: a thread that splits the byte stream into chunks and batches them.
//!
//! Chunking and hashing run here and not on the writer's thread, so that both use a core.

use super::{
    PoolError, Result, Secret,
    write_session::{LEVEL, NewChunk, WriteSession},
};
use crate::{
    chunk::Chunking,
    chunk_map::{ChunkRef, MAX_MAP, least_bytes},
};
use bytes::{Bytes, BytesMut};
use std::{
    collections::HashSet,
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread,
};
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::Encoder;

/// Most bytes and chunks of a batch: about a chunk of the paper, in one message.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_CHUNKS: usize = 500;
/// Bytes read at once from a local file.
const BLOCK: usize = 1 << 20;

enum Item {
    /// Bytes that count against the memory budget.
    Data(BytesMut),
    /// A local file and its length; its bytes do not count against the budget yet.
    Spooled(File, u64),
    /// Chunks of an older version that follow in the stream.
    Known(Vec<ChunkRef>),
    /// Ends the last chunk and returns the chunks since the last drain.
    Drain(SyncSender<Result<Vec<ChunkRef>>>),
}

/// The input side of the pipeline, which takes bytes in order.
pub(super) struct ChunkPipeline {
    items: Sender<Item>,
    session: Arc<WriteSession>,
}

whimbrel_core::opaque_debug!(ChunkPipeline);

impl ChunkPipeline {
    /// Starts the pipeline; with a secret, chunks are encrypted.
    pub(super) fn start(session: Arc<WriteSession>, cutting: Chunking, secret: Option<Arc<Secret>>) -> Self {
        let (items, queue) = channel();
        let cutter = Chunker {
            session: session.clone(),
            chunking: cutting,
            secret,
            encoder: Encoder::new(LEVEL),
            buffer: BytesMut::new(),
            batch: Vec::new(),
            batch_bytes: 0,
            seen: HashSet::new(),
            chunks: Vec::new(),
            map_bytes: 0,
        };
        thread::spawn(move || cutter.run(&queue));
        Self { items, session }
    }

    pub(super) fn session(&self) -> &Arc<WriteSession> {
        &self.session
    }

    fn push(&self, item: Item) -> Result<()> {
        self.items.send(item).map_err(|_| PoolError::Abandoned)
    }

    /// Appends bytes, waiting for memory.
    pub(super) fn data(&self, data: BytesMut) -> Result<()> {
        self.session.budget.take(data.len(), || self.session.failure().is_some());
        match self.session.failure() {
            Some(error) => Err(error),
            None => self.push(Item::Data(data)),
        }
    }

    pub(super) fn spooled(&self, file: File, length: u64) -> Result<()> {
        self.push(Item::Spooled(file, length))
    }

    /// Ends the last chunk and appends chunks of an older version.
    pub(super) fn known(&self, pieces: Vec<ChunkRef>) -> Result<()> {
        self.push(Item::Known(pieces))
    }

    /// Ends the last chunk; returns the chunks since the last call once all of them are durable.
    pub(super) fn drain(&self) -> Result<Vec<ChunkRef>> {
        let (reply, answer) = sync_channel(1);
        self.push(Item::Drain(reply))?;
        answer.recv().map_err(|_| PoolError::Abandoned)?
    }
}

enum StreamChunk {
    /// A new chunk: its digest and length.
    New(Digest, u32),
    Known(ChunkRef),
}

struct Chunker {
    session: Arc<WriteSession>,
    chunking: Chunking,
    secret: Option<Arc<Secret>>,
    encoder: Encoder,
    buffer: BytesMut,
    batch: Vec<NewChunk>,
    batch_bytes: usize,
    /// Chunks of this session that were sent or found.
    seen: HashSet<Digest>,
    chunks: Vec<StreamChunk>,
    /// Bytes that these take in the map at least.
    map_bytes: u64,
}

impl Chunker {
    fn run(mut self, queue: &Receiver<Item>) {
        for item in queue {
            match item {
                Item::Data(data) => self.take(data),
                Item::Spooled(file, length) => {
                    if let Err(error) = self.read(&file, length) {
                        self.session.fail(error);
                    }
                }
                Item::Known(pieces) => {
                    self.end_chunk();
                    pieces.iter().for_each(|piece| self.count(piece.length));
                    self.chunks.extend(pieces.into_iter().map(StreamChunk::Known));
                }
                Item::Drain(reply) => drop(reply.send(self.drain())),
            }
        }
    }

    /// Appends bytes to those left over before. They are joined without a copy if they follow them in memory;
    /// else only the chunks that begin in what was left over are copied.
    fn take(&mut self, mut data: BytesMut) {
        let (longest, left) = (self.chunking.longest(), self.buffer.len());
        if left == 0 || self.buffer.as_ptr_range().end == data.as_ptr() {
            self.buffer.unsplit(data);
        } else {
            // Enough to tell the end of every chunk that begins there.
            self.buffer.extend_from_slice(&data[..data.len().min(longest)]);
            let mut cut = 0;
            while cut < left && self.buffer.len() >= longest {
                cut += self.chunk();
            }
            if cut >= left {
                self.buffer = data.split_off(cut - left);
            }
        }
        while self.buffer.len() >= longest {
            self.chunk();
        }
    }

    fn read(&mut self, file: &File, length: u64) -> Result<()> {
        let mut at = 0;
        while at < length && self.session.failure().is_none() {
            let mut block = BytesMut::zeroed(BLOCK.min((length - at) as usize));
            file.read_exact_at(&mut block, at).map_err(PoolError::local("read what was written locally"))?;
            self.session.budget.take(block.len(), || self.session.failure().is_some());
            at += block.len() as u64;
            self.take(block);
        }
        Ok(())
    }

    /// Cuts off a chunk and returns its length.
    fn chunk(&mut self) -> usize {
        let length = self.chunking.cut(&self.buffer);
        let chunk = self.buffer.split_to(length).freeze();
        self.add(chunk);
        length
    }

    /// Counts a chunk. A file that no commit could take is refused while it is written, not at its end.
    fn count(&mut self, length: u32) {
        self.map_bytes += least_bytes(length);
        if self.map_bytes > MAX_MAP {
            let too_large = io::ErrorKind::FileTooLarge.into();
            self.session.fail(PoolError::local("write a file of so many chunks")(too_large));
        }
    }

    fn add(&mut self, chunk: Bytes) {
        let length = chunk.len();
        self.count(length as u32);
        let bytes = match &self.secret {
            None => chunk,
            Some(secret) => match secret.encrypt(&chunk, &mut self.encoder) {
                Some(sealed) => sealed.into(),
                None => return self.session.fail(PoolError::Answer { what: "chunk" }),
            },
        };
        let digest = Digest::of(&bytes);
        self.chunks.push(StreamChunk::New(digest, length as u32));
        if !self.seen.insert(digest) || self.session.is_reusable(&digest) {
            self.session.budget.release(length);
            return;
        }
        self.batch.push(NewChunk { digest, length: length as u32, bytes });
        self.batch_bytes += length;
        if self.batch_bytes >= BATCH_BYTES || self.batch.len() >= BATCH_CHUNKS {
            self.send();
        }
    }

    fn send(&mut self) {
        if !self.batch.is_empty() {
            self.session.dispatch(std::mem::take(&mut self.batch), std::mem::take(&mut self.batch_bytes));
        }
    }

    fn end_chunk(&mut self) {
        while !self.buffer.is_empty() {
            self.chunk();
        }
    }

    fn drain(&mut self) -> Result<Vec<ChunkRef>> {
        self.end_chunk();
        self.send();
        self.session.wait();
        self.session.secure_blocking()?;
        self.map_bytes = 0;
        let sealed = self.secret.is_some();
        let piece = |cut| match cut {
            StreamChunk::Known(piece) => Ok(piece),
            StreamChunk::New(digest, length) => {
                let chunk = self.session.number(&digest).ok_or(PoolError::Answer { what: "chunk" })?;
                Ok(ChunkRef { chunk, length, encrypted: sealed, digest: sealed.then_some(digest) })
            }
        };
        std::mem::take(&mut self.chunks).into_iter().map(piece).collect()
    }
}
