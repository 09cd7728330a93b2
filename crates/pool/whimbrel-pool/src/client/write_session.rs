//! A write session: sends batches of new chunks to benefactors, and to others if these fail.
//!
//! For each batch the session asks which chunks are new, sends these to as many benefactors as copies are
//! required, and records who took them. Before a commit, [`WriteSession::secure`] makes all copies durable,
//! replaces lost ones, and registers the chunks.

use super::{
    Pool, PoolError, Result,
    exclusions::Exclusions,
    memory_budget::MemoryBudget,
    previous_versions::KnownVersion,
    stripe::{Stripe, StripeChoice},
};
use crate::{
    policy::{Policy, Safety},
    protocol::{
        BenefactorAddress, BenefactorId, ChunkId, EndSession, FindChunks, FindReusable, FlushChunks,
        OrderCopies, PutChunks, RegisterChunks, Reserve, ReserveSpace, Reserved, WrittenChunk, get_bits,
        get_numbers, put_digests, put_written,
    },
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Notify, task::JoinSet};
use whimbrel_core::{Digest, lock};
use whimbrel_image::pack_frame::{Encoder, Kind};

/// Most bytes requested at once; eagerly, because the size of a file is unknown (IV.A).
const GRANT: u64 = 256 << 20;
/// Bytes requested first. Requests grow with the file, so many small files do not reserve the whole pool.
const FIRST_GRANT: u64 = 16 << 20;
/// Bytes requested if the pool has less.
const SMALL_GRANT: u64 = 1 << 20;
/// Smallest buffer beyond the longest chunks: a batch and a block of written data, twice.
const LEAST_BUFFER: usize = 4 << 20;
/// zstd level of chunks: a fifth of the processor time of sending them.
pub(super) const LEVEL: i32 = 1;
const SAMPLE: usize = 8 << 10;
/// Chunks of one copy order, which must be answered before the timeout of the manager.
const COPY_ORDER_CHUNKS: usize = 256;
/// Chunks of one registration or flush, far below [`MAX_LIST`](crate::protocol::MAX_LIST).
const REGISTERED_CHUNKS: usize = 20_000;

#[derive(Debug)]
pub(super) struct NewChunk {
    pub(super) digest: Digest,
    /// Length of the file's bytes; `bytes` may be encrypted.
    pub(super) length: u32,
    pub(super) bytes: Bytes,
}

type Batch = Vec<NewChunk>;

#[derive(Debug, Default)]
struct State {
    ids: HashMap<Digest, ChunkId>,
    pending: Vec<WrittenChunk>,
    under_way: usize,
    failed: Option<PoolError>,
    exclusions: Exclusions,
}

#[derive(Debug)]
pub(super) struct WriteSession {
    pool: Pool,
    id: u64,
    copies: usize,
    /// Number of reachable copies for which a chunk is not sent.
    known_copies: u8,
    width: u16,
    stripe: Mutex<Stripe>,
    /// Notified when a queue of the stripe became shorter.
    room: Notify,
    granted: AtomicU64,
    /// Bytes of frames that were sent, counted once for each chunk.
    sent: AtomicU64,
    state: Mutex<State>,
    /// The version that the file is based on, and its reusable chunks.
    base: OnceLock<(u64, HashMap<Digest, ChunkId>)>,
    idle: Condvar,
    pub(super) budget: MemoryBudget,
}

impl WriteSession {
    /// Starts a session under `policy` with a budget of at least `buffer` bytes.
    pub(super) async fn start(pool: &Pool, policy: &Policy, buffer: usize) -> Result<Arc<Self>> {
        let width = policy.width.max(policy.copies.into());
        let buffer = buffer.max(policy.cutting.longest() * 2 + LEAST_BUFFER);
        let ask = |bytes| Reserve { session: 0, bytes, unused: 0, width, avoid: Vec::new() };
        let reserved = match pool.call_manager::<ReserveSpace>(&ask(FIRST_GRANT), Bytes::new()).await {
            Err(error) if error.is_full() => {
                pool.call_manager::<ReserveSpace>(&ask(SMALL_GRANT), Bytes::new()).await?.0
            }
            other => other?.0,
        };
        let Reserved { session, lease, stripe, bytes } = reserved;
        pool.record_addresses(&stripe);
        let domains = pool.domains().await?;
        let copies = match policy.safety {
            Safety::Optimistic => 1,
            Safety::Pessimistic => policy.copies,
        };
        // If there are fewer benefactors, a chunk that all of them have need not be sent.
        let known_copies = copies.min(u8::try_from(stripe.len()).unwrap_or(u8::MAX));
        let copies = usize::from(copies);
        let cap = (buffer as u64 * copies as u64 / stripe.len().max(1) as u64).max(4 << 20);
        let session = Arc::new(Self {
            pool: pool.clone(),
            id: session,
            copies,
            known_copies,
            width,
            stripe: Mutex::new(Stripe::new(stripe, cap, domains)),
            room: Notify::new(),
            granted: AtomicU64::new(bytes),
            sent: AtomicU64::new(0),
            state: Mutex::default(),
            base: OnceLock::new(),
            idle: Condvar::new(),
            budget: MemoryBudget::new(buffer),
        });
        let every = Duration::from_secs(u64::from(lease.max(3))) / 3;
        tokio::spawn(keep_alive(Arc::downgrade(&session), every));
        Ok(session)
    }

