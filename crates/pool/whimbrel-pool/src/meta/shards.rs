//! Meta statements on chunks that are kept in pieces.
//!
//! A piece is a chunk of its own: with one required copy, counted, checked, adopted, drained and collected
//! like any other. The chunk that it belongs to keeps its row and its users, but requires no copies any
//! more, so its copies become surplus. When no version uses it, its pieces are given up with it.

use super::{
    chunks::{digest_of, insert_places},
    database::{BATCH, Meta, RANGES, list, numbers, ranges_as_part, rows, signed, unsigned},
    driver::{Tx, query},
};
use crate::{
    erasure::PieceCounts,
    meta::{MetaError, Result, reference_counts},
    protocol::{BenefactorId, ChunkId, CodedChunk, CodedPiece},
};
use std::collections::HashMap;
use whimbrel_core::Digest;

/// Chunks whose pieces are given up in one transaction.
const RELEASED: i64 = 1000;

/// Condition on a row of `chunk`: it is kept in pieces, and one of them has no copy that counts.
pub(super) const LACKS_PIECE: &str = "EXISTS (SELECT 1 FROM piece WHERE piece.chunk = chunk.id AND NOT EXISTS
    (SELECT 1 FROM place held JOIN benefactor holder ON holder.id = held.benefactor
     WHERE held.chunk = piece.piece AND holder.lost = 0))";

/// A piece that was stored at a benefactor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewPiece {
    pub(crate) digest: Digest,
    pub(crate) length: u32,
    pub(crate) stored: u32,
    pub(crate) place: BenefactorId,
}

/// A piece without a copy, with all pieces of its chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LostPiece {
    pub(crate) piece: ChunkId,
    pub(crate) of: CodedChunk,
    /// Digest of the chunk.
    pub(crate) digest: Digest,
}

