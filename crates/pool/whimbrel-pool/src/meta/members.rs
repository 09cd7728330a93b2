//! Meta statements on benefactors, write sessions and reservations.

use super::{
    database::{Meta, numbers, signed, unsigned},
    driver::{Row, Tx, query},
};
use crate::{
    meta::{BenefactorRow, MetaError, Result},
    protocol::{BenefactorId, BenefactorStatus},
};
use whimbrel_wire::PublicKey;

/// Milliseconds beyond the lease for which commits of a session are recorded; no repeated call is later.
const COMMIT_RECORD_TIME: i64 = 3_600_000;

impl Meta {
    pub(crate) async fn register(
        &self,
        key: &PublicKey,
        status: &BenefactorStatus,
        now: i64,
    ) -> Result<BenefactorId> {
        let pool = self.pool_id().await?;
        if status.pool != 0 && status.pool != pool {
            return Err(MetaError::OtherPool { found: status.pool, expected: pool });
        }
        let mut tx = self.write.begin().await?;
        let known = query("SELECT id FROM benefactor WHERE key = $1")
            .bind(key.0.to_vec())
            .fetch_optional(&mut tx)
            .await?;
        let id = match known {
            Some(row) => unsigned(row.try_get(0)?),
            None => numbers(&mut tx, "benefactor", 1).await?,
        };
        let id = BenefactorId::try_from(id).map_err(|_| MetaError::Invalid("too many benefactors"))?;
        query(
            "INSERT INTO benefactor
                 (id, key, name, address, capacity, used, free, chunks, draining, lost, faults, seen, owed)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, 0, $10, $11)
             ON CONFLICT (id) DO UPDATE SET name = $3, address = $4, capacity = $5, used = $6, free = $7, chunks = $8,
                 draining = CASE WHEN benefactor.draining > $9 THEN benefactor.draining ELSE $9 END,
                 lost = 0, seen = $10, owed = $11",
        )
        .bind(i64::from(id))
        .bind(key.0.to_vec())
        .bind(&status.name)
        .bind(&status.address)
        .bind(signed(status.capacity)?)
        .bind(signed(status.used)?)
        .bind(signed(status.free)?)
        .bind(signed(status.chunks)?)
        .bind(i64::from(status.draining))
        .bind(now)
        .bind(signed(status.owed)?)
        .execute(&mut tx)
        .await?;
        self.finish(tx).await?;
        Ok(id)
    }

    pub(crate) async fn members(&self) -> Result<Vec<BenefactorRow>> {
        let rows = query(
            "SELECT id, key, name, address, capacity, used, free, chunks, draining, lost, faults, seen,
                 (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM reservation WHERE benefactor = benefactor.id), owed,
                 labels
             FROM benefactor ORDER BY id",
        )
        .fetch_all(&self.read)
        .await?;
        let member = |row: &_| member(row);
        rows.iter().map(member).collect()
    }

    /// Stops counting the benefactor's copies and queues its chunks for repair.
    pub(crate) async fn mark_lost(&self, benefactor: BenefactorId, now: i64) -> Result<()> {
        self.queue_chunks_of(benefactor, "lost", "DO UPDATE SET since = repair.since + 1", now).await
    }

    /// Called with every heartbeat while draining, so chunks that are queued already stay unchanged.
    pub(crate) async fn start_drain(&self, benefactor: BenefactorId, now: i64) -> Result<()> {
        self.queue_chunks_of(benefactor, "draining", "DO NOTHING", now).await
    }

    pub(crate) async fn stop_drain(&self, benefactor: BenefactorId) -> Result<()> {
        query("UPDATE benefactor SET draining = 0 WHERE id = $1")
            .bind(i64::from(benefactor))
            .execute(&self.write)
            .await?;
        self.synced().await
    }

    pub(crate) async fn holdings(&self) -> Result<Vec<(BenefactorId, u64)>> {
        let rows =
            query("SELECT benefactor, COUNT(*) FROM place GROUP BY benefactor").fetch_all(&self.read).await?;
        rows.iter()
            .map(|row| Ok((row.try_get::<i64>(0)? as BenefactorId, unsigned(row.try_get(1)?))))
            .collect()
    }

    async fn queue_chunks_of(
        &self,
        benefactor: BenefactorId,
        column: &str,
        queued: &str,
        now: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        query(format!("UPDATE benefactor SET {column} = 2 WHERE id = $1"))
            .bind(i64::from(benefactor))
            .execute(&mut tx)
            .await?;
        let text = format!(
            "INSERT INTO repair (chunk, since)
             SELECT place.chunk, CAST($2 AS BIGINT) FROM place JOIN chunk ON chunk.id = place.chunk
             WHERE place.benefactor = $1 AND chunk.refs > 0 ON CONFLICT (chunk) {queued}"
        );
        query(text).bind(i64::from(benefactor)).bind(now).execute(&mut tx).await?;
        self.finish(tx).await
    }

    /// Number of chunks with fewer copies in `counted` than required, or than it has benefactors. Chunks that
    /// an open session may commit are required once.
    async fn undrained(tx: &mut Tx<'_>, benefactor: BenefactorId, counted: &[BenefactorId]) -> Result<u64> {
        let most = counted.len().max(1);
        let counted: Vec<String> = counted.iter().map(ToString::to_string).collect();
        let counted = if counted.is_empty() { "0".to_owned() } else { counted.join(", ") };
        let text = format!(
            "SELECT COUNT(*) FROM place JOIN chunk ON chunk.id = place.chunk
             WHERE place.benefactor = $1
             AND (chunk.refs > 0 OR chunk.freed >= (SELECT MIN(started) FROM session))
             AND CASE WHEN chunk.want < {most} THEN chunk.want ELSE {most} END >
                 (SELECT COUNT(*) FROM place other WHERE other.chunk = chunk.id AND other.benefactor <> $1
                  AND other.benefactor IN ({counted}))"
        );
        let row = query(text).bind(i64::from(benefactor)).fetch_one(&mut *tx).await?;
        Ok(unsigned(row.try_get(0)?))
    }

    /// Removes a benefactor if nothing is lost with it, and returns whether it did. No commit can begin to
    /// rely on its copies in between.
    pub(crate) async fn leave(&self, benefactor: BenefactorId, counted: &[BenefactorId]) -> Result<bool> {
        let mut tx = self.write.begin().await?;
        query(format!("SELECT id FROM benefactor WHERE id = $1{}", tx.row_lock()))
            .bind(i64::from(benefactor))
            .fetch_optional(&mut tx)
            .await?;
        if Self::undrained(&mut tx, benefactor, counted).await? > 0 {
            return Ok(false);
        }
        for text in [
            "DELETE FROM place WHERE benefactor = $1",
            "DELETE FROM reservation WHERE benefactor = $1",
            "DELETE FROM benefactor WHERE id = $1",
        ] {
            query(text).bind(i64::from(benefactor)).execute(&mut tx).await?;
        }
        self.finish(tx).await?;
        Ok(true)
    }

    /// The latest time at which a benefactor or a session was heard of; 0 in a new pool.
    pub(crate) async fn latest_report(&self) -> Result<i64> {
        let text = "SELECT CAST(COALESCE(MAX(seen), 0) AS BIGINT)
             FROM (SELECT seen FROM benefactor UNION ALL SELECT seen FROM session) AS reports";
        query(text).fetch_one(&self.read).await?.try_get(0)
    }

    /// Renews all sessions, because they could not do so without a manager.
    pub(crate) async fn renew_sessions(&self, now: i64) -> Result<()> {
        query("UPDATE session SET seen = $1 WHERE seen < $1").bind(now).execute(&self.write).await?;
        Ok(())
    }

    /// Starts a session with reservations; without any, it is that of a reader.
    pub(crate) async fn start_session(&self, shares: &[(BenefactorId, u64)], now: i64) -> Result<u64> {
        let mut tx = self.write.begin().await?;
        let id = numbers(&mut tx, "session", 1).await?;
        query("INSERT INTO session (id, started, seen) VALUES ($1, $2, $2)")
            .bind(signed(id)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        insert_reservations(&mut tx, id, shares).await?;
        self.finish(tx).await?;
        Ok(id)
    }

    pub(crate) async fn renew_session(&self, session: u64, now: i64) -> Result<()> {
        let done = query("UPDATE session SET seen = $2 WHERE id = $1")
            .bind(signed(session)?)
            .bind(now)
            .execute(&self.write)
            .await?;
        if done == 1 { Ok(()) } else { Err(MetaError::SessionOver) }
    }

    pub(crate) async fn end_session(&self, session: u64) -> Result<()> {
        let mut tx = self.write.begin().await?;
        for text in ["DELETE FROM reservation WHERE session = $1", "DELETE FROM session WHERE id = $1"] {
            query(text).bind(signed(session)?).execute(&mut tx).await?;
        }
        self.finish(tx).await
    }

    pub(crate) async fn expire_sessions(&self, before: i64) -> Result<u64> {
        let mut tx = self.write.begin().await?;
        let gone = query("DELETE FROM session WHERE seen < $1").bind(before).execute(&mut tx).await?;
        query("DELETE FROM reservation WHERE session NOT IN (SELECT id FROM session)")
            .execute(&mut tx)
            .await?;
        query("DELETE FROM committed WHERE at < $1")
            .bind(before - COMMIT_RECORD_TIME)
            .execute(&mut tx)
            .await?;
        self.finish(tx).await?;
        Ok(gone)
    }

    /// The number of open write sessions: those with reservations.
    pub(crate) async fn sessions(&self) -> Result<u64> {
        let row = query("SELECT COUNT(DISTINCT session) FROM reservation").fetch_one(&self.read).await?;
        Ok(unsigned(row.try_get(0)?))
    }

    pub(crate) async fn reserve(&self, session: u64, shares: &[(BenefactorId, u64)]) -> Result<()> {
        let mut tx = self.write.begin().await?;
        query("DELETE FROM reservation WHERE session = $1").bind(signed(session)?).execute(&mut tx).await?;
        insert_reservations(&mut tx, session, shares).await?;
        self.finish(tx).await
    }
}

