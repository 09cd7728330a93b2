//! Meta statements on versions: commit, chains, removal.

use super::{
    database::{Meta, RANGES, numbers, ranges_as_part, signed, unsigned},
    driver::{Row, Tx, query},
    files, pins,
};
use crate::{
    chunk_map::{self, ChunkRef},
    meta::{MetaError, PoolTotals, Result, reference_counts},
    protocol::{ChunkId, Commit, Node, NodeId, VersionInfo},
};
use std::collections::HashMap;

impl Meta {
    /// Commits a file: makes what a session wrote visible, all of it or nothing. If the answer was lost and
    /// the same commit is repeated, this returns the current file without a change, because others may have
    /// written since. `seal` is stored with the map.
    pub(crate) async fn commit(
        &self,
        commit: &Commit,
        pieces: &[ChunkRef],
        seal: &[u8],
        now: i64,
    ) -> Result<Node> {
        let mut tx = self.write.begin().await?;
        if let Some(node) = committed(&mut tx, commit).await? {
            let node = files::get(&mut tx, node).await?.ok_or(MetaError::NotFound)?;
            drop(tx);
            // The first call may have ended before its sync.
            self.synced().await?;
            return Ok(node);
        }
        let renewed = query("UPDATE session SET seen = $2 WHERE id = $1")
            .bind(signed(commit.session)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        if renewed != 1 {
            return Err(MetaError::SessionOver);
        }
        let node = target(&mut tx, commit, now).await?;
        let older = if commit.base > 0 { commit.base } else { node.version };
        let base = claim_predecessor(&mut tx, older, commit.copies).await?;
        count_chunks(&mut tx, commit, pieces, base.as_deref().unwrap_or_default(), now).await?;
        let id = numbers(&mut tx, "version", 1).await?;
        let older = base.map_or(0, |_| older);
        query(
            "INSERT INTO version (id, node, number, size, created, chunks, sent, pinned, map, modified, older, newer, copies)
             SELECT $1, $2, COALESCE(MAX(number), 0) + 1, CAST($3 AS BIGINT), CAST($4 AS BIGINT), CAST($5 AS BIGINT),
                 CAST($6 AS BIGINT), 0, $7, CAST($8 AS BIGINT), CAST($9 AS BIGINT), 0, CAST($10 AS BIGINT)
             FROM version WHERE node = $2",
        )
        .bind(signed(id)?)
        .bind(signed(node.id)?)
        .bind(signed(commit.size)?)
        .bind(now * 1_000_000)
        .bind(pieces.len() as i64)
        .bind(signed(commit.sent)?)
        .bind(chunk_map::encode_sealed(pieces, seal))
        .bind(commit.modified)
        .bind(signed(older)?)
        .bind(i64::from(commit.copies.max(1)))
        .execute(&mut tx)
        .await?;
        if older > 0 {
            set_neighbour(&mut tx, "newer", older, id).await?;
        }
        query("UPDATE node SET size = $2, modified = $3, changed = $4, version = $5 WHERE id = $1")
            .bind(signed(node.id)?)
            .bind(signed(commit.size)?)
            .bind(commit.modified)
            .bind(now * 1_000_000)
            .bind(signed(id)?)
            .execute(&mut tx)
            .await?;
        query("INSERT INTO committed (session, number, node, at) VALUES ($1, $2, $3, $4)")
            .bind(signed(commit.session)?)
            .bind(i64::from(commit.number))
            .bind(signed(node.id)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        let node = files::get(&mut tx, node.id).await?.ok_or(MetaError::NotFound)?;
        self.finish(tx).await?;
        Ok(node)
    }

    pub(crate) async fn versions(&self, node: NodeId) -> Result<Vec<VersionInfo>> {
        let rows = query(
            "SELECT id, number, size, created, chunks, sent, pinned, modified FROM version WHERE node = $1 ORDER BY number DESC",
        )
        .bind(signed(node)?)
        .fetch_all(&self.read)
        .await?;
        let mut holders = self.holders(Some(node)).await?;
        rows.iter().map(|row| info(row, 0, &mut holders)).collect()
    }

    pub(crate) async fn map(&self, version: u64) -> Result<Vec<u8>> {
        let row = query("SELECT map FROM version WHERE id = $1")
            .bind(signed(version)?)
            .fetch_optional(&self.read)
            .await?;
        row.ok_or(MetaError::NotFound)?.try_get(0)
    }

    /// Removes a version. If `even_current` is set, the current version is removed with its file.
    pub(crate) async fn drop_version(
        &self,
        node: NodeId,
        number: u32,
        even_current: bool,
        now: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let file = files::get(&mut tx, node).await?.ok_or(MetaError::NotFound)?;
        let row = query("SELECT id FROM version WHERE node = $1 AND number = $2")
            .bind(signed(node)?)
            .bind(i64::from(number))
            .fetch_optional(&mut tx)
            .await?;
        let id = unsigned(row.ok_or(MetaError::NotFound)?.try_get(0)?);
        if id == file.version {
            if !even_current {
                return Err(MetaError::Invalid("the current version is removed only with its file"));
            }
            pins::refuse_pinned(&mut tx, node, None, now).await?;
            drop_all(&mut tx, node, now).await?;
            query("DELETE FROM node WHERE id = $1").bind(signed(node)?).execute(&mut tx).await?;
        } else {
            pins::refuse_pinned(&mut tx, node, Some(number), now).await?;
            release(&mut tx, id, now).await?;
            pins::delete_orphaned_pins(&mut tx).await?;
        }
        self.finish(tx).await
    }

    pub(crate) async fn pin(&self, node: NodeId, number: u32, pinned: bool) -> Result<()> {
        let done = query("UPDATE version SET pinned = $3 WHERE node = $1 AND number = $2")
            .bind(signed(node)?)
            .bind(i64::from(number))
            .bind(i64::from(pinned))
            .execute(&self.write)
            .await?;
        if done == 1 { self.synced().await } else { Err(MetaError::NotFound) }
    }

    pub(crate) async fn totals(&self) -> Result<PoolTotals> {
        let mut numbers = Vec::new();
        for text in [
            "SELECT COUNT(*) FROM node WHERE folder = 0",
            "SELECT COUNT(*) FROM version",
            "SELECT CAST(COALESCE(SUM(size), 0) AS BIGINT) FROM version",
            "SELECT CAST(COALESCE(SUM(length), 0) AS BIGINT) FROM chunk WHERE refs > 0",
            "SELECT COUNT(*) FROM chunk WHERE refs > 0",
            "SELECT COUNT(*) FROM repair",
            "SELECT COUNT(DISTINCT session) FROM reservation",
            "SELECT COUNT(*) FROM version WHERE pinned <> 0 OR id IN (SELECT version FROM held)",
        ] {
            numbers.push(unsigned(query(text).fetch_one(&self.read).await?.try_get(0)?));
        }
        let [files, versions, logical, unique, chunks, repair, sessions, pinned] = numbers[..] else {
            return Err(MetaError::Damaged { what: "sums" });
        };
        Ok(PoolTotals { files, versions, logical, unique, chunks, repair, sessions, pinned })
    }
}

/// The file of an earlier commit with the same session and number.
async fn committed(tx: &mut Tx<'_>, commit: &Commit) -> Result<Option<NodeId>> {
    let row = query("SELECT node FROM committed WHERE session = $1 AND number = $2")
        .bind(signed(commit.session)?)
        .bind(i64::from(commit.number))
        .fetch_optional(&mut *tx)
        .await?;
    row.map(|row| Ok(unsigned(row.try_get(0)?))).transpose()
}

/// The file to commit to: the node, else the file with the name by now, else a new one.
async fn target(tx: &mut Tx<'_>, commit: &Commit, now: i64) -> Result<Node> {
    let known = match commit.node {
        Some(id) => files::get(tx, id).await?,
        None => None,
    };
    let found = match known {
        Some(node) => Some(node),
        None => files::find(tx, commit.make.parent, &commit.make.name).await?,
    };
    match found {
        Some(node) if node.folder => Err(MetaError::IsAFolder),
        Some(node) => Ok(node),
        None => files::make_in(tx, &commit.make, now).await,
    }
}

/// Makes a version the predecessor in a chain and returns its map. None if the version does not exist, has a
/// successor, or requires fewer copies.
async fn claim_predecessor(tx: &mut Tx<'_>, version: u64, copies: u8) -> Result<Option<Vec<ChunkRef>>> {
    let row =
        query("UPDATE version SET newer = -1 WHERE id = $1 AND newer = 0 AND copies >= $2 RETURNING map")
            .bind(signed(version)?)
            .bind(i64::from(copies.max(1)))
            .fetch_optional(&mut *tx)
            .await?;
    row.map(|row| pieces_of(&row.try_get::<Vec<u8>>(0)?)).transpose()
}

fn pieces_of(map: &[u8]) -> Result<Vec<ChunkRef>> {
    chunk_map::decode(map).map_err(|_| MetaError::Damaged { what: "map" })
}

/// Sets the neighbour of a version in its chain, on one side.
async fn set_neighbour(tx: &mut Tx<'_>, side: &str, version: u64, to: u64) -> Result<()> {
    query(format!("UPDATE version SET {side} = $2 WHERE id = $1"))
        .bind(signed(version)?)
        .bind(signed(to)?)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

/// Counts the version as a user of its chunks, except for those that the previous version in the chain has.
/// Refuses a map with missing chunks.
async fn count_chunks(
    tx: &mut Tx<'_>,
    commit: &Commit,
    pieces: &[ChunkRef],
    base: &[ChunkRef],
    now: i64,
) -> Result<()> {
    if pieces.iter().map(|piece| u64::from(piece.length)).sum::<u64>() != commit.size {
        return Err(MetaError::Invalid("the map and the file have different lengths"));
    }
    let mut lengths: HashMap<u64, u32> = HashMap::with_capacity(pieces.len());
    for piece in pieces {
        if *lengths.entry(piece.chunk).or_insert(piece.length) != piece.length {
            return Err(MetaError::Invalid("a chunk has two lengths"));
        }
    }
    if base.iter().any(|piece| lengths.get(&piece.chunk).is_some_and(|length| *length != piece.length)) {
        return Err(MetaError::Invalid("a chunk of the map has another length than before"));
    }
    if tx.is_postgres() {
        // No benefactor leaves with a copy that is counted here; SQLite has one writer.
        query("SELECT id FROM benefactor FOR KEY SHARE").fetch_all(&mut *tx).await?;
    }
    let (new, old) = (reference_counts::numbers(pieces), reference_counts::numbers(base));
    refuse_lost(tx, &reference_counts::both(&new, &old)).await?;
    for (first, last) in reference_counts::runs(&reference_counts::without(&new, &old)) {
        let taken = query(
            "UPDATE chunk SET refs = refs + 1, want = CASE WHEN want < $3 THEN $3 ELSE want END
             WHERE id BETWEEN $1 AND $2 AND doomed = 0 RETURNING id, length,
                 (SELECT COUNT(*) FROM place JOIN benefactor ON benefactor.id = place.benefactor
                  WHERE place.chunk = chunk.id AND benefactor.lost = 0), want",
        )
        .bind(signed(first)?)
        .bind(signed(last)?)
        .bind(i64::from(commit.copies.max(1)))
        .fetch_all(&mut *tx)
        .await?;
        if taken.len() as u64 != last - first + 1 {
            return Err(MetaError::Gone);
        }
        let mut lacking = Vec::new();
        for row in taken {
            let (id, length) = (unsigned(row.try_get(0)?), row.try_get::<i64>(1)?);
            let (copies, want): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
            if lengths.get(&id).map(|length| i64::from(*length)) != Some(length) {
                return Err(MetaError::Invalid("a chunk of the map has another length than before"));
            }
            if copies == 0 {
                return Err(MetaError::Gone);
            }
            if copies < want {
                lacking.push(id);
            }
        }
        super::chunks::queue(tx, &lacking, now).await?;
    }
    Ok(())
}

/// Refuses chunks in use without any copy. These are queued for repair, so few rows are read.
async fn refuse_lost(tx: &mut Tx<'_>, chunks: &[ChunkId]) -> Result<()> {
    for ranges in reference_counts::runs(chunks).chunks(RANGES) {
        let text = format!(
            "{} SELECT repair.chunk FROM part CROSS JOIN repair WHERE repair.chunk BETWEEN part.low AND part.high
                 AND NOT EXISTS (SELECT 1 FROM place JOIN benefactor ON benefactor.id = place.benefactor
                     WHERE place.chunk = repair.chunk AND benefactor.lost = 0) LIMIT 1",
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

/// Raises the required copies of all chunks of a file's versions.
pub(crate) async fn raise_copies(tx: &mut Tx<'_>, node: NodeId, copies: u8, now: i64) -> Result<()> {
    for map in maps(tx, node).await? {
        for (first, last) in reference_counts::runs(&reference_counts::numbers(&pieces_of(&map)?)) {
            let raised =
                query("UPDATE chunk SET want = $3 WHERE id BETWEEN $1 AND $2 AND want < $3 RETURNING id")
                    .bind(signed(first)?)
                    .bind(signed(last)?)
                    .bind(i64::from(copies))
                    .fetch_all(&mut *tx)
                    .await?;
            let ids: Vec<i64> =
                raised.iter().map(|row| row.try_get(0)).collect::<std::result::Result<_, _>>()?;
            let ids: Vec<u64> = ids.into_iter().map(unsigned).collect();
            super::chunks::queue(tx, &ids, now).await?;
        }
    }
    Ok(())
}

async fn maps(tx: &mut Tx<'_>, node: NodeId) -> Result<Vec<Vec<u8>>> {
    let rows =
        query("SELECT map FROM version WHERE node = $1").bind(signed(node)?).fetch_all(&mut *tx).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Removes a version and decreases the counts of its chunks.
///
/// Version rows are locked before chunk rows, as in a commit; the advisory lock admits one removal at a time.
async fn release(tx: &mut Tx<'_>, version: u64, now: i64) -> Result<()> {
    if tx.is_postgres() {
        query("SELECT pg_advisory_xact_lock(7751012)").execute(&mut *tx).await?;
    }
    let row = query("UPDATE version SET older = older WHERE id = $1 RETURNING older, newer, map")
        .bind(signed(version)?)
        .fetch_optional(&mut *tx)
        .await?;
    let row = row.ok_or(MetaError::NotFound)?;
    let (older, newer) = (unsigned(row.try_get(0)?), unsigned(row.try_get(1)?));
    let leaving = reference_counts::numbers(&pieces_of(&row.try_get::<Vec<u8>>(2)?)?);
    set_neighbour(tx, "newer", older, newer).await?;
    set_neighbour(tx, "older", newer, older).await?;
    let (before, after) = (chunks_of(tx, older).await?, chunks_of(tx, newer).await?);
    query("DELETE FROM version WHERE id = $1").bind(signed(version)?).execute(&mut *tx).await?;
    for (first, last) in reference_counts::runs(&reference_counts::counted_less(&before, &leaving, &after)) {
        query("UPDATE chunk SET refs = refs - 1, freed = $3 WHERE id BETWEEN $1 AND $2 AND refs > 0")
            .bind(signed(first)?)
            .bind(signed(last)?)
            .bind(now)
            .execute(&mut *tx)
            .await?;
        query(
            "DELETE FROM repair WHERE chunk IN (SELECT id FROM chunk WHERE id BETWEEN $1 AND $2 AND refs = 0)",
        )
        .bind(signed(first)?)
        .bind(signed(last)?)
        .execute(&mut *tx)
        .await?;
    }
    Ok(())
}

async fn chunks_of(tx: &mut Tx<'_>, version: u64) -> Result<Vec<ChunkId>> {
    let row = query("SELECT map FROM version WHERE id = $1")
        .bind(signed(version)?)
        .fetch_optional(&mut *tx)
        .await?;
    let pieces = row.map(|row| pieces_of(&row.try_get::<Vec<u8>>(0)?)).transpose()?;
    Ok(reference_counts::numbers(&pieces.unwrap_or_default()))
}

/// Removes all versions of a node, pinned or not.
pub(crate) async fn drop_all(tx: &mut Tx<'_>, node: NodeId, now: i64) -> Result<()> {
    let rows = query("SELECT id FROM version WHERE node = $1 ORDER BY id DESC")
        .bind(signed(node)?)
        .fetch_all(&mut *tx)
        .await?;
    for row in rows {
        release(tx, unsigned(row.try_get(0)?), now).await?;
    }
    pins::delete_orphaned_pins(tx).await
}

/// Puts the versions of the file `old` before those of the file `heir`.
pub(crate) async fn transfer_versions(tx: &mut Tx<'_>, old: NodeId, heir: NodeId) -> Result<()> {
    let row = query("SELECT CAST(COALESCE(MAX(number), 0) AS BIGINT) FROM version WHERE node = $1")
        .bind(signed(old)?)
        .fetch_one(&mut *tx)
        .await?;
    let before: i64 = row.try_get(0)?;
    // In two steps, because no two numbers of a node may be equal at any time.
    for text in [
        "UPDATE version SET number = -(number + $2) WHERE node = $1",
        "UPDATE version SET number = -number WHERE node = $1 AND $2 = $2",
    ] {
        query(text).bind(signed(heir)?).bind(before).execute(&mut *tx).await?;
    }
    query("UPDATE version SET node = $2 WHERE node = $1")
        .bind(signed(old)?)
        .bind(signed(heir)?)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

pub(super) fn info(row: &Row, first: usize, holders: &mut HashMap<u64, Vec<String>>) -> Result<VersionInfo> {
    let id = unsigned(row.try_get(first)?);
    Ok(VersionInfo {
        id,
        holders: holders.remove(&id).unwrap_or_default(),
        number: row.try_get::<i64>(first + 1)? as u32,
        size: unsigned(row.try_get(first + 2)?),
        created: row.try_get(first + 3)?,
        chunks: unsigned(row.try_get(first + 4)?),
        sent: unsigned(row.try_get(first + 5)?),
        pinned: row.try_get::<i64>(first + 6)? != 0,
        modified: row.try_get(first + 7)?,
    })
}
