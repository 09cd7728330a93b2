//! The session of a client's readers: it keeps what they have open readable, also after it was removed.
//!
//! No chunk is deleted that was freed since the oldest living session started. So a reader opens a version
//! inside a session without reservations. All readers of a client share one, so opening many files costs one
//! call. It ends some time after the last of them, or when its client dies and the lease expires.

use super::{Pool, PoolError, ReadFile, Result};
use crate::protocol::{EndSession, Reserve, ReserveSpace, code};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// A session at the manager, held by readers.
#[derive(Debug)]
pub(super) struct ReaderSession {
    id: AtomicU64,
}

impl Pool {
    /// Opens a version so that it stays readable until it is dropped, even if it is removed meanwhile. For
    /// days of reading, pin the version and use [`Pool::read`]: a session delays garbage collection.
    pub async fn open(&self, version: u64) -> Result<ReadFile> {
        let session = self.reader_session().await?;
        Ok(self.read(version).await?.within(session))
    }

    async fn reader_session(&self) -> Result<Arc<ReaderSession>> {
        let mut current = self.inner.reader_session.lock().await;
        if let Some(session) = current.upgrade() {
            return Ok(session);
        }
        let (id, lease) = self.renew_reader_session(0).await?;
        let session = Arc::new(ReaderSession { id: AtomicU64::new(id) });
        *current = Arc::downgrade(&session);
        let every = Duration::from_secs(u64::from(lease.max(3))) / 3;
        self.inner.runtime.spawn(keep_alive(self.clone(), session.clone(), every));
        Ok(session)
    }

    /// Renews a session, or starts one for 0; returns its number and lease.
    async fn renew_reader_session(&self, session: u64) -> Result<(u64, u32)> {
        let ask = Reserve { session, bytes: 0, unused: 0, width: 0, avoid: Vec::new() };
        let (reserved, _) = self.call_manager::<ReserveSpace>(&ask, Bytes::new()).await?;
        Ok((reserved.session, reserved.lease))
    }
}

/// Renews the session while there are readers, and then ends it.
async fn keep_alive(pool: Pool, session: Arc<ReaderSession>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let mut current = pool.inner.reader_session.lock().await;
        if Arc::strong_count(&session) == 1 {
            *current = Weak::new();
            break;
        }
        drop(current);
        let renewed = match pool.renew_reader_session(session.id.load(Ordering::Relaxed)).await {
            // The manager could not be reached for too long; the readers need a new one.
            Err(error) if is_over(&error) => pool.renew_reader_session(0).await,
            other => other,
        };
        match renewed {
            Ok((id, _)) => session.id.store(id, Ordering::Relaxed),
            Err(error) => tracing::warn!(%error, "the session of readers was not renewed"),
        }
    }
    let id = session.id.load(Ordering::Relaxed);
    if let Err(error) = pool.call_manager::<EndSession>(&id, Bytes::new()).await {
        tracing::debug!(%error, "the session was not ended and will expire");
    }
}

fn is_over(error: &PoolError) -> bool {
    error.code() == Some(code::SESSION_OVER)
}
