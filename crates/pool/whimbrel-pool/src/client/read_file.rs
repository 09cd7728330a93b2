//! Reading a version: its chunk map, and its chunks from any benefactor, each checked, with readahead.
//!
//! A damaged or missing copy is reported to the manager, which counts a fault and has the copy replaced; the
//! reader continues with another copy. A chunk that several readers need at once is fetched once.

use super::{Pool, PoolError, Result, map_seal::Sealed, reader_session::ReaderSession};
use crate::{
    benefactor::open_shared,
    chunk_map::{self, ChunkRef, MAX_MAP},
    protocol::{
        BenefactorId, ChunkId, CodedChunk, Fault, GetChunk, Locate, LocatedChunk, ReadMap, ReportFault, code,
        get_located, put_numbers,
    },
};
use bytes::{Bytes, BytesMut};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::OnceCell;
use whimbrel_core::{Digest, lock};
use whimbrel_wire::Code;

/// Chunks located in one call.
const LOCATED: usize = 256;
/// Most cached locations; above, all are dropped.
const LOCATIONS: usize = 200_000;

pub(super) type Cell = Arc<OnceCell<Bytes>>;
/// A chunk by its number, and by its digest if that is known from a seal: the manager, who numbers chunks,
/// is not believed then.
type CellKey = (ChunkId, Option<Digest>);

#[derive(Debug)]
pub(super) struct ChunkCache {
    most: usize,
    pub(super) state: Mutex<CacheState>,
}

#[derive(Debug, Default)]
pub(super) struct CacheState {
    cells: HashMap<CellKey, Cell>,
    order: VecDeque<(CellKey, usize)>,
    bytes: usize,
    pub(super) located: HashMap<ChunkId, LocatedChunk>,
    /// Pieces of chunks that are kept so.
    pub(super) coded: HashMap<ChunkId, CodedChunk>,
}

impl ChunkCache {
    pub(super) fn new(most: usize) -> Self {
        Self { most, state: Mutex::default() }
    }

    /// The cell of a chunk, which may still be empty, and whether it existed before.
    pub(super) fn cell(&self, piece: &ChunkRef) -> (Cell, bool) {
        let (mut state, key) = (lock(&self.state), (piece.chunk, piece.digest));
        if let Some(cell) = state.cells.get(&key) {
            return (cell.clone(), true);
        }
        let cell = Cell::default();
        state.cells.insert(key, cell.clone());
        state.order.push_back((key, piece.length as usize));
        state.bytes += piece.length as usize;
        while state.bytes > self.most
            && let Some((old, length)) = state.order.pop_front()
        {
            state.cells.remove(&old);
            state.bytes -= length;
        }
        (cell, false)
    }
}

impl Pool {
    /// Opens a version of a file for reading; 0 is an empty file. If it is removed, its chunks vanish: use
    /// [`Pool::open`] unless the version is pinned.
    pub async fn read(&self, version: u64) -> Result<ReadFile> {
        if version == 0 {
            return Ok(ReadFile::new(self.clone(), Vec::new()));
        }
        let mut bytes = BytesMut::new();
        loop {
            let (length, piece) =
                self.call_manager::<ReadMap>(&(version, bytes.len() as u64), Bytes::new()).await?;
            if length > MAX_MAP || piece.len() as u64 > length {
                return Err(PoolError::Answer { what: "map" });
            }
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 >= length {
                break;
            }
            if piece.is_empty() {
                return Err(PoolError::Answer { what: "map" });
            }
        }
        let decoded = chunk_map::decode_sealed(&bytes);
        let (mut pieces, seal) = decoded.map_err(|_| PoolError::Answer { what: "map" })?;
        let sealed = self.check_seal(version, &mut pieces, seal).await?;
        Ok(ReadFile { sealed, ..ReadFile::new(self.clone(), pieces) })
    }

    /// Opens the current version of a file, which must have been sealed under the name `name` if it was
    /// sealed.
    pub async fn open_named(&self, version: u64, name: &str) -> Result<ReadFile> {
        let file = self.open(version).await?;
        file.check_name(name)?;
        Ok(file)
    }

