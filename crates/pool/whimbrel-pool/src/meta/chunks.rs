//! Meta statements on chunks, their places, garbage collection and repair.

use super::{
    database::{BATCH, Meta, RANGES, list, numbers, ranges_as_part, rows, signed, unsigned},
    driver::{Tx, query},
    shards::LACKS_PIECE,
};
use crate::{
    chunk_map,
    meta::{
        ChunkStatus, GcDecision, MetaError, Quarantine, Result, UnderReplicated, decide, reference_counts,
    },
    protocol::{BenefactorId, ChunkId, Fault, Inventory, LocatedChunk, WrittenChunk, next_digest},
};
use std::collections::{HashMap, HashSet};
use whimbrel_core::Digest;

/// An inventory does not cover copies that arrived within this time before it was made, in milliseconds.
const SLACK: i64 = 60_000;
/// Counted copies in one page, more than a list of a benefactor has.
pub(crate) const PAGE: usize = 25_000;

pub(super) fn digest_of(bytes: Vec<u8>) -> Result<Digest> {
    bytes.try_into().map(Digest).map_err(|_| MetaError::Damaged { what: "digest" })
}

impl Meta {
    /// The number of each chunk with `copies` reachable copies, 0 for the others. A query protects an unused
    /// chunk from collection while a session lives that began before.
    pub(crate) async fn find_chunks(
        &self,
        digests: &[Digest],
        copies: u8,
        alive_since: i64,
        now: i64,
    ) -> Result<Vec<ChunkId>> {
        let mut found: HashMap<Vec<u8>, (u64, bool)> = HashMap::new();
        for batch in digests.chunks(BATCH) {
            let text = format!(
                "SELECT chunk.id, chunk.digest, chunk.refs FROM chunk
                 WHERE digest IN ({}) AND doomed = 0 AND ((coded = 0 AND $2 <=
                     (SELECT COUNT(*) FROM place JOIN benefactor ON benefactor.id = place.benefactor
                      WHERE place.chunk = chunk.id AND benefactor.seen >= $1 AND benefactor.lost = 0))
                 OR (coded > 0 AND NOT EXISTS (SELECT 1 FROM piece JOIN repair ON repair.chunk = piece.piece
                      WHERE piece.chunk = chunk.id)))",
                list(3, batch.len())
            );
            let mut query = query(text).bind(alive_since).bind(i64::from(copies));
            for digest in batch {
                query = query.bind(digest.0.to_vec());
            }
            for row in query.fetch_all(&self.read).await? {
                let used = row.try_get::<i64>(2)? > 0;
                found.insert(row.try_get(1)?, (unsigned(row.try_get(0)?), used));
            }
        }
        let unused: Vec<u64> = found.values().filter(|(_, used)| !used).map(|(id, _)| *id).collect();
        if !unused.is_empty() {
            let touched = self.touch(&unused, now).await?;
            found.retain(|_, (id, used)| *used || touched.contains(id));
        }
        let number = |digest: &Digest| found.get(digest.0.as_slice()).map_or(0, |(id, _)| *id);
        Ok(digests.iter().map(number).collect())
    }

    /// For each chunk of a version, in the order of its map: whether a session that began before can use it
    /// without a query. That needs all copies to be reachable, as far as known without looking at each chunk:
    /// a chunk that lacks a copy is queued for repair, and one at a silent benefactor is found by its places.
    pub(crate) async fn find_reusable(
        &self,
        version: u64,
        copies: u8,
        alive_since: i64,
    ) -> Result<Vec<bool>> {
        let row = query("SELECT map, copies FROM version WHERE id = $1")
            .bind(signed(version)?)
            .fetch_optional(&self.read)
            .await?;
        let row = row.ok_or(MetaError::NotFound)?;
        let pieces = chunk_map::decode(&row.try_get::<Vec<u8>>(0)?);
        let pieces = pieces.map_err(|_| MetaError::Damaged { what: "map" })?;
        if row.try_get::<i64>(1)? < i64::from(copies) {
            return Ok(vec![false; pieces.len()]);
        }
        let chunks = reference_counts::numbers(&pieces);
        let mut doubtful = self.within("repair", "", &chunks).await?;
        let silent = query("SELECT id FROM benefactor WHERE seen < $1 AND lost = 0")
            .bind(alive_since)
            .fetch_all(&self.read)
            .await?;
        for row in silent {
            let there = format!("AND benefactor = {}", row.try_get::<i64>(0)?);
            doubtful.extend(self.within("place", &there, &chunks).await?);
        }
        Ok(pieces.iter().map(|piece| !doubtful.contains(&piece.chunk)).collect())
    }

