//! Meta statements that remove benefactors for good and label them.

use super::{
    database::{Meta, unsigned},
    driver::query,
    shards::LACKS_PIECE,
};
use crate::{
    meta::{MetaError, Result},
    protocol::{BenefactorId, ChunkId, MemberLabels, RemovedMember},
};
use whimbrel_wire::PublicKey;

/// What the manager that does the chores tells the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedNumber {
    /// Chunks whose copies are too near to each other, as the last look found it.
    Crowded,
    /// Time of the last backup.
    Backup,
}

impl SharedNumber {
    fn column(self) -> &'static str {
        match self {
            Self::Crowded => "crowded",
            Self::Backup => "backup",
        }
    }
}

/// Chunks in use of which a benefactor has the last copy, without pieces and chunks that all their pieces
/// give.
const LAST_COPIES: &str = "SELECT COUNT(*) FROM place JOIN chunk ON chunk.id = place.chunk
     WHERE place.benefactor = $1 AND chunk.refs > 0 AND (chunk.coded = 0 OR (chunk.coded > 0 AND {LACKS_PIECE}))
     AND NOT EXISTS (SELECT 1 FROM place other JOIN benefactor ON benefactor.id = other.benefactor
         WHERE other.chunk = chunk.id AND other.benefactor <> $1 AND benefactor.lost = 0)";

/// Chunks without a copy that have too few pieces without those of a benefactor.
const LAST_PIECES: &str = "SELECT COUNT(*) FROM chunk WHERE coded > 0
     AND id IN (SELECT piece.chunk FROM place JOIN piece ON piece.piece = place.chunk WHERE place.benefactor = $1)
     AND NOT EXISTS (SELECT 1 FROM place copy JOIN benefactor holder ON holder.id = copy.benefactor
         WHERE copy.chunk = chunk.id AND copy.benefactor <> $1 AND holder.lost = 0)
     AND (coded & 255) < (SELECT COUNT(*) FROM piece WHERE piece.chunk = chunk.id AND NOT EXISTS
         (SELECT 1 FROM place held JOIN benefactor holder ON holder.id = held.benefactor
          WHERE held.chunk = piece.piece AND held.benefactor <> $1 AND holder.lost = 0))";

impl Meta {
    /// Removes a benefactor with its copies, which are made again of others. Refused if a chunk in use has no
    /// other copy, unless `force` is set. An expelled key is never admitted again.
    pub(crate) async fn remove_member(
        &self,
        benefactor: Option<BenefactorId>,
        expelled: Option<(PublicKey, &str)>,
        force: bool,
        now: i64,
    ) -> Result<RemovedMember> {
        let mut tx = self.write.begin().await?;
        let mut removed = RemovedMember::default();
        if let Some((key, name)) = expelled {
            let text =
                "INSERT INTO expelled (key, name, at) VALUES ($1, $2, $3) ON CONFLICT (key) DO NOTHING";
            query(text).bind(key.0.to_vec()).bind(&name.to_owned()).bind(now).execute(&mut tx).await?;
        }
        if let Some(id) = benefactor.map(i64::from) {
            // No commit begins to rely on its copies meanwhile.
            let lock = format!("SELECT id FROM benefactor WHERE id = $1{}", tx.row_lock());
            query(lock).bind(id).fetch_optional(&mut tx).await?;
            for text in [LAST_COPIES.replace("{LACKS_PIECE}", LACKS_PIECE), LAST_PIECES.to_owned()] {
                removed.lost += unsigned(query(text).bind(id).fetch_one(&mut tx).await?.try_get(0)?);
            }
            if removed.lost > 0 && !force {
                return Err(MetaError::LastCopies { chunks: removed.lost });
            }
            let text = "INSERT INTO repair (chunk, since)
                 SELECT place.chunk, CAST($2 AS BIGINT) FROM place JOIN chunk ON chunk.id = place.chunk
                 WHERE place.benefactor = $1 AND chunk.refs > 0
                 ON CONFLICT (chunk) DO UPDATE SET since = repair.since + 1";
            removed.copies = query(text).bind(id).bind(now).execute(&mut tx).await?;
            for text in [
                "DELETE FROM place WHERE benefactor = $1",
                "DELETE FROM reservation WHERE benefactor = $1",
                "DELETE FROM benefactor WHERE id = $1",
            ] {
                query(text).bind(id).execute(&mut tx).await?;
            }
        }
        self.finish(tx).await?;
        Ok(removed)
    }