async fn insert_reservations(tx: &mut Tx<'_>, session: u64, shares: &[(BenefactorId, u64)]) -> Result<()> {
    for (benefactor, bytes) in shares {
        query("INSERT INTO reservation (session, benefactor, bytes) VALUES ($1, $2, $3)")
            .bind(signed(session)?)
            .bind(i64::from(*benefactor))
            .bind(signed(*bytes)?)
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

fn member(row: &Row) -> Result<BenefactorRow> {
    let damaged = || MetaError::Damaged { what: "list of benefactors" };
    let key: Vec<u8> = row.try_get(1)?;
    Ok(BenefactorRow {
        id: u16::try_from(row.try_get::<i64>(0)?).map_err(|_| damaged())?,
        key: PublicKey(key.try_into().map_err(|_| damaged())?),
        name: row.try_get(2)?,
        address: row.try_get(3)?,
        capacity: unsigned(row.try_get(4)?),
        used: unsigned(row.try_get(5)?),
        free: unsigned(row.try_get(6)?),
        chunks: unsigned(row.try_get(7)?),
        draining: row.try_get::<i64>(8)? > 0,
        lost: row.try_get::<i64>(9)? > 0,
        faults: unsigned(row.try_get(10)?),
        seen: row.try_get(11)?,
        reserved: unsigned(row.try_get(12)?),
        bytes_to_free: unsigned(row.try_get(13)?),
        labels: match row.try_get::<Option<String>>(14)? {
            None => Default::default(),
            Some(text) => serde_json::from_str(&text).map_err(|_| MetaError::Damaged { what: "label" })?,
        },
    })
}