    /// The given chunks, which are sorted, that have a row in a table.
    async fn within(&self, table: &str, which: &str, chunks: &[ChunkId]) -> Result<HashSet<ChunkId>> {
        let mut found = HashSet::new();
        for ranges in reference_counts::runs(chunks).chunks(RANGES) {
            let text = format!(
                "{} SELECT chunk FROM part CROSS JOIN {table} WHERE chunk BETWEEN part.low AND part.high {which}",
                ranges_as_part(1, ranges.len())
            );
            let mut query = query(text);
            for (low, high) in ranges {
                query = query.bind(signed(*low)?).bind(signed(*high)?);
            }
            for row in query.fetch_all(&self.read).await? {
                found.insert(unsigned(row.try_get(0)?));
            }
        }
        Ok(found)
    }

    async fn touch(&self, chunks: &[ChunkId], now: i64) -> Result<Vec<ChunkId>> {
        let mut touched = Vec::new();
        for batch in chunks.chunks(BATCH) {
            let text = format!(
                "UPDATE chunk SET freed = $1 WHERE doomed = 0 AND id IN ({}) RETURNING id",
                list(2, batch.len())
            );
            let mut query = query(text).bind(now);
            for chunk in batch {
                query = query.bind(signed(*chunk)?);
            }
            for row in query.fetch_all(&self.write).await? {
                touched.push(unsigned(row.try_get(0)?));
            }
        }
        self.synced().await?;
        Ok(touched)
    }

    /// Registers the chunks that a session wrote and returns their numbers.
    pub(crate) async fn register_chunks(
        &self,
        session: u64,
        written: &[WrittenChunk],
        now: i64,
    ) -> Result<Vec<ChunkId>> {
        let mut tx = self.write.begin().await?;
        let renewed = query("UPDATE session SET seen = $2 WHERE id = $1")
            .bind(signed(session)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        if renewed != 1 {
            return Err(MetaError::SessionOver);
        }
        // A statement must not touch a row twice.
        let mut once: HashMap<Digest, &WrittenChunk> = HashMap::new();
        let mut order: Vec<&WrittenChunk> = Vec::new();
        for chunk in written {
            if once.insert(chunk.digest, chunk).is_none() {
                order.push(chunk);
            }
        }
        let mut ids = HashMap::new();
        for batch in order.chunks(BATCH) {
            register_batch(&mut tx, batch, now, &mut ids).await?;
        }
        let mut places = Vec::new();
        for chunk in written {
            let id = *ids.get(&chunk.digest).ok_or(MetaError::Damaged { what: "list of chunks" })?;
            places.extend(chunk.places.iter().map(|place| (id, *place)));
        }
        insert_places(&mut tx, &places, now).await?;
        self.finish(tx).await?;
        Ok(written.iter().map(|chunk| ids.get(&chunk.digest).copied().unwrap_or(0)).collect())
    }

    pub(crate) async fn locate(&self, chunks: &[ChunkId]) -> Result<Vec<LocatedChunk>> {
        let mut digests = HashMap::new();
        let mut places: HashMap<u64, Vec<BenefactorId>> = HashMap::new();
        for batch in chunks.chunks(BATCH) {
            let ids = list(1, batch.len());
            for (text, is_place) in [
                (format!("SELECT id, digest FROM chunk WHERE id IN ({ids})"), false),
                (
                    format!("SELECT chunk, benefactor FROM place WHERE chunk IN ({ids}) ORDER BY benefactor"),
                    true,
                ),
            ] {
                let mut query = query(text);
                for chunk in batch {
                    query = query.bind(signed(*chunk)?);
                }
                for row in query.fetch_all(&self.read).await? {
                    let id = unsigned(row.try_get(0)?);
                    if is_place {
                        places.entry(id).or_default().push(row.try_get::<i64>(1)? as u16);
                    } else {
                        digests.insert(id, digest_of(row.try_get(1)?)?);
                    }
                }
            }
        }
        let located = |id: &u64| LocatedChunk {
            digest: digests.get(id).copied().unwrap_or(Digest([0; 32])),
            places: places.get(id).cloned().unwrap_or_default(),
        };
        Ok(chunks.iter().map(located).collect())
    }

    /// Removes a copy that could not be read from the places and counts a fault of the benefactor.
    pub(crate) async fn record_fault(&self, fault: &Fault, now: i64) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let gone = query("DELETE FROM place WHERE chunk = $1 AND benefactor = $2")
            .bind(signed(fault.chunk)?)
            .bind(i64::from(fault.benefactor))
            .execute(&mut tx)
            .await?;
        if gone > 0 {
            query("UPDATE benefactor SET faults = faults + 1 WHERE id = $1")
                .bind(i64::from(fault.benefactor))
                .execute(&mut tx)
                .await?;
            queue(&mut tx, &[fault.chunk], now).await?;
        }
        self.finish(tx).await
    }