    /// Reuses the chunks of an older version without a query for each, if the manager answers.
    pub(super) async fn reuse_version(&self, before: &KnownVersion) {
        let asked =
            self.pool.call_manager::<FindReusable>(&(before.version, self.known_copies), Bytes::new()).await;
        match asked {
            Ok((_, bits)) => {
                let standing = before.reusable(&get_bits(&bits, before.pieces));
                let _ = self.base.set((before.version, standing));
            }
            Err(error) => tracing::debug!(%error, version = before.version, "no chunks are reused"),
        }
    }

    /// The version that the file is based on; 0 if there is none.
    pub(super) fn base(&self) -> u64 {
        self.base.get().map_or(0, |(version, _)| *version)
    }

    /// Whether a chunk is a reusable one of the base version.
    pub(super) fn is_reusable(&self, digest: &Digest) -> bool {
        let Some(chunk) = self.base.get().and_then(|(_, standing)| standing.get(digest)) else {
            return false;
        };
        lock(&self.state).ids.insert(*digest, *chunk);
        true
    }

    /// Calls `look` with the numbers of all chunks that are registered or were known.
    pub(super) fn with_numbers<T>(&self, look: impl FnOnce(&HashMap<Digest, ChunkId>) -> T) -> T {
        look(&lock(&self.state).ids)
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn failure(&self) -> Option<PoolError> {
        lock(&self.state).failed.clone()
    }

    pub(super) fn fail(&self, error: PoolError) {
        lock(&self.state).failed.get_or_insert(error);
        self.budget.wake();
    }

    fn exclude(&self, id: BenefactorId, error: PoolError) {
        tracing::warn!(error = &error as &dyn std::error::Error, benefactor = id, "excluded from the write");
        lock(&self.stripe).exclude(id);
        lock(&self.state).exclusions.add(error);
    }

    fn unwritten(&self, lost: usize, refused: Option<PoolError>) -> PoolError {
        lock(&self.state).exclusions.unwritten(lost, refused)
    }

    /// Number of a chunk that is registered or was known.
    pub(super) fn number(&self, digest: &Digest) -> Option<ChunkId> {
        lock(&self.state).ids.get(digest).copied()
    }

    /// Sends a batch in the background; `bytes` return to the budget afterwards.
    pub(super) fn dispatch(self: &Arc<Self>, batch: Batch, bytes: usize) {
        lock(&self.state).under_way += 1;
        let session = self.clone();
        self.pool.inner.runtime.spawn(async move {
            if session.failure().is_none()
                && let Err(error) = session.deliver(batch).await
            {
                tracing::warn!(%error, session = session.id, "a write failed");
                session.fail(error);
            }
            session.budget.release(bytes);
            lock(&session.state).under_way -= 1;
            session.idle.notify_all();
        });
    }

    /// Waits, in a thread outside the runtime, until no batch is in flight.
    pub(super) fn wait(&self) {
        let mut state = lock(&self.state);
        while state.under_way > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    async fn deliver(&self, batch: Batch) -> Result<()> {
        let digests = put_digests(batch.iter().map(|chunk| &chunk.digest));
        let (_, known) = self.pool.call_manager::<FindChunks>(&(self.id, self.known_copies), digests).await?;
        let known = get_numbers(&known).filter(|known| known.len() == batch.len());
        let known = known.ok_or(PoolError::Answer { what: "list of known chunks" })?;
        let mut new = Vec::new();
        {
            let mut state = lock(&self.state);
            for (chunk, id) in batch.into_iter().zip(known) {
                match id {
                    0 => new.push(chunk),
                    id => drop(state.ids.insert(chunk.digest, id)),
                }
            }
        }
        if new.is_empty() { Ok(()) } else { self.send(new).await }
    }

    async fn send(&self, new: Batch) -> Result<()> {
        let encoded = tokio::task::spawn_blocking(move || encode(new)).await;
        let (written, payload) = encoded.map_err(|_| PoolError::Abandoned)??;
        self.reserve_more(payload.length).await?;
        let header: Vec<(Digest, u32)> = written.iter().map(|chunk| (chunk.digest, chunk.stored)).collect();
        let places = self.put(&header, payload).await?;
        let with_places = written.into_iter().map(|chunk| WrittenChunk { places: places.clone(), ..chunk });
        lock(&self.state).pending.extend(with_places);
        Ok(())
    }

    /// Counts sent bytes and reserves more space before the grant is used up.
    async fn reserve_more(&self, bytes: u64) -> Result<()> {
        let total = self.sent.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let needed = total * self.copies as u64;
        let grant = needed.clamp(FIRST_GRANT, GRANT);
        if needed + grant / 4 < self.granted.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.reserve_space(grant).await {
            // The present grant may still be used up; a full benefactor refuses by itself.
            Err(error) if error.is_full() && needed <= self.granted.load(Ordering::Relaxed) => Ok(()),
            Err(error) if error.is_full() => self.reserve_space(SMALL_GRANT).await,
            other => other,
        }
    }

    async fn reserve_space(&self, bytes: u64) -> Result<()> {
        let avoid = lock(&self.stripe).excluded();
        let written = self.sent() * self.copies as u64;
        let unused = self.granted.load(Ordering::Relaxed).saturating_sub(written);
        let ask = Reserve { session: self.id, bytes, unused, width: self.width, avoid };
        let (reserved, _) = self.pool.call_manager::<ReserveSpace>(&ask, Bytes::new()).await?;
        self.granted.fetch_add(reserved.bytes, Ordering::Relaxed);
        self.pool.record_addresses(&reserved.stripe);
        let mut stripe = lock(&self.stripe);
        if stripe.width() < usize::from(self.width) {
            stripe.extend(reserved.stripe);
        }
        Ok(())
    }

    /// Sends frames to as many benefactors as copies are required, or exist; returns those that took them.
    async fn put(&self, header: &[(Digest, u32)], payload: Frames) -> Result<Vec<BenefactorId>> {
        let (mut have, mut tried, mut asked) = (Vec::new(), Vec::new(), false);
        while have.len() < self.copies {
            match self.choose(payload.length, self.copies - have.len(), &tried).await {
                StripeChoice::Places(places) => {
                    tried.extend(places.iter().map(|place| place.id));
                    have.extend(self.put_to(places, header, &payload).await);
                }
                StripeChoice::Nobody | StripeChoice::Wait if !asked => {
                    asked = true;
                    match self.reserve_space(SMALL_GRANT).await {
                        Err(error) if have.is_empty() => {
                            return Err(self.unwritten(header.len(), Some(error)));
                        }
                        // There are fewer copies than required; the manager makes the others later.
                        Err(_) => break,
                        Ok(()) => {}
                    }
                }
                StripeChoice::Nobody | StripeChoice::Wait => break,
            }
        }
        if have.is_empty() { Err(self.unwritten(header.len(), None)) } else { Ok(have) }
    }

    /// Chooses benefactors from the stripe, waiting while their queues are full.
    async fn choose(&self, bytes: u64, copies: usize, not: &[BenefactorId]) -> StripeChoice {
        loop {
            let mut room = std::pin::pin!(self.room.notified());
            room.as_mut().enable();
            match lock(&self.stripe).choose(bytes, copies, not) {
                StripeChoice::Wait => {}
                other => return other,
            }
            room.await;
        }
    }

    async fn put_to(
        &self,
        places: Vec<BenefactorAddress>,
        header: &[(Digest, u32)],
        payload: &Frames,
    ) -> Vec<BenefactorId> {
        let mut puts = JoinSet::new();
        for place in places {
            let (pool, header, parts) = (self.pool.clone(), header.to_vec(), payload.parts.clone());
            puts.spawn(async move {
                let id = place.id;
                let call = pool.call_benefactor_with::<PutChunks>(&place, &header, Bytes::new(), parts);
                (id, call.await)
            });
        }
        let mut taken = Vec::new();
        while let Some(done) = puts.join_next().await {
            let Ok((id, put)) = done else { continue };
            lock(&self.stripe).done(id, payload.length);
            match put {
                Ok(_) => taken.push(id),
                Err(error) => self.exclude(id, error),
            }
            self.room.notify_waiters();
        }
        taken
    }

    /// Makes written chunks durable and registers them for a commit. No batch may be in flight.
    pub(super) async fn secure(&self) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let mut pending = std::mem::take(&mut lock(&self.state).pending);
        self.flush(&mut pending).await;
        self.replace_lost_copies(&mut pending).await;
        let lost = pending.iter().filter(|chunk| chunk.places.is_empty()).count();
        if lost > 0 {
            return Err(self.unwritten(lost, None));
        }
        for batch in pending.chunks(REGISTERED_CHUNKS) {
            let (_, ids) = self.pool.call_manager::<RegisterChunks>(&self.id, put_written(batch)).await?;
            let ids = get_numbers(&ids).filter(|ids| ids.len() == batch.len());
            let ids = ids.ok_or(PoolError::Answer { what: "list of chunk numbers" })?;
            let mut state = lock(&self.state);
            state.ids.extend(batch.iter().map(|chunk| chunk.digest).zip(ids));
        }
        Ok(())
    }

    /// Flushes all chunks. A benefactor that fails, or lost a chunk, is removed from the chunk's places.
    async fn flush(&self, pending: &mut [WrittenChunk]) {
        let mut by_place: BTreeMap<BenefactorId, Vec<usize>> = BTreeMap::new();
        for (at, chunk) in pending.iter().enumerate() {
            chunk.places.iter().for_each(|place| by_place.entry(*place).or_default().push(at));
        }
        let mut flushes = JoinSet::new();
        let lists = by_place.into_iter().flat_map(|(id, chunks)| {
            let lists: Vec<_> = chunks.chunks(REGISTERED_CHUNKS).map(|list| (id, list.to_vec())).collect();
            lists
        });
        for (id, chunks) in lists {
            let digests = put_digests(chunks.iter().map(|at| &pending[*at].digest));
            let (pool, place) = (self.pool.clone(), lock(&self.stripe).place(id));
            flushes.spawn(async move {
                let Some(place) = place else {
                    return (id, chunks, Err(PoolError::Answer { what: "benefactor" }));
                };
                let flushed = pool.call_benefactor::<FlushChunks>(&place, &(), digests).await;
                (id, chunks, flushed.map(|(_, missing)| missing))
            });
        }
        while let Some(done) = flushes.join_next().await {
            let Ok((id, chunks, missing)) = done else { continue };
            let gone = match missing {
                Ok(bits) => get_bits(&bits, chunks.len()),
                Err(error) => {
                    self.exclude(id, error);
                    vec![true; chunks.len()]
                }
            };
            for (at, _) in chunks.iter().zip(gone).filter(|(_, gone)| *gone) {
                pending[*at].places.retain(|place| *place != id);
            }
        }
    }

    /// Has chunks with too few copies copied between benefactors, as far as there are others.
    async fn replace_lost_copies(&self, pending: &mut [WrittenChunk]) {
        let lacks = |chunk: &WrittenChunk| !chunk.places.is_empty() && chunk.places.len() < self.copies;
        if !pending.iter().any(lacks) {
            return;
        }
        // Without more benefactors, the manager makes the remaining copies later.
        let _ = self.reserve_space(SMALL_GRANT).await;
        let mut orders: BTreeMap<(BenefactorId, BenefactorId), Vec<usize>> = BTreeMap::new();
        for (at, chunk) in pending.iter().enumerate().filter(|(_, chunk)| lacks(chunk)) {
            if let StripeChoice::Places(places) =
                lock(&self.stripe).choose(0, self.copies - chunk.places.len(), &chunk.places)
            {
                places.iter().for_each(|to| orders.entry((chunk.places[0], to.id)).or_default().push(at));
            }
        }
        let lists = orders.into_iter().flat_map(|(pair, chunks)| {
            let lists: Vec<_> = chunks.chunks(COPY_ORDER_CHUNKS).map(|list| (pair, list.to_vec())).collect();
            lists
        });
        for ((from, to), chunks) in lists {
            let digests = put_digests(chunks.iter().map(|at| &pending[*at].digest));
            match self.pool.call_manager::<OrderCopies>(&(self.id, from, to), digests).await {
                Ok((_, failed)) => {
                    let failed = get_bits(&failed, chunks.len());
                    let copied = chunks.iter().zip(failed).filter(|(_, failed)| !failed);
                    copied.for_each(|(at, _)| pending[*at].places.push(to));
                }
                Err(error) => tracing::warn!(%error, from, to, "chunks could not be copied"),
            }
        }
    }

    /// Ends the session at the manager.
    pub(super) async fn end(&self) {
        if let Err(error) = self.pool.call_manager::<EndSession>(&self.id, Bytes::new()).await {
            tracing::debug!(%error, "the session was not ended and will expire");
        }
    }
}

impl Pool {
    pub(super) async fn call_benefactor<C: whimbrel_wire::Call>(
        &self,
        place: &BenefactorAddress,
        header: &C::Header,
        payload: Bytes,
    ) -> Result<(C::Reply, Bytes)> {
        self.call_benefactor_with::<C>(place, header, payload, Vec::new()).await
    }

