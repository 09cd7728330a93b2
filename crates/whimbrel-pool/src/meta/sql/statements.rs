//! Opening a database, counters, and what all statements need. Compiled for each driver; see `meta`.

use super::{Driver, IS_POSTGRES};
use crate::meta::{MetaError, Result, schema};
use sqlx::{AssertSqlSafe, Pool, Row, Transaction, pool::PoolOptions};
use std::fmt::Write;

/// Values in one statement; SQLite allows 32,766, and longer statements gain nothing.
pub(crate) const BATCH: usize = 500;

pub(crate) type Tx<'a> = Transaction<'a, Driver>;

/// Connections to the database: one that writes if it is SQLite, which has one writer anyway.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    pub(crate) write: Pool<Driver>,
    pub(crate) read: Pool<Driver>,
}

impl Database {
    pub(crate) async fn open(location: &str) -> Result<Self> {
        let pool = |most: u32| PoolOptions::<Driver>::new().max_connections(most);
        let url = if IS_POSTGRES { location.to_owned() } else { format!("sqlite://{location}?mode=rwc") };
        let write = pool(if IS_POSTGRES { 8 } else { 1 }).connect(&url).await?;
        if !IS_POSTGRES {
            // A commit is durable when it returns; the log keeps readers and the writer apart.
            for setting in ["PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA cache_size=-65536"]
            {
                sqlx::query(setting).execute(&write).await?;
            }
        }
        let read = if IS_POSTGRES { write.clone() } else { pool(4).connect(&url).await? };
        let database = Self { write, read };
        database.migrate().await?;
        Ok(database)
    }

    async fn migrate(&self) -> Result<()> {
        let mut tx = self.write.begin().await?;
        if IS_POSTGRES {
            // Managers that start at once must not make the same table twice.
            sqlx::query("SELECT pg_advisory_xact_lock(7751011)").execute(&mut *tx).await?;
        }
        for statement in schema::statements(IS_POSTGRES) {
            sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await?;
        }
        let row = sqlx::query("SELECT value FROM counter WHERE name = 'schema'").fetch_one(&mut *tx).await?;
        let schema = usize::try_from(row.try_get::<i64, _>(0)?).unwrap_or(usize::MAX);
        for statement in schema::LATER.iter().skip(schema.saturating_sub(1)) {
            sqlx::query(*statement).execute(&mut *tx).await?;
            numbers(&mut tx, "schema", 1).await?;
        }
        let id = i64::from_le_bytes(fresh_id());
        sqlx::query("INSERT INTO counter (name, value) VALUES ('pool', $1) ON CONFLICT (name) DO NOTHING")
            .bind(id)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// The number that tells this pool from others.
    pub(crate) async fn pool_id(&self) -> Result<u64> {
        let row = sqlx::query("SELECT value FROM counter WHERE name = 'pool'").fetch_one(&self.read).await?;
        Ok(row.try_get::<i64, _>(0)? as u64)
    }
}

/// Random enough to tell pools apart; positive and not zero.
fn fresh_id() -> [u8; 8] {
    let mut id = std::process::id().to_le_bytes().to_vec();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    id.extend(now.as_nanos().to_le_bytes());
    ((whimbrel_core::Digest::of(&id).prefix() >> 1) | 1).to_le_bytes()
}

/// The first of `count` new numbers.
pub(crate) async fn numbers(tx: &mut Tx<'_>, name: &str, count: usize) -> Result<u64> {
    let row = sqlx::query("UPDATE counter SET value = value + $2 WHERE name = $1 RETURNING value")
        .bind(name)
        .bind(count as i64)
        .fetch_one(&mut **tx)
        .await?;
    Ok((row.try_get::<i64, _>(0)? - count as i64) as u64)
}

/// `($1, $2), ($3, $4), …`: `rows` of `width`, numbered from `first`.
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

/// `$1, $2, …`
pub(crate) fn list(first: usize, count: usize) -> String {
    (first..first + count).map(|at| format!("${at}")).collect::<Vec<_>>().join(", ")
}

/// A number that should not be negative in the database.
pub(crate) fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// A number for the database, which has none so large.
pub(crate) fn signed(value: u64) -> Result<i64> {
    i64::try_from(value).map_err(|_| MetaError::Invalid("a number is too large"))
}