    /// Removes copies that their benefactor found damaged from the places, and counts a fault for each.
    pub(crate) async fn record_damage(
        &self,
        benefactor: BenefactorId,
        damaged: &[Digest],
        now: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let mut chunks = Vec::new();
        for digest in damaged {
            let found = query(
                "DELETE FROM place WHERE benefactor = $2 AND chunk IN (SELECT id FROM chunk WHERE digest = $1)
                 RETURNING chunk",
            )
            .bind(digest.0.to_vec())
            .bind(i64::from(benefactor))
            .fetch_optional(&mut tx)
            .await?;
            if let Some(row) = found {
                chunks.push(unsigned(row.try_get(0)?));
            }
        }
        query("UPDATE benefactor SET faults = faults + $2 WHERE id = $1")
            .bind(i64::from(benefactor))
            .bind(chunks.len() as i64)
            .execute(&mut tx)
            .await?;
        queue(&mut tx, &chunks, now).await?;
        self.finish(tx).await
    }

    /// Decides which of the listed chunks can be deleted, and removes counted copies that the list lacks.
    pub(crate) async fn collect_garbage(
        &self,
        benefactor: BenefactorId,
        inventory: &Inventory,
        listed: &[(Digest, u32)],
        now: i64,
        quarantine: Quarantine,
    ) -> Result<Vec<bool>> {
        let mut tx = self.write.begin().await?;
        let row = query("SELECT MIN(started) FROM session").fetch_one(&mut tx).await?;
        let oldest: Option<i64> = row.try_get(0)?;
        let listed_at = now - i64::from(inventory.age) * 1000 - SLACK;
        let mut verdicts = vec![GcDecision::Retain; listed.len()];
        let mut range = (Digest(inventory.from), Digest(inventory.to));
        loop {
            // A benefactor that lost its disk lists nothing, so its counted copies are read in pages.
            let mut page = counted(&mut tx, benefactor, range).await?;
            let more = page.len() == PAGE;
            let last = page.keys().max().copied().filter(|_| more).unwrap_or(range.1);
            let here = |(_, (digest, _)): &(usize, &(Digest, u32))| *digest >= range.0 && *digest <= last;
            let listed: Vec<_> = listed.iter().enumerate().filter(here).collect();
            decide_page(&mut tx, benefactor, &listed, &mut page, (now, oldest, quarantine), &mut verdicts)
                .await?;
            let gone = page.values().filter(|(.., since)| *since < listed_at).map(|(id, ..)| *id);
            remove_places(&mut tx, benefactor, gone.collect(), now).await?;
            match next_digest(last).filter(|_| more) {
                Some(next) => range.0 = next,
                None => break,
            }
        }
        self.finish(tx).await?;
        Ok(verdicts.into_iter().map(|verdict| verdict == GcDecision::Delete).collect())
    }