    /// Does what [`Pool::call_benefactor`] does with a payload that lies in several places.
    async fn call_benefactor_with<C: whimbrel_wire::Call>(
        &self,
        place: &BenefactorAddress,
        header: &C::Header,
        payload: Bytes,
        rest: Vec<Bytes>,
    ) -> Result<(C::Reply, Bytes)> {
        let patience = self.inner.options.benefactor_timeout;
        let call = async {
            let connection = self.inner.links.benefactor(&place.address, place.key).await;
            let connection = connection.map_err(|error| PoolError::unreached(place, error))?;
            Ok(connection.request_of_parts::<C>(header, payload, rest).await?)
        };
        tokio::time::timeout(patience, call).await.unwrap_or_else(|_| {
            let slow = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(PoolError::Local { action: "get an answer in time", source: Arc::new(slow) })
        })
    }
}

/// Frames of a batch; a copy of this has the same bytes.
#[derive(Clone)]
struct Frames {
    parts: Vec<Bytes>,
    length: u64,
}

fn encode(new: Batch) -> Result<(Vec<WrittenChunk>, Frames)> {
    let mut encoder = Encoder::new(LEVEL);
    let (mut parts, mut gathered, mut before) = (Vec::new(), Vec::new(), 0);
    let mut written = Vec::with_capacity(new.len());
    let invalid = |_| PoolError::Answer { what: "chunk" };
    for NewChunk { digest, length, bytes } in new {
        let begin = before + gathered.len();
        if shrinks(&mut encoder, &bytes) {
            gathered.extend(encoder.encode(Kind::Blob, &bytes, &[bytes.len()]).map_err(invalid)?);
        } else {
            // What is long and does not shrink stays where it is.
            Encoder::store_head(Kind::Blob, &bytes, &[bytes.len()], &mut gathered).map_err(invalid)?;
            before += gathered.len() + bytes.len();
            parts.extend([std::mem::take(&mut gathered).into(), bytes]);
        }
        let stored = (before + gathered.len() - begin) as u32;
        written.push(WrittenChunk { digest, length, stored, places: Vec::new() });
    }
    let length = (before + gathered.len()) as u64;
    parts.push(gathered.into());
    Ok((written, Frames { parts, length }))
}

/// Whether compression pays, by samples from start, middle and end; always for a short chunk.
fn shrinks(encoder: &mut Encoder, bytes: &[u8]) -> bool {
    if bytes.len() < SAMPLE * 8 {
        return true;
    }
    let last = bytes.len() - SAMPLE;
    [0, last / 2, last].into_iter().any(|at| {
        let sample = encoder.encode(Kind::Blob, &bytes[at..at + SAMPLE], &[SAMPLE]);
        sample.is_ok_and(|frame| frame.len() < SAMPLE)
    })
}

/// Renews the lease while the session exists.
async fn keep_alive(session: Weak<WriteSession>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(session) = session.upgrade() else { return };
        let ask = Reserve { session: session.id, bytes: 0, unused: 0, width: 0, avoid: Vec::new() };
        if let Err(error) = session.pool.call_manager::<ReserveSpace>(&ask, Bytes::new()).await {
            session.fail(error);
            return;
        }
    }
}

impl WriteSession {
    /// Runs [`WriteSession::secure`] in a thread outside the runtime.
    pub(super) fn secure_blocking(&self) -> Result<()> {
        self.pool.block(self.secure())
    }
}
