//! Chores of chunks in pieces: cuts what is old enough, makes lost pieces again, gives up what nobody uses.
//!
//! A benefactor that has a copy of a chunk makes its pieces and stores them. Only when all of them are
//! durable does the database require no copies any more. A lost piece is made by the benefactor that will
//! have it, of as many others as the chunk has pieces of data. While clients write, less is done at once.

use super::{
    ManagerService,
    placement::{self, BenefactorState, Rebuild},
};
use crate::{
    erasure::{Coding, PieceCounts},
    meta::{BenefactorRow, ChunkToCode, MetaError, NewPiece, Quarantine},
    protocol::{
        BenefactorAddress, BenefactorId, ChunkId, CodeChunks, CodingOrder, RebuildOrder, RebuildPiece,
        put_digests,
    },
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Chunks of one order, without and with open write sessions.
const ORDER: usize = 64;
const ORDER_DURING_WRITES: usize = 8;
/// Timeout of an order; its chunks are tried again later.
const ORDER_TIME: Duration = Duration::from_secs(60);
/// Time between two looks when nothing was to be done or nothing could be done.
const PAUSE: Duration = Duration::from_secs(60);

/// When to look next for chunks that are old enough; none for at once.
#[derive(Debug, Default)]
pub(super) struct CodingRounds {
    next: Option<Instant>,
}

impl ManagerService {
    /// Makes the next round look at once.
    pub(super) fn coding_changed(&self) {
        lock(&self.shared.coding_rounds).next = None;
    }

    /// Runs a round: gives up the pieces of chunks that nobody uses, and cuts some that are old enough.
    /// Returns how many were cut.
    pub(super) async fn code_old(&self) -> Result<u64, MetaError> {
        self.shared.meta.release_coded(self.now()).await?;
        let waits = lock(&self.shared.coding_rounds).next.is_some_and(|at| Instant::now() < at);
        if waits || self.quarantine() == Quarantine::On {
            return Ok(0);
        }
        let most = if self.shared.meta.sessions().await? > 0 { ORDER_DURING_WRITES } else { ORDER };
        let done = self.code_some(most).await;
        if !matches!(done, Ok(1..)) {
            lock(&self.shared.coding_rounds).next = Some(Instant::now() + PAUSE);
        }
        done
    }

    /// Cuts up to `most` chunks of the first versions that have any.
    async fn code_some(&self, most: usize) -> Result<u64, MetaError> {
        let (meta, now) = (&self.shared.meta, self.now());
        for file in meta.coded_files().await? {
            let Some(Coding { pieces: counts, after }) = meta.coding(file).await?.1 else { continue };
            let before = now.saturating_sub_unsigned(after.saturating_mul(1000));
            for version in meta.versions_to_code(file, before).await? {
                let chunks = match meta.chunks_to_code(version, most).await {
                    // The version was removed meanwhile.
                    Err(MetaError::NotFound) => continue,
                    chunks => chunks?,
                };
                if chunks.is_empty() {
                    meta.mark_coded(version).await?;
                    continue;
                }
                let coded = self.code(chunks, counts).await?;
                if coded > 0 {
                    return Ok(coded);
                }
            }
        }
        Ok(0)
    }

    /// Has chunks cut by benefactors that have copies.
    async fn code(&self, chunks: Vec<ChunkToCode>, counts: PieceCounts) -> Result<u64, MetaError> {
        let (members, now) = (self.members().await?, self.now());
        let Some(targets) = placement::for_pieces(&members, counts, &self.domains(&members), now) else {
            tracing::warn!(%counts, "too few benefactors in different places for the pieces of old chunks");
            return Ok(0);
        };
        let mut by_source: BTreeMap<BenefactorId, Vec<ChunkToCode>> = BTreeMap::new();
        for chunk in chunks {
            let online = |id: &&BenefactorId| {
                members.iter().any(|m| m.id == **id && BenefactorState::of(m, now) == BenefactorState::Online)
            };
            let places: Vec<&BenefactorId> = chunk.places.iter().filter(online).collect();
            let Some(source) = places.get(chunk.chunk as usize % places.len().max(1)) else { continue };
            by_source.entry(**source).or_default().push(chunk);
        }
        let mut coded = 0;
        for (source, chunks) in by_source {
            coded += self.send_coding_order(&members, source, &targets, counts, chunks).await?;
        }
        Ok(coded)
    }

    async fn send_coding_order(
        &self,
        members: &[BenefactorRow],
        source: BenefactorId,
        targets: &[BenefactorId],
        counts: PieceCounts,
        chunks: Vec<ChunkToCode>,
    ) -> Result<u64, MetaError> {
        let addresses = targets.iter().filter_map(|id| address(members, *id)).collect();
        let order = CodingOrder { counts, at: source, targets: addresses };
        let digests = put_digests(chunks.iter().map(|chunk| &chunk.digest));
        let Some(connection) = self.connection_of(members, source) else { return Ok(0) };
        let asked = tokio::time::timeout(ORDER_TIME, connection.request::<CodeChunks>(&order, digests)).await;
        let made = match asked {
            Ok(Ok((made, _))) => made,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a benefactor could not cut chunks into pieces");
                return Ok(0);
            }
            Err(_) => return Ok(0),
        };
        let mut coded = 0;
        for ((at, chunk), made) in chunks.iter().enumerate().zip(made) {
            if made.len() != counts.all() {
                continue;
            }
            let place = |number: usize| targets[(number + at) % targets.len()];
            let piece = |(number, made): (usize, &crate::protocol::MadePiece)| NewPiece {
                digest: made.digest,
                length: made.length,
                stored: made.stored,
                place: place(number),
            };
            let pieces: Vec<NewPiece> = made.iter().enumerate().map(piece).collect();
            coded +=
                u64::from(self.shared.meta.insert_pieces(chunk.chunk, counts, &pieces, self.now()).await?);
        }
        Ok(coded)
    }

    fn connection_of(
        &self,
        members: &[BenefactorRow],
        id: BenefactorId,
    ) -> Option<whimbrel_wire::Connection> {
        let key = members.iter().find(|member| member.id == id)?.key;
        self.shared.connections().get(&key).cloned()
    }

    /// Makes those of the lost chunks again that are pieces. Returns which could not be planned, and how many
    /// were made.
    pub(super) async fn rebuild_pieces(
        &self,
        lost: &[ChunkId],
        members: &[BenefactorRow],
    ) -> Result<(Vec<ChunkId>, u64), MetaError> {
        let pieces = self.shared.meta.lost_pieces(lost).await?;
        let (domains, now) = (self.domains(members), self.now());
        let plans: Vec<Rebuild> = pieces
            .into_iter()
            .filter_map(|piece| placement::rebuild(piece, members, &domains, now))
            .collect();
        let planned: Vec<ChunkId> = plans.iter().map(|plan| plan.lost.piece).collect();
        let mut orders = tokio::task::JoinSet::new();
        for plan in plans {
            let (service, members) = (self.clone(), members.to_vec());
            orders.spawn(async move { service.send_rebuild_order(&members, plan).await });
        }
        let mut made = 0;
        while let Some(done) = orders.join_next().await {
            made += u64::from(done.unwrap_or(Ok(false))?);
        }
        Ok((lost.iter().copied().filter(|chunk| !planned.contains(chunk)).collect(), made))
    }

    async fn send_rebuild_order(&self, members: &[BenefactorRow], plan: Rebuild) -> Result<bool, MetaError> {
        let Rebuild { lost, sources, target } = plan;
        let of =
            |(at, id): &(usize, BenefactorId)| Some((lost.of.pieces[*at].digest, address(members, *id)?));
        let sources: Vec<_> = sources.iter().filter_map(of).collect();
        let own = lost.of.pieces.iter().find(|piece| piece.chunk == lost.piece);
        let (Some(own), Some(connection)) = (own, self.connection_of(members, target)) else {
            return Ok(false);
        };
        let (counts, number, piece) = (lost.of.counts, own.number, own.digest);
        let order = RebuildOrder { chunk: lost.digest, counts, number, piece, at: target, sources };
        let asked = connection.request::<RebuildPiece>(&order, Bytes::new());
        match tokio::time::timeout(ORDER_TIME, asked).await {
            Ok(Ok(_)) => {
                self.shared.meta.insert_copies(&[lost.piece], target, self.now()).await?;
                Ok(true)
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "a lost piece could not be made again");
                Ok(false)
            }
            Err(_) => Ok(false),
        }
    }
}

fn address(members: &[BenefactorRow], id: BenefactorId) -> Option<BenefactorAddress> {
    let member = members.iter().find(|member| member.id == id)?;
    Some(BenefactorAddress { id, address: member.address.clone(), key: member.key })
}