    /// Chunks that may lack copies, those that wait longest first.
    pub(crate) async fn under_replicated(&self, most: u32) -> Result<Vec<UnderReplicated>> {
        let found = query(
            "SELECT chunk.id, chunk.digest, chunk.length, chunk.want, chunk.refs, repair.since
             FROM repair JOIN chunk ON chunk.id = repair.chunk ORDER BY repair.since LIMIT $1",
        )
        .bind(i64::from(most))
        .fetch_all(&self.read)
        .await?;
        let mut needy = Vec::with_capacity(found.len());
        for row in found {
            needy.push(UnderReplicated {
                chunk: unsigned(row.try_get(0)?),
                digest: digest_of(row.try_get(1)?)?,
                length: unsigned(row.try_get(2)?),
                want: row.try_get::<i64>(3)? as u8,
                used: row.try_get::<i64>(4)? > 0,
                places: Vec::new(),
                apart_from: Vec::new(),
                since: row.try_get(5)?,
            });
        }
        let ids: Vec<ChunkId> = needy.iter().map(|one| one.chunk).collect();
        let located = self.locate(&ids).await?;
        needy.iter_mut().zip(located).for_each(|(needy, located)| needy.places = located.places);
        let mut siblings = self.sibling_places(&ids).await?;
        needy.iter_mut().for_each(|one| one.apart_from = siblings.remove(&one.chunk).unwrap_or_default());
        Ok(needy)
    }

    /// Commits copies that were made by a shadow map.
    pub(crate) async fn insert_copies(
        &self,
        chunks: &[ChunkId],
        benefactor: BenefactorId,
        now: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let places: Vec<_> = chunks.iter().map(|chunk| (*chunk, benefactor)).collect();
        insert_places(&mut tx, &places, now).await?;
        self.finish(tx).await
    }

    /// Chunks in use of which one benefactor has a copy and the other has none.
    pub(crate) async fn movable(
        &self,
        from: BenefactorId,
        to: BenefactorId,
        most: u32,
    ) -> Result<Vec<(ChunkId, Digest)>> {
        let rows = query(
            "SELECT chunk.id, chunk.digest FROM place JOIN chunk ON chunk.id = place.chunk
             WHERE place.benefactor = $1 AND chunk.refs > 0 AND NOT EXISTS
                 (SELECT 1 FROM place other WHERE other.chunk = chunk.id AND other.benefactor = $2)
             AND NOT EXISTS
                 (SELECT 1 FROM piece JOIN piece sibling ON sibling.chunk = piece.chunk
                  JOIN place other ON other.chunk = sibling.piece
                  WHERE piece.piece = chunk.id AND other.benefactor = $2) LIMIT $3",
        )
        .bind(i64::from(from))
        .bind(i64::from(to))
        .bind(i64::from(most))
        .fetch_all(&self.read)
        .await?;
        rows.iter().map(|row| Ok((unsigned(row.try_get(0)?), digest_of(row.try_get(1)?)?))).collect()
    }

    /// Replaces the place of each chunk by another. A chunk that lost its old copy meanwhile loses no other.
    pub(crate) async fn replace_places(
        &self,
        chunks: &[ChunkId],
        from: BenefactorId,
        to: BenefactorId,
        now: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let places: Vec<_> = chunks.iter().map(|chunk| (*chunk, to)).collect();
        insert_places(&mut tx, &places, now).await?;
        remove_places(&mut tx, from, chunks.to_vec(), now).await?;
        self.finish(tx).await
    }

    /// Removes chunks from the repair queue, unless they were queued again after they were read.
    pub(crate) async fn remove_from_repair(&self, chunks: &[(ChunkId, i64)]) -> Result<()> {
        let mut tx = self.write.begin().await?;
        for (chunk, since) in chunks {
            query("DELETE FROM repair WHERE chunk = $1 AND since = $2")
                .bind(signed(*chunk)?)
                .bind(*since)
                .execute(&mut tx)
                .await?;
        }
        self.finish(tx).await
    }

    /// Moves chunks to the end of the repair queue.
    pub(crate) async fn postpone(&self, chunks: &[ChunkId], now: i64) -> Result<()> {
        for batch in chunks.chunks(BATCH) {
            let text = format!("UPDATE repair SET since = {now} WHERE chunk IN ({})", list(1, batch.len()));
            let mut query = query(text);
            for chunk in batch {
                query = query.bind(signed(*chunk)?);
            }
            query.execute(&self.write).await?;
        }
        Ok(())
    }
}