    /// Locates chunks whose places are unknown, or all of them if `anew`.
    pub(super) async fn locate(&self, wanted: &[ChunkId], anew: bool) -> Result<()> {
        let unknown: Vec<ChunkId> = {
            let state = lock(&self.inner.cache.state);
            wanted.iter().copied().filter(|chunk| anew || !state.located.contains_key(chunk)).collect()
        };
        for batch in unknown.chunks(LOCATED * 4) {
            let (places, payload) =
                self.call_manager::<Locate>(&(), put_numbers(batch.iter().copied())).await?;
            self.record_addresses(&places);
            let located = get_located(&payload).filter(|located| located.len() == batch.len());
            let located = located.ok_or(PoolError::Answer { what: "list of places" })?;
            let mut state = lock(&self.inner.cache.state);
            if state.located.len() > LOCATIONS {
                state.located.clear();
            }
            batch
                .iter()
                .zip(located)
                .for_each(|(chunk, located)| drop(state.located.insert(*chunk, located)));
        }
        Ok(())
    }

    pub(super) async fn chunk(&self, piece: &ChunkRef) -> Result<Bytes> {
        let (cell, _) = self.inner.cache.cell(piece);
        let fetched = cell.get_or_try_init(|| self.fetch(piece)).await?;
        Ok(fetched.clone())
    }

    pub(super) async fn fetch(&self, piece: &ChunkRef) -> Result<Bytes> {
        let mut because = None;
        for anew in [false, true] {
            self.locate(&[piece.chunk], anew).await?;
            let located = lock(&self.inner.cache.state).located.get(&piece.chunk).cloned();
            let Some(located) = located else { break };
            if piece.digest.is_some_and(|sealed| sealed != located.digest) {
                because = Some(Arc::new(PoolError::Answer { what: "digest of a sealed chunk" }));
                continue;
            }
            match self.fetch_from(piece.chunk, &located.digest, &located.places).await {
                Ok(bytes) => return self.decrypt(piece, bytes),
                Err(error) => because = error.map(Arc::new).or(because),
            }
            // No copy can be read; it may be kept in pieces.
            match self.fetch_pieces(piece.chunk, &located.digest, anew).await {
                Ok(Some(bytes)) => return self.decrypt(piece, bytes),
                Ok(None) => {}
                Err(error) => because = Some(Arc::new(error)),
            }
        }
        Err(PoolError::Unreadable { chunk: piece.chunk, because })
    }

    /// Decrypts a chunk if necessary and checks its length.
    pub(super) fn decrypt(&self, piece: &ChunkRef, bytes: Bytes) -> Result<Bytes> {
        let raw = match (piece.encrypted, &self.inner.options.secret) {
            (false, None) => bytes,
            (true, Some(secret)) => {
                let raw = secret.decrypt(&bytes, piece.digest.is_some());
                raw.map_err(|_| PoolError::WrongSecret { chunk: piece.chunk })?.into()
            }
            // A reader with a secret must not be given what anybody could have written.
            (true, None) | (false, Some(_)) => {
                return Err(PoolError::WrongSecret { chunk: piece.chunk });
            }
        };
        if raw.len() == piece.length as usize {
            Ok(raw)
        } else {
            Err(PoolError::Answer { what: "length of a chunk" })
        }
    }

    /// Reads a chunk, or a piece of one, from one benefactor after the other, starting with a different one
    /// for each chunk. If all fail, returns the error of the last.
    pub(super) async fn fetch_from(
        &self,
        chunk: ChunkId,
        digest: &Digest,
        places: &[BenefactorId],
    ) -> std::result::Result<Bytes, Option<PoolError>> {
        let (count, mut because) = (places.len(), None);
        for step in 0..count {
            let id = places[(chunk as usize + step) % count];
            let Some(place) = self.place(id) else { continue };
            let got = self.call_benefactor::<GetChunk>(&place, digest, Bytes::new());
            let wrong = match got.await {
                Ok((_, frame)) => match open_shared(digest, &frame) {
                    Ok(bytes) => return Ok(bytes),
                    Err(_) => true,
                },
                Err(error) => {
                    let code = error.code();
                    because = Some(error);
                    match code {
                        Some(code::DAMAGED) => true,
                        Some(Code::NOT_FOUND) => false,
                        // The benefactor was not reached, so its copy may be intact.
                        _ => continue,
                    }
                }
            };
            self.report_fault(Fault { chunk, benefactor: id, wrong });
        }
        Err(because)
    }