    /// Keys that were expelled.
    pub(crate) async fn expelled(&self) -> Result<Vec<PublicKey>> {
        let rows = query("SELECT key FROM expelled").fetch_all(&self.read).await?;
        let key = |bytes: Vec<u8>| bytes.try_into().map(PublicKey);
        let damaged = |_| MetaError::Damaged { what: "list of expelled members" };
        rows.iter().map(|row| key(row.try_get(0)?).map_err(damaged)).collect()
    }

    pub(crate) async fn set_labels(&self, benefactor: BenefactorId, labels: &MemberLabels) -> Result<()> {
        let text =
            serde_json::to_string(labels).map_err(|_| MetaError::Invalid("the labels cannot be stored"))?;
        query("UPDATE benefactor SET labels = $2 WHERE id = $1")
            .bind(i64::from(benefactor))
            .bind(&text)
            .execute(&self.write)
            .await?;
        self.synced().await
    }

    /// Chunks in use behind a number, with the copies that they require and their places.
    pub(crate) async fn chunk_places(
        &self,
        after: ChunkId,
        most: u32,
    ) -> Result<Vec<(ChunkId, u8, Vec<BenefactorId>)>> {
        let text = "SELECT id, want FROM chunk WHERE id > $1 AND refs > 0 AND coded = 0 ORDER BY id LIMIT $2";
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let rows = query(text).bind(after).bind(i64::from(most)).fetch_all(&self.read).await?;
        let mut chunks = Vec::with_capacity(rows.len());
        for row in &rows {
            chunks.push((unsigned(row.try_get(0)?), row.try_get::<i64>(1)? as u8, Vec::new()));
        }
        let Some(last) = rows.last() else { return Ok(chunks) };
        let text = "SELECT chunk, benefactor FROM place WHERE chunk > $1 AND chunk <= $2 ORDER BY chunk";
        let places = query(text).bind(after).bind(last.try_get::<i64>(0)?).fetch_all(&self.read).await?;
        let mut at = 0;
        for row in places {
            let chunk = unsigned(row.try_get(0)?);
            while chunks.get(at).is_some_and(|(id, ..)| *id < chunk) {
                at += 1;
            }
            if let Some((_, _, places)) = chunks.get_mut(at).filter(|(id, ..)| *id == chunk) {
                places.push(row.try_get::<i64>(1)? as BenefactorId);
            }
        }
        Ok(chunks)
    }

    /// Queues chunks for repair.
    pub(crate) async fn queue_repair(&self, chunks: &[ChunkId], now: i64) -> Result<()> {
        let mut tx = self.write.begin().await?;
        super::chunks::queue(&mut tx, chunks, now).await?;
        self.finish(tx).await
    }

    /// A number that all managers of the database share; 0 if none has set it.
    pub(crate) async fn shared_number(&self, name: SharedNumber) -> Result<u64> {
        let text = "SELECT value FROM counter WHERE name = $1";
        let row = query(text).bind(name.column()).fetch_optional(&self.read).await?;
        row.map_or(Ok(0), |row| Ok(unsigned(row.try_get(0)?)))
    }

    pub(crate) async fn set_shared_number(&self, name: SharedNumber, value: u64) -> Result<()> {
        let text = "INSERT INTO counter (name, value) VALUES ($1, $2)
             ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value";
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        query(text).bind(name.column()).bind(value).execute(&self.write).await?;
        Ok(())
    }
}
