//! Meta connections, schema migration, parts of statements.

use super::driver::{Connections, Tx, is_postgres, query};
use crate::meta::{
    MetaError, Result, commit_queue::CommitQueue, group_commit::GroupCommit, leader_lock::LeaderLock, schema,
};
use std::{fmt::Write, sync::Arc};

/// Values in one statement; SQLite allows 32,766, but longer statements are not faster.
pub(crate) const BATCH: usize = 500;

/// Ranges of chunk numbers in one statement, limited for the same reason.
pub(crate) const RANGES: usize = 400;

/// The database of a manager. SQLite has one connection for writing, because it allows one writer.
#[derive(Debug, Clone)]
pub(crate) struct Meta {
    pub(crate) write: Connections,
    pub(crate) read: Connections,
    pub(super) commits: CommitQueue,
    /// Group commit, for SQLite only.
    syncs: Option<Arc<GroupCommit>>,
    /// URL of the database, for PostgreSQL only.
    url: Option<Arc<str>>,
}

impl Meta {
    /// Opens `location`: a `postgres://` URL, or the path of a SQLite file, made if it is not there.
    pub(crate) async fn open(location: &str) -> Result<Self> {
        let database = match is_postgres(location) {
            true => {
                let connections = Connections::open(location, 8).await?;
                let commits = CommitQueue::start(connections.clone(), None);
                let url = Some(location.into());
                Self { write: connections.clone(), read: connections, commits, syncs: None, url }
            }
            false => {
                let url = format!("sqlite://{location}?mode=rwc");
                let write = Connections::open(&url, 1).await?;
                // The log separates readers from the writer; `finish` makes commits durable.
                for setting in
                    ["PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", "PRAGMA cache_size=-65536"]
                {
                    query(setting).execute(&write).await?;
                }
                let read = Connections::open(&url, 4).await?;
                let syncs = Some(Arc::new(GroupCommit::of(location)));
                let commits = CommitQueue::start(write.clone(), syncs.clone());
                Self { write, read, commits, syncs, url: None }
            }
        };
        database.migrate().await?;
        Ok(database)
    }

    /// The lock of the manager that does the chores.
    pub(crate) fn leader_lock(&self) -> LeaderLock {
        LeaderLock::new(self.url.as_deref().map(str::to_owned))
    }

    /// Commits the transaction and waits until it is durable.
    pub(crate) async fn finish(&self, tx: Tx<'_>) -> Result<()> {
        tx.commit().await?;
        self.synced().await
    }

    /// Waits until everything committed before is durable.
    pub(crate) async fn synced(&self) -> Result<()> {
        match &self.syncs {
            Some(syncs) => Ok(syncs.wait().await?),
            // PostgreSQL has synced at the commit.
            None => Ok(()),
        }
    }

    /// Syncs that were asked for so far; 0 for PostgreSQL.
    #[cfg(test)]
    pub(super) fn syncs_requested(&self) -> u64 {
        self.syncs.as_ref().map_or(0, |syncs| syncs.requested())
    }

    async fn migrate(&self) -> Result<()> {
        let mut tx = self.write.begin().await?;
        if tx.is_postgres() {
            // Managers that start at the same time must not create a table twice.
            query("SELECT pg_advisory_xact_lock(7751011)").execute(&mut tx).await?;
        }
        for statement in schema::statements(tx.is_postgres()) {
            query(statement).execute(&mut tx).await?;
        }
        let row = query("SELECT value FROM counter WHERE name = 'schema'").fetch_one(&mut tx).await?;
        let schema = usize::try_from(row.try_get::<i64>(0)?).unwrap_or(usize::MAX);
        for statement in schema::LATER.iter().skip(schema.saturating_sub(1)) {
            query(*statement).execute(&mut tx).await?;
            numbers(&mut tx, "schema", 1).await?;
        }
        let id = i64::from_le_bytes(fresh_id());
        query("INSERT INTO counter (name, value) VALUES ('pool', $1) ON CONFLICT (name) DO NOTHING")
            .bind(id)
            .execute(&mut tx)
            .await?;
        self.finish(tx).await
    }

    pub(crate) async fn pool_id(&self) -> Result<u64> {
        let row = query("SELECT value FROM counter WHERE name = 'pool'").fetch_one(&self.read).await?;
        Ok(row.try_get::<i64>(0)? as u64)
    }
}

/// A positive id, random enough to tell pools apart.
fn fresh_id() -> [u8; 8] {
    let mut id = std::process::id().to_le_bytes().to_vec();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    id.extend(now.as_nanos().to_le_bytes());
    ((whimbrel_core::Digest::of(&id).prefix() >> 1) | 1).to_le_bytes()
}

/// Reserves `count` numbers and returns the first.
pub(crate) async fn numbers(tx: &mut Tx<'_>, name: &str, count: usize) -> Result<u64> {
    let row = query("UPDATE counter SET value = value + $2 WHERE name = $1 RETURNING value")
        .bind(name)
        .bind(count as i64)
        .fetch_one(&mut *tx)
        .await?;
    Ok((row.try_get::<i64>(0)? - count as i64) as u64)
}

/// Placeholders `($1, $2), ($3, $4), …`: `rows` of `width`, numbered from `first`.
pub(crate) fn rows(first: usize, rows: usize, width: usize) -> String {
    let mut out = String::new();
    for row in 0..rows {
        let at = first + row * width;
        out += if row == 0 { "(" } else { ", (" };
        for column in 0..width {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}${}", if column == 0 { "" } else { ", " }, at + column);
        }
        out += ")";
    }
    out
}

/// Placeholders like those of [`rows`], each with the type of its column, for rows that no table gives types.
pub(crate) fn typed_rows(first: usize, rows: usize, types: &[&str]) -> String {
    let value = |(column, kind): (usize, &&str)| format!("CAST(${column} AS {kind})");
    let row = |row: usize| {
        let values: Vec<String> = (first + row * types.len()..).zip(types).map(value).collect();
        format!("({})", values.join(", "))
    };
    (0..rows).map(row).collect::<Vec<_>>().join(", ")
}

/// Start of a statement with a table `part` of ranges.
pub(crate) fn ranges_as_part(first: usize, count: usize) -> String {
    let value = |at: usize| format!("(CAST(${} AS BIGINT), CAST(${} AS BIGINT))", at, at + 1);
    let values: Vec<String> = (0..count).map(|range| value(first + range * 2)).collect();
    format!("WITH part (low, high) AS (VALUES {})", values.join(", "))
}

/// Placeholders `$1, $2, …`
pub(crate) fn list(first: usize, count: usize) -> String {
    (first..first + count).map(|at| format!("${at}")).collect::<Vec<_>>().join(", ")
}

/// Converts a database number that should not be negative.
pub(crate) fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Converts a number for the database, whose numbers are signed.
pub(crate) fn signed(value: u64) -> Result<i64> {
    i64::try_from(value).map_err(|_| MetaError::Invalid("a number is too large"))
}
