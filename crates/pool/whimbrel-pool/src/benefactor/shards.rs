//! Orders of the manager about pieces: cuts chunks, and makes a lost piece again.
//!
//! A chunk is compared with its digest before it is cut, and its pieces are durable at all their
//! benefactors before the manager is told of them. To make a piece again, no more others are read than the
//! chunk has pieces of data; the result is compared with the digest of the lost one.

use super::{
    ChunkStore, check_frame, open_frame,
    service::{blocking, invalid},
};
use crate::{
    connections::ConnectionCache,
    erasure::{PieceCounts, encode, rebuild},
    protocol::{
        BenefactorAddress, BenefactorId, CodeChunks, CodingOrder, FlushChunks, GetChunk, MAX_BATCH,
        MadePiece, PutChunks, RebuildOrder, RebuildPiece, code, get_bits, get_digests, put_digests,
    },
};
use bytes::Bytes;
use std::sync::Arc;
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_wire::{Answer, Refusal, Reply, Request};

/// Takes almost no time and stores the bytes as they are: what is cut is compressed already.
const NO_LEVEL: i32 = -1000;
/// Bytes of pieces that are sent at once to each target.
const SENT_BYTES: usize = 2 << 20;

/// Answers the orders of one benefactor.
#[derive(Debug, Clone)]
pub(super) struct PieceOrders {
    store: Arc<ChunkStore>,
    links: Arc<ConnectionCache>,
}

/// A piece with its frame.
type Framed = (MadePiece, Bytes);

fn failed(error: &dyn std::error::Error) -> Refusal {
    Refusal::new(code::STORAGE, format!("the order failed: {error}"))
}

impl PieceOrders {
    pub(super) fn new(store: Arc<ChunkStore>, links: Arc<ConnectionCache>) -> Self {
        Self { store, links }
    }

    /// Cuts chunks into pieces and stores these.
    pub(super) async fn code(&self, request: Request) -> Answer {
        let order = request.decode::<CodeChunks>()?;
        let digests = get_digests(&request.payload).filter(|digests| digests.len() <= MAX_BATCH);
        let digests = digests.ok_or_else(|| invalid("a truncated list, or too many chunks"))?;
        order.counts.check().map_err(|error| invalid(&error.to_string()))?;
        if order.targets.len() != order.counts.all() {
            return Err(invalid("a benefactor for each piece is needed"));
        }
        let mut made: Vec<Vec<MadePiece>> = Vec::with_capacity(digests.len());
        let mut waiting: Vec<Vec<Framed>> = vec![Vec::new(); order.targets.len()];
        let (mut first, mut bytes) = (0, 0);
        for (at, digest) in digests.iter().enumerate() {
            let (store, counts, digest) = (self.store.clone(), order.counts, *digest);
            // A chunk that is missing or damaged here has no pieces.
            let pieces = blocking(move || cut(&store, &digest, counts)).await?.unwrap_or_default();
            made.push(pieces.iter().map(|(piece, _)| *piece).collect());
            for (number, piece) in pieces.into_iter().enumerate() {
                bytes += piece.1.len() / order.counts.all();
                waiting[(number + at) % order.targets.len()].push(piece);
            }
            if bytes >= SENT_BYTES || at + 1 == digests.len() {
                if !self.store_all(&order, std::mem::take(&mut waiting)).await {
                    made[first..].iter_mut().for_each(Vec::clear);
                }
                (first, bytes) = (made.len(), 0);
                waiting = vec![Vec::new(); order.targets.len()];
            }
        }
        Reply::of::<CodeChunks>(&made, Bytes::new())
    }

    /// Stores pieces at their targets; whether all of them are durable.
    async fn store_all(&self, order: &CodingOrder, pieces: Vec<Vec<Framed>>) -> bool {
        let mut puts = tokio::task::JoinSet::new();
        for (target, pieces) in order.targets.iter().cloned().zip(pieces) {
            let (orders, own) = (self.clone(), order.at);
            puts.spawn(async move {
                let stored = orders.store_at(&target, own, pieces).await;
                stored.inspect_err(
                    |error| tracing::warn!(%error, to = %target.address, "pieces were not stored"),
                )
            });
        }
        let mut all = true;
        while let Some(done) = puts.join_next().await {
            all &= matches!(done, Ok(Ok(())));
        }
        all
    }