async fn register_batch(
    tx: &mut Tx<'_>,
    batch: &[&WrittenChunk],
    now: i64,
    ids: &mut HashMap<Digest, ChunkId>,
) -> Result<()> {
    let first = numbers(tx, "chunk", batch.len()).await?;
    let text = format!(
        "INSERT INTO chunk (id, digest, length, stored, refs, freed, want, doomed) VALUES {}
         ON CONFLICT (digest) DO UPDATE SET doomed = 0, freed = EXCLUDED.freed RETURNING id, digest",
        rows(1, batch.len(), 8)
    );
    let mut query = query(text);
    for (at, chunk) in batch.iter().enumerate() {
        query = query
            .bind(signed(first + at as u64)?)
            .bind(chunk.digest.0.to_vec())
            .bind(i64::from(chunk.length))
            .bind(i64::from(chunk.stored))
            .bind(0_i64)
            .bind(now)
            .bind(1_i64)
            .bind(0_i64);
    }
    for row in query.fetch_all(&mut *tx).await? {
        ids.insert(digest_of(row.try_get(1)?)?, unsigned(row.try_get(0)?));
    }
    Ok(())
}

pub(super) async fn insert_places(
    tx: &mut Tx<'_>,
    places: &[(ChunkId, BenefactorId)],
    now: i64,
) -> Result<()> {
    for batch in places.chunks(BATCH) {
        let text = format!(
            "INSERT INTO place (chunk, benefactor, since) VALUES {} ON CONFLICT (chunk, benefactor) DO NOTHING",
            rows(1, batch.len(), 3)
        );
        let mut query = query(text);
        for (chunk, benefactor) in batch {
            query = query.bind(signed(*chunk)?).bind(i64::from(*benefactor)).bind(now);
        }
        query.execute(&mut *tx).await?;
    }
    Ok(())
}

/// Queues chunks in use for repair. If one is being looked at, its changed time makes repair look again.
pub(crate) async fn queue(tx: &mut Tx<'_>, chunks: &[ChunkId], now: i64) -> Result<()> {
    for batch in chunks.chunks(BATCH) {
        let text = format!(
            "INSERT INTO repair (chunk, since) SELECT id, CAST($1 AS BIGINT) FROM chunk
             WHERE refs > 0 AND id IN ({}) ON CONFLICT (chunk) DO UPDATE SET since = repair.since + 1",
            list(2, batch.len())
        );
        let mut query = query(text).bind(now);
        for chunk in batch {
            query = query.bind(signed(*chunk)?);
        }
        query.execute(&mut *tx).await?;
    }
    Ok(())
}

type Counted = HashMap<Digest, (ChunkId, bool, i64, i64)>;

/// Decides on the listed copies of a page and removes them from the page.
async fn decide_page(
    tx: &mut Tx<'_>,
    benefactor: BenefactorId,
    listed: &[(usize, &(Digest, u32))],
    page: &mut Counted,
    (now, oldest, quarantine): (i64, Option<i64>, Quarantine),
    verdicts: &mut [GcDecision],
) -> Result<()> {
    let mut others = Vec::new();
    for (at, (digest, age)) in listed {
        let age = i64::from(*age) * 1000;
        let Some((id, used, freed, _)) = page.remove(digest) else {
            others.push((*at, *digest, age));
            continue;
        };
        verdicts[*at] = decide(ChunkStatus::Counted { used, freed }, age, (now, oldest), quarantine);
        if verdicts[*at] == GcDecision::Delete && !give_up_copy(tx, id, benefactor, freed).await? {
            verdicts[*at] = GcDecision::Retain;
        }
    }
    for batch in others.chunks(BATCH) {
        decide_uncounted(tx, benefactor, batch, (now, oldest, quarantine), verdicts).await?;
    }
    Ok(())
}

/// Removes copies that do not exist any more, and queues their chunks.
async fn remove_places(
    tx: &mut Tx<'_>,
    benefactor: BenefactorId,
    chunks: Vec<ChunkId>,
    now: i64,
) -> Result<()> {
    for id in &chunks {
        query("DELETE FROM place WHERE chunk = $1 AND benefactor = $2")
            .bind(signed(*id)?)
            .bind(i64::from(benefactor))
            .execute(&mut *tx)
            .await?;
    }
    queue(tx, &chunks, now).await
}

