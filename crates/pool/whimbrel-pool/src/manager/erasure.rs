//! Chores of chunks in pieces: cuts what is old enough, makes lost pieces again, gives up what nobody uses.
//!
//! A benefactor that has a copy of a chunk makes its pieces and stores them. Only when all of them are
//! durable does the database require no copies any more. A session lives meanwhile, as that of a writer. A
//! lost piece is made by the benefactor that will have it, of as many others as the chunk has pieces of data.
//! While clients write, less is done at once.
//!
//! A round looks at the versions that were committed since the last one and remembers when each is old
//! enough.

use super::{
    ManagerService,
    placement::{self, BenefactorState, Rebuild},
};
use crate::{
    erasure::{Coding, PieceCounts},
    meta::{BenefactorRow, ChunkToCode, MetaError, NewPiece, Quarantine},
    protocol::{
        BenefactorAddress, BenefactorId, ChunkId, CodeChunks, CodingOrder, NodeId, RebuildOrder,
        RebuildPiece, put_digests,
    },
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Chunks of one order, without and with open write sessions.
const ORDER: usize = 64;
const ORDER_DURING_WRITES: usize = 8;
/// Timeout of an order; its chunks are tried again later.
const ORDER_TIME: Duration = Duration::from_secs(60);
/// Time after which a version is tried again of which nothing could be cut.
const PAUSE: Duration = Duration::from_secs(60);
/// Time after which all versions are looked at: another manager may have changed a coding or committed out of
/// order, and a file may have been moved.
const ALL_EVERY: Duration = Duration::from_secs(3600);
/// When the version that is being cut is due: before all others.
const AT_ONCE: i64 = i64::MIN;
/// Versions that are looked at in one statement, and at most in one round.
const LOOKED: usize = 1000;
const LOOKED_MOST: usize = 20 * LOOKED;
/// Versions of which nothing could be cut in one round.
const FAILED_MOST: usize = 8;

/// What the rounds so far have found.
#[derive(Debug, Default)]
pub(super) struct CodingRounds {
    /// When the look at all versions began; none if it must begin.
    all: Option<Instant>,
    /// Versions with higher numbers were not looked at since.
    seen: u64,
    /// Versions that are to be cut with their files, by the time from which they are old enough.
    due: BTreeMap<(i64, u64), NodeId>,
    /// The version that is being cut, and the part of its map that comes next.
    part: Option<(u64, usize)>,
}

impl CodingRounds {
    /// Starts the look at all versions, if it must begin; returns after which version to look.
    fn begin(&mut self) -> u64 {
        if self.all.is_none_or(|at| at.elapsed() >= ALL_EVERY) {
            *self = Self { all: Some(Instant::now()), ..Self::default() };
        }
        self.seen
    }

    /// The next version that is old enough, with its file and the part of its map to continue with.
    fn next(&mut self, now: i64) -> Option<(u64, NodeId, usize)> {
        let first = self.due.first_entry().filter(|first| first.key().0 <= now)?;
        let ((_, version), file) = first.remove_entry();
        let part = self.part.filter(|(of, _)| *of == version).map_or(0, |(_, part)| part);
        Some((version, file, part))
    }
}

impl ManagerService {
    /// Makes the next round look at all versions.
    pub(super) fn coding_changed(&self) {
        lock(&self.shared.coding_rounds).all = None;
    }

    /// Runs a round: gives up the pieces of chunks that nobody uses, and cuts some that are old enough.
    /// Returns how many were cut.
    pub(super) async fn code_old(&self) -> Result<u64, MetaError> {
        self.shared.meta.release_coded(self.now()).await?;
        if self.quarantine() == Quarantine::On || !self.shared.meta.has_codings().await? {
            return Ok(0);
        }
        self.look_for_uncoded().await?;
        let most = if self.shared.meta.sessions().await? > 0 { ORDER_DURING_WRITES } else { ORDER };
        self.code_some(most).await
    }

    /// Looks at versions that are new since the last round; returns how many these were.
    async fn look_for_uncoded(&self) -> Result<usize, MetaError> {
        let (meta, mut looked) = (&self.shared.meta, 0);
        let mut of_folders: HashMap<NodeId, Option<Coding>> = HashMap::new();
        let mut seen = lock(&self.shared.coding_rounds).begin();
        while looked < LOOKED_MOST {
            let found = meta.uncoded_versions(seen, LOOKED).await?;
            looked += found.len();
            let mut due = Vec::new();
            for one in &found {
                let coding = match (one.own, of_folders.get(&one.folder)) {
                    (Some(own), _) => Some(own),
                    (None, Some(known)) => *known,
                    (None, None) => {
                        let coding = self.coding_of(one.folder).await?;
                        of_folders.insert(one.folder, coding);
                        coding
                    }
                };
                due.extend(coding.map(|coding| ((coding.due(one.created), one.version), one.file)));
            }
            seen = found.last().map_or(seen, |last| last.version);
            let mut rounds = lock(&self.shared.coding_rounds);
            rounds.seen = seen;
            rounds.due.extend(due);
            if found.len() < LOOKED {
                break;
            }
        }
        Ok(looked)
    }

    /// The coding that applies to a file or folder; none if it is gone.
    async fn coding_of(&self, node: NodeId) -> Result<Option<Coding>, MetaError> {
        match self.shared.meta.coding(node).await {
            Err(MetaError::NotFound) => Ok(None),
            coding => Ok(coding?.1),
        }
    }

    /// Cuts up to `most` chunks of the first version that is old enough and has any.
    async fn code_some(&self, most: usize) -> Result<u64, MetaError> {
        let meta = &self.shared.meta;
        let mut failed = 0;
        while failed < FAILED_MOST {
            let now = self.now();
            let next = lock(&self.shared.coding_rounds).next(now);
            let Some((version, file, part)) = next else { break };
            let again = |at: i64, part: Option<usize>| {
                let mut rounds = lock(&self.shared.coding_rounds);
                rounds.due.insert((at, version), file);
                rounds.part = part.map(|part| (version, part));
            };
            // The coding may have been removed since; another one is found by the next look.
            let Some(Coding { pieces: counts, .. }) = self.coding_of(file).await? else { continue };
            let (chunks, next) = match meta.chunks_to_code(version, part, most).await {
                // The version was removed meanwhile.
                Err(MetaError::NotFound) => continue,
                chunks => chunks.inspect_err(|_| again(now, None))?,
            };
            if chunks.is_empty() && part == 0 {
                meta.mark_coded(version).await?;
            } else if chunks.is_empty() {
                // Some may have failed: it is looked at once more from the start.
                again(now, None);
            } else {
                let coded = self.code(chunks, counts).await.inspect_err(|_| again(now, None))?;
                if coded > 0 {
                    again(AT_ONCE, Some(next));
                    return Ok(coded);
                }
                failed += 1;
                again(now.saturating_add(PAUSE.as_millis() as i64), None);
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
        // Nobody knows the pieces before they are counted: without a session that began before they were
        // stored, the next inventories of those that have them would give them up.
        let session = self.shared.meta.start_session(&[], now).await?;
        let mut coded = Ok(0);
        for (source, chunks) in by_source {
            let of_source = self.send_coding_order(session, &members, source, &targets, counts, chunks).await;
            coded = coded.and_then(|coded| Ok(coded + of_source?));
        }
        self.shared.meta.end_session(session).await?;
        coded
    }

    async fn send_coding_order(
        &self,
        session: u64,
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
            let (meta, now) = (&self.shared.meta, self.now());
            coded += u64::from(meta.insert_pieces(session, chunk.chunk, counts, &pieces, now).await?);
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
        let mut plans: Vec<Rebuild> = Vec::new();
        for piece in pieces {
            let same = plans.iter().filter(|plan| plan.lost.of.chunk == piece.of.chunk);
            let taken: Vec<BenefactorId> = same.map(|plan| plan.target).collect();
            plans.extend(placement::rebuild(piece, &taken, members, &domains, now));
        }
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

#[cfg(test)]
mod tests;