    /// Reports a copy that could not be read, in the background.
    pub(super) fn report_fault(&self, fault: Fault) {
        let Fault { chunk, benefactor, wrong } = fault;
        tracing::warn!(benefactor, chunk, wrong, "a copy could not be read");
        let pool = self.clone();
        tokio::spawn(async move {
            if let Err(error) = pool.call_manager::<ReportFault>(&fault, Bytes::new()).await {
                tracing::warn!(%error, chunk, "a fault could not be reported");
            }
        });
    }
}

/// A version of a file, opened for reading.
#[derive(Debug)]
pub struct ReadFile {
    pool: Pool,
    pieces: Vec<ChunkRef>,
    /// What the seal of the map says, if it has a right one.
    sealed: Option<Sealed>,
    /// Offset of the end of each chunk.
    ends: Vec<u64>,
    /// End of the last read; a read that starts there is sequential.
    last: AtomicU64,
    /// The first chunk that was not read ahead.
    ahead: AtomicU64,
    /// Keeps the chunks in the pool.
    _session: Option<Arc<ReaderSession>>,
}

impl ReadFile {
    pub(super) fn new(pool: Pool, pieces: Vec<ChunkRef>) -> Self {
        let mut end = 0;
        let ends = pieces
            .iter()
            .map(|piece| {
                end += u64::from(piece.length);
                end
            })
            .collect();
        let (last, ahead) = Default::default();
        Self { pool, pieces, sealed: None, ends, last, ahead, _session: None }
    }

    /// Refuses a file that was sealed under another name.
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        match &self.sealed {
            Some(sealed) if sealed.name != name => {
                Err(PoolError::OtherName { name: name.to_owned(), sealed: sealed.name.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Whether the chunk map had a right seal.
    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    pub(super) fn within(self, session: Arc<ReaderSession>) -> Self {
        Self { _session: Some(session), ..self }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The chunks of the version.
    pub fn pieces(&self) -> &[ChunkRef] {
        &self.pieces
    }

    /// The chunks of a range, if the range starts and ends at chunk boundaries.
    pub fn pieces_of(&self, range: Range<u64>) -> Option<&[ChunkRef]> {
        let begin_of = |at: usize| at.checked_sub(1).map_or(0, |before| self.ends[before]);
        let first = self.ends.partition_point(|end| *end <= range.start);
        let last = self.ends.partition_point(|end| *end <= range.end);
        let whole = begin_of(first) == range.start && begin_of(last) == range.end;
        self.pieces.get(first..last).filter(|_| whole)
    }

    /// The bytes at `offset`; fewer than `length` only at the end of the file.
    pub async fn read_at(&self, offset: u64, length: usize) -> Result<Bytes> {
        let end = self.size().min(offset.saturating_add(length as u64));
        if offset >= end {
            return Ok(Bytes::new());
        }
        let first = self.ends.partition_point(|e| *e <= offset);
        let last = self.ends.partition_point(|e| *e < end);
        if self.last.swap(end, Ordering::Relaxed) == offset {
            self.read_ahead(first, last);
        }
        let wanted: Vec<ChunkId> =
            self.pieces[first..].iter().take(LOCATED).map(|piece| piece.chunk).collect();
        self.pool.locate(&wanted, false).await?;
        let mut out = BytesMut::with_capacity((end - offset) as usize);
        // Fetches the others while the first is awaited.
        self.pool.fetch_ahead(self.pieces.get(first + 1..=last).unwrap_or_default());
        for at in first..=last {
            let chunk = self.pool.chunk(&self.pieces[at]).await?;
            let start = self.ends[at] - u64::from(self.pieces[at].length);
            let from = offset.saturating_sub(start) as usize;
            let to = (end.min(self.ends[at]) - start) as usize;
            if first == last {
                return Ok(chunk.slice(from..to));
            }
            out.extend_from_slice(&chunk[from..to]);
        }
        Ok(out.freeze())
    }

    /// Fetches the chunks after `last` up to the readahead limit, unless they were fetched ahead before.
    fn read_ahead(&self, first: usize, last: usize) {
        let far = self.ends[first].saturating_add(self.pool.inner.options.read_ahead as u64);
        let until = self.ends.partition_point(|end| *end <= far).min(self.pieces.len());
        let begun = self.ahead.fetch_max(until as u64, Ordering::Relaxed) as usize;
        self.pool.fetch_ahead(self.pieces.get(begun.max(last + 1)..until).unwrap_or_default());
    }
}