/// The first [`PAGE`] counted copies of a benefactor in a range: number, whether used, when freed, and when
/// the copy was counted.
///
/// `CROSS JOIN` fixes the join order in SQLite (and means nothing elsewhere): digests first, instead of all
/// chunks of the benefactor.
async fn counted(tx: &mut Tx<'_>, benefactor: BenefactorId, range: (Digest, Digest)) -> Result<Counted> {
    let found = query(
        "SELECT chunk.id, chunk.digest, chunk.refs, chunk.freed, place.since
         FROM chunk CROSS JOIN place
         WHERE place.chunk = chunk.id AND place.benefactor = $1 AND chunk.digest >= $2 AND chunk.digest <= $3
         ORDER BY chunk.digest LIMIT $4",
    )
    .bind(i64::from(benefactor))
    .bind(range.0.0.to_vec())
    .bind(range.1.0.to_vec())
    .bind(PAGE as i64)
    .fetch_all(&mut *tx)
    .await?;
    let mut counted = HashMap::with_capacity(found.len());
    for row in found {
        let (refs, freed, since) = (row.try_get::<i64>(2)?, row.try_get(3)?, row.try_get(4)?);
        counted.insert(digest_of(row.try_get(1)?)?, (unsigned(row.try_get(0)?), refs > 0, freed, since));
    }
    Ok(counted)
}

/// Gives up a copy, unless the chunk is used again. With the last one the chunk is deleted, but not before
/// its pieces are given up: its row is the only way to them.
async fn give_up_copy(tx: &mut Tx<'_>, chunk: ChunkId, benefactor: BenefactorId, freed: i64) -> Result<bool> {
    let doomed = query("UPDATE chunk SET doomed = 1 WHERE id = $1 AND refs = 0 AND freed <= $2")
        .bind(signed(chunk)?)
        .bind(freed)
        .execute(&mut *tx)
        .await?;
    if doomed == 0 {
        return Ok(false);
    }
    query("DELETE FROM place WHERE chunk = $1 AND benefactor = $2")
        .bind(signed(chunk)?)
        .bind(i64::from(benefactor))
        .execute(&mut *tx)
        .await?;
    let unless = "coded <= 0 AND NOT EXISTS (SELECT 1 FROM place WHERE chunk = $1)";
    query(format!("DELETE FROM chunk WHERE id = $1 AND {unless}"))
        .bind(signed(chunk)?)
        .execute(&mut *tx)
        .await?;
    Ok(true)
}

/// Decides on uncounted copies: adopted if the chunk lacks copies, garbage if no session can rely on them.
async fn decide_uncounted(
    tx: &mut Tx<'_>,
    benefactor: BenefactorId,
    batch: &[(usize, Digest, i64)],
    (now, oldest, quarantine): (i64, Option<i64>, Quarantine),
    verdicts: &mut [GcDecision],
) -> Result<()> {
    let text = format!(
        "SELECT id, digest, refs, want, (SELECT COUNT(*) FROM place WHERE place.chunk = chunk.id),
             CAST(CASE WHEN coded > 0 AND {LACKS_PIECE} THEN 1 ELSE 0 END AS BIGINT)
         FROM chunk WHERE digest IN ({})",
        list(1, batch.len())
    );
    let mut query = query(text);
    for (_, digest, _) in batch {
        query = query.bind(digest.0.to_vec());
    }
    let mut enrolled = HashMap::new();
    for row in query.fetch_all(&mut *tx).await? {
        let (refs, want, copies): (i64, i64, i64) = (row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
        // A chunk that lacks pieces may need any copy of it that turns up.
        let lacking = copies < want || row.try_get::<i64>(5)? != 0;
        enrolled.insert(digest_of(row.try_get(1)?)?, (unsigned(row.try_get(0)?), refs > 0, lacking));
    }
    let mut adopted = Vec::new();
    for (at, digest, age) in batch {
        let row = enrolled.get(digest);
        let knowledge = row.map_or(ChunkStatus::Unknown, |(_, used, lacking)| ChunkStatus::Extra {
            used: *used,
            lacking: *lacking,
        });
        verdicts[*at] = decide(knowledge, *age, (now, oldest), quarantine);
        if let (GcDecision::Adopt, Some((id, ..))) = (verdicts[*at], row) {
            adopted.push((*id, benefactor));
        }
    }
    insert_places(tx, &adopted, now).await
}