    async fn store_at(
        &self,
        to: &BenefactorAddress,
        own: BenefactorId,
        pieces: Vec<Framed>,
    ) -> Result<(), Refusal> {
        let digests: Vec<Digest> = pieces.iter().map(|(piece, _)| piece.digest).collect();
        if digests.is_empty() {
            return Ok(());
        }
        if to.id == own {
            let chunks: Vec<(Digest, Bytes)> =
                pieces.into_iter().map(|(piece, frame)| (piece.digest, frame)).collect();
            let store = self.store.clone();
            return blocking(move || put_durably(&store, &chunks)).await?;
        }
        let connection = self.links.benefactor(&to.address, to.key).await.map_err(|error| failed(&error))?;
        let named = pieces.iter().map(|(piece, frame)| (piece.digest, frame.len() as u32)).collect();
        let payload: Vec<u8> = pieces.iter().flat_map(|(_, frame)| frame.iter().copied()).collect();
        connection.request::<PutChunks>(&named, payload.into()).await.map_err(|error| failed(&error))?;
        let flushed = connection.request::<FlushChunks>(&(), put_digests(&digests)).await;
        let (_, missing) = flushed.map_err(|error| failed(&error))?;
        match get_bits(&missing, digests.len()).contains(&true) {
            true => Err(Refusal::new(code::STORAGE, "a piece is missing after it was stored")),
            false => Ok(()),
        }
    }

    /// Makes a lost piece again and stores it here.
    pub(super) async fn rebuild(&self, request: Request) -> Answer {
        let RebuildOrder { chunk, counts, number, piece, at, sources } = request.decode::<RebuildPiece>()?;
        counts.check().map_err(|error| invalid(&error.to_string()))?;
        if sources.len() != usize::from(counts.data) {
            return Err(invalid("as many pieces as the chunk has of data are needed"));
        }
        let mut reads = tokio::task::JoinSet::new();
        for (digest, place) in sources {
            let orders = self.clone();
            reads.spawn(async move { orders.read(&digest, &place, at).await });
        }
        let mut parts = Vec::new();
        while let Some(read) = reads.join_next().await {
            parts.push(read.map_err(|error| failed(&error))??);
        }
        let store = self.store.clone();
        blocking(move || -> Result<(), Refusal> {
            let bytes = rebuild(&chunk, counts, &parts, number).map_err(|error| failed(&error))?;
            if Digest::of(&bytes) != piece {
                return Err(Refusal::new(code::DAMAGED, "the other pieces give another piece"));
            }
            let (_, frame) = framed(&bytes).ok_or_else(|| invalid("the piece has no frame"))?;
            put_durably(&store, &[(piece, frame)])
        })
        .await??;
        Reply::of::<RebuildPiece>(&(), Bytes::new())
    }

    /// Reads a piece and compares its digest.
    async fn read(
        &self,
        digest: &Digest,
        place: &BenefactorAddress,
        own: BenefactorId,
    ) -> Result<Vec<u8>, Refusal> {
        let frame = if place.id == own {
            let (store, digest) = (self.store.clone(), *digest);
            blocking(move || store.get(&digest)).await??
        } else {
            let connection =
                self.links.benefactor(&place.address, place.key).await.map_err(|error| failed(&error))?;
            connection.request::<GetChunk>(digest, Bytes::new()).await.map_err(|error| failed(&error))?.1
        };
        open_frame(digest, &frame).map_err(|error| failed(&error))
    }
}

/// The pieces of a chunk; none if it cannot be read here.
fn cut(store: &ChunkStore, digest: &Digest, counts: PieceCounts) -> Option<Vec<Framed>> {
    let frame = store.get(digest).ok()?;
    check_frame(digest, &frame).ok()?;
    let pieces = encode(digest, &frame, counts).ok()?;
    pieces.iter().map(|piece| framed(piece)).collect()
}

fn framed(piece: &[u8]) -> Option<Framed> {
    let frame = Bytes::from(Encoder::new(NO_LEVEL).encode(Kind::Blob, piece, &[piece.len()]).ok()?);
    let (length, stored) = (piece.len() as u32, frame.len() as u32);
    Some((MadePiece { digest: Digest::of(piece), length, stored }, frame))
}

fn put_durably(store: &ChunkStore, chunks: &[(Digest, Bytes)]) -> Result<(), Refusal> {
    store.put(chunks)?;
    let digests: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
    match store.flush(&digests)?.contains(&false) {
        true => Err(Refusal::new(code::STORAGE, "a piece is missing after it was stored")),
        false => Ok(()),
    }
}
