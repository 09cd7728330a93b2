//! The lock that one of several managers of a database holds: it does the chores, and all of them serve.
//!
//! In PostgreSQL it is an advisory lock of a session of its own, so it is free as soon as the server knows
//! that the connection is gone, and no manager needs a clock for it. A manager that lost its connection may
//! still be in a chore; that is no harm, because chores are transactions that may run twice. SQLite has one
//! manager, which always has the lock.

use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use std::time::Duration;

/// Number of the lock; other advisory locks of managers have the numbers before it.
const LOCK: i64 = 7_751_013;
/// Longest time for an answer of the database, after which the lock counts as lost.
const ANSWER_TIME: Duration = Duration::from_secs(3);
/// Makes the server notice within seconds that the host of the lock's holder is gone.
const KEEPALIVE: &str =
    "SET tcp_keepalives_idle = 3; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3";

/// The lock, or the connection of one who waits for it.
#[derive(Debug)]
pub(crate) struct LeaderLock {
    /// None for SQLite.
    url: Option<String>,
    connection: Option<PgConnection>,
    held: bool,
}

impl LeaderLock {
    /// The lock of a database, which nobody holds here yet.
    pub(super) fn new(url: Option<String>) -> Self {
        Self { url, connection: None, held: false }
    }

    /// Takes the lock if it is free, and returns whether this manager holds it now.
    pub(crate) async fn hold(&mut self) -> bool {
        let Some(url) = self.url.clone() else { return true };
        match tokio::time::timeout(ANSWER_TIME, self.ask(&url)).await {
            Ok(Ok(held)) => self.held = held,
            failed => {
                tracing::warn!(?failed, "cannot ask the database which manager does the chores");
                self.release();
            }
        }
        self.held
    }

    /// Gives the lock to another manager.
    pub(crate) fn release(&mut self) {
        self.held = false;
        // The server frees the lock when the connection is closed.
        self.connection = None;
    }

    async fn ask(&mut self, url: &str) -> sqlx::Result<bool> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let mut connection = PgConnection::connect(url).await?;
                connection.execute(KEEPALIVE).await?;
                none.insert(connection)
            }
        };
        if self.held {
            // The lock lasts as long as its connection.
            connection.execute("SELECT 1").await?;
            return Ok(true);
        }
        let row = sqlx::query("SELECT pg_try_advisory_lock($1)").bind(LOCK).fetch_one(connection).await?;
        row.try_get(0)
    }
}
