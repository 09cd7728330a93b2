//! Meta statements on versions: chains, removal.

use super::{
    database::{Meta, signed, unsigned},
    driver::{Row, Tx, query},
    files, pins,
};
use crate::{
    chunk_map::{self, ChunkRef},
    meta::{MetaError, PoolTotals, Result, reference_counts},
    protocol::{ChunkId, NodeId, VersionInfo},
};
use std::collections::HashMap;

impl Meta {
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
            "SELECT CAST(COALESCE(SUM(length), 0) AS BIGINT) FROM chunk WHERE refs > 0 AND coded >= 0",
            "SELECT COUNT(*) FROM chunk WHERE refs > 0 AND coded >= 0",
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

pub(super) fn pieces_of(map: &[u8]) -> Result<Vec<ChunkRef>> {
    chunk_map::decode(map).map_err(|_| MetaError::Damaged { what: "map" })
}

/// Sets the neighbour of a version in its chain, on one side.
pub(super) async fn set_neighbour(tx: &mut Tx<'_>, side: &str, version: u64, to: u64) -> Result<()> {
    query(format!("UPDATE version SET {side} = $2 WHERE id = $1"))
        .bind(signed(version)?)
        .bind(signed(to)?)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

/// Raises the required copies of all chunks of a file's versions.
pub(crate) async fn raise_copies(tx: &mut Tx<'_>, node: NodeId, copies: u8, now: i64) -> Result<()> {
    for map in maps(tx, node).await? {
        for (first, last) in reference_counts::runs(&reference_counts::numbers(&pieces_of(&map)?)) {
            let raised =
                query(
                    "UPDATE chunk SET want = $3 WHERE id BETWEEN $1 AND $2 AND want < $3 AND coded = 0 RETURNING id",
                )
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