impl Meta {
    /// Counts the pieces of a chunk, which are all stored, and requires no copies of it any more. False if
    /// the chunk is not used any more, or was cut into pieces by somebody else, or if the session has ended
    /// that began before they were stored: then nobody has retained them.
    pub(crate) async fn insert_pieces(
        &self,
        session: u64,
        chunk: ChunkId,
        counts: PieceCounts,
        pieces: &[NewPiece],
        now: i64,
    ) -> Result<bool> {
        let mut tx = self.write.begin().await?;
        let lives = query("UPDATE session SET seen = $2 WHERE id = $1")
            .bind(signed(session)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        if lives != 1 {
            return Ok(false);
        }
        let coded = query("UPDATE chunk SET coded = $2, want = 0 WHERE id = $1 AND coded = 0 AND refs > 0")
            .bind(signed(chunk)?)
            .bind(counts.code())
            .execute(&mut tx)
            .await?;
        if coded != 1 {
            return Ok(false);
        }
        let first = numbers(&mut tx, "chunk", pieces.len()).await?;
        let mut insert = query(format!(
            "INSERT INTO chunk (id, digest, length, stored, refs, freed, want, doomed, coded) VALUES {}
             ON CONFLICT (digest) DO UPDATE SET doomed = 0, refs = chunk.refs + 1, want = 1, coded = -1,
                 freed = EXCLUDED.freed RETURNING id, digest",
            rows(1, pieces.len(), 9)
        ));
        for (piece, id) in pieces.iter().zip(first..) {
            insert = insert
                .bind(signed(id)?)
                .bind(piece.digest.0.to_vec())
                .bind(i64::from(piece.length))
                .bind(i64::from(piece.stored))
                .bind(1_i64)
                .bind(now)
                .bind(1_i64)
                .bind(0_i64)
                .bind(-1_i64);
        }
        let mut ids = HashMap::new();
        for row in insert.fetch_all(&mut tx).await? {
            ids.insert(digest_of(row.try_get(1)?)?, unsigned(row.try_get(0)?));
        }
        let mut places = Vec::new();
        let mut relate =
            query(format!("INSERT INTO piece (chunk, number, piece) VALUES {}", rows(1, pieces.len(), 3)));
        for (piece, number) in pieces.iter().zip(0_i64..) {
            let id = *ids.get(&piece.digest).ok_or(MetaError::Damaged { what: "list of pieces" })?;
            relate = relate.bind(signed(chunk)?).bind(number).bind(signed(id)?);
            places.push((id, piece.place));
        }
        relate.execute(&mut tx).await?;
        insert_places(&mut tx, &places, now).await?;
        query("DELETE FROM repair WHERE chunk = $1").bind(signed(chunk)?).execute(&mut tx).await?;
        self.finish(tx).await?;
        Ok(true)
    }

    /// The pieces of those of the chunks that are kept in pieces, in order of their numbers.
    pub(crate) async fn coded_chunks(&self, chunks: &[ChunkId]) -> Result<Vec<CodedChunk>> {
        let mut found: Vec<CodedChunk> = Vec::new();
        for batch in chunks.chunks(BATCH) {
            let text = format!(
                "SELECT piece.chunk, whole.coded, piece.number, piece.piece, chunk.digest FROM piece
                 JOIN chunk ON chunk.id = piece.piece JOIN chunk whole ON whole.id = piece.chunk
                 WHERE piece.chunk IN ({}) ORDER BY piece.chunk, piece.number",
                list(1, batch.len())
            );
            let mut query = query(text);
            for chunk in batch {
                query = query.bind(signed(*chunk)?);
            }
            for row in query.fetch_all(&self.read).await? {
                let (chunk, code) = (unsigned(row.try_get(0)?), row.try_get::<i64>(1)?);
                let counts = PieceCounts::of_code(code).ok_or(MetaError::Damaged { what: "coding" })?;
                let piece = CodedPiece {
                    number: row.try_get::<i64>(2)? as u8,
                    chunk: unsigned(row.try_get(3)?),
                    digest: digest_of(row.try_get(4)?)?,
                    places: Vec::new(),
                };
                match found.last_mut().filter(|last| last.chunk == chunk) {
                    Some(last) => last.pieces.push(piece),
                    None => found.push(CodedChunk { chunk, counts, pieces: vec![piece] }),
                }
            }
        }
        let ids: Vec<ChunkId> = found.iter().flat_map(|one| &one.pieces).map(|piece| piece.chunk).collect();
        let located = self.locate(&ids).await?;
        let pieces = found.iter_mut().flat_map(|one| &mut one.pieces);
        pieces.zip(located).for_each(|(piece, located)| piece.places = located.places);
        Ok(found)
    }

    /// The chunk of each of these that is a piece.
    async fn wholes(&self, pieces: &[ChunkId]) -> Result<HashMap<ChunkId, ChunkId>> {
        let mut found = HashMap::new();
        for batch in pieces.chunks(BATCH) {
            let mut query =
                query(format!("SELECT piece, chunk FROM piece WHERE piece IN ({})", list(1, batch.len())));
            for piece in batch {
                query = query.bind(signed(*piece)?);
            }
            for row in query.fetch_all(&self.read).await? {
                found.insert(unsigned(row.try_get(0)?), unsigned(row.try_get(1)?));
            }
        }
        Ok(found)
    }

    /// Places of the other pieces of the same chunk, for each of these that is a piece.
    pub(crate) async fn sibling_places(
        &self,
        pieces: &[ChunkId],
    ) -> Result<HashMap<ChunkId, Vec<BenefactorId>>> {
        let wholes = self.wholes(pieces).await?;
        let chunks: Vec<ChunkId> = wholes.values().copied().collect();
        let coded = self.coded_chunks(&chunks).await?;
        let by_chunk: HashMap<ChunkId, &CodedChunk> = coded.iter().map(|one| (one.chunk, one)).collect();
        let siblings = |(piece, whole): (&ChunkId, &ChunkId)| {
            let others = by_chunk.get(whole)?.pieces.iter().filter(|other| other.chunk != *piece);
            Some((*piece, others.flat_map(|other| other.places.clone()).collect()))
        };
        Ok(wholes.iter().filter_map(siblings).collect())
    }

    /// Finds which of these chunks are pieces, with the other pieces.
    pub(crate) async fn lost_pieces(&self, pieces: &[ChunkId]) -> Result<Vec<LostPiece>> {
        let wholes = self.wholes(pieces).await?;
        let chunks: Vec<ChunkId> = wholes.values().copied().collect();
        let coded: HashMap<ChunkId, CodedChunk> =
            self.coded_chunks(&chunks).await?.into_iter().map(|one| (one.chunk, one)).collect();
        let digests: HashMap<ChunkId, Digest> = chunks
            .iter()
            .copied()
            .zip(self.locate(&chunks).await?.into_iter().map(|one| one.digest))
            .collect();
        let lost = |piece: &ChunkId| {
            let whole = wholes.get(piece)?;
            let (of, digest) = (coded.get(whole)?.clone(), *digests.get(whole)?);
            Some(LostPiece { piece: *piece, of, digest })
        };
        Ok(pieces.iter().filter_map(lost).collect())
    }

    /// Gives up the pieces of chunks that no version uses and no living session may rely on. Returns how many
    /// chunks these were.
    pub(crate) async fn release_coded(&self, now: i64) -> Result<u64> {
        let idle = query(
            "SELECT id, freed FROM chunk WHERE coded > 0 AND refs = 0
                 AND freed < COALESCE((SELECT MIN(started) FROM session), $1) LIMIT $2",
        )
        .bind(now)
        .bind(RELEASED)
        .fetch_all(&self.read)
        .await?;
        if idle.is_empty() {
            return Ok(0);
        }
        let (mut tx, mut released) = (self.write.begin().await?, 0);
        for row in idle {
            let (id, freed) = (row.try_get::<i64>(0)?, row.try_get::<i64>(1)?);
            released += u64::from(release(&mut tx, id, freed, now).await?);
        }
        self.finish(tx).await?;
        Ok(released)
    }
}

/// Gives up the pieces of one chunk, unless it is used again.
async fn release(tx: &mut Tx<'_>, chunk: i64, freed: i64, now: i64) -> Result<bool> {
    let taken = query("UPDATE chunk SET coded = 0 WHERE id = $1 AND coded > 0 AND refs = 0 AND freed <= $2")
        .bind(chunk)
        .bind(freed)
        .execute(&mut *tx)
        .await?;
    if taken == 0 {
        return Ok(false);
    }
    query(
        "UPDATE chunk SET refs = refs - 1, freed = $2 WHERE id IN (SELECT piece FROM piece WHERE chunk = $1)",
    )
    .bind(chunk)
    .bind(now)
    .execute(&mut *tx)
    .await?;
    for text in [
        "DELETE FROM repair WHERE chunk IN (SELECT piece FROM piece WHERE chunk = $1)",
        // Nobody lists a piece without a copy.
        "DELETE FROM chunk WHERE refs = 0 AND id IN (SELECT piece FROM piece WHERE chunk = $1)
             AND NOT EXISTS (SELECT 1 FROM place WHERE place.chunk = chunk.id)",
        "DELETE FROM piece WHERE chunk = $1",
        // With a copy left it is collected like any other.
        "DELETE FROM chunk WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM place WHERE chunk = $1)",
    ] {
        query(text).bind(chunk).execute(&mut *tx).await?;
    }
    Ok(true)
}

/// Refuses chunks, which are sorted, that have lost more pieces than may be lost. Lost pieces are queued for
/// repair, so few rows are read.
pub(super) async fn refuse_lost(tx: &mut Tx<'_>, chunks: &[ChunkId]) -> Result<()> {
    for ranges in reference_counts::runs(chunks).chunks(RANGES) {
        let text = format!(
            "{} SELECT piece.chunk FROM part CROSS JOIN repair CROSS JOIN piece CROSS JOIN chunk whole
             WHERE piece.piece = repair.chunk AND piece.chunk BETWEEN part.low AND part.high
                 AND whole.id = piece.chunk
                 AND NOT EXISTS (SELECT 1 FROM place JOIN benefactor ON benefactor.id = place.benefactor
                     WHERE place.chunk = repair.chunk AND benefactor.lost = 0)
             GROUP BY piece.chunk, whole.coded HAVING COUNT(*) > (whole.coded & 255) LIMIT 1",
            ranges_as_part(1, ranges.len())
        );
        let mut query = query(text);
        for (low, high) in ranges {
            query = query.bind(signed(*low)?).bind(signed(*high)?);
        }
        if query.fetch_optional(&mut *tx).await?.is_some() {
            return Err(MetaError::Gone);
        }
    }
    Ok(())
}
