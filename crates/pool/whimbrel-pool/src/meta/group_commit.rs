//! Group commit for SQLite: one sync of the log makes several waiting commits durable.
//!
//! SQLite writes its log without syncing it (`synchronous=NORMAL`; it still syncs around checkpoints, so the
//! database is never torn). A commit waits here for a sync that began after it. The log is written in order
//! and has checksums, so after a power loss a prefix of the commits is left and no commit is kept without its
//! predecessors. Data read before it was durable may be lost; data that was acknowledged is not.
//!
//! After a failed sync every later commit fails, because the kernel may have dropped the unwritten data.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

#[derive(Debug)]
pub(crate) struct GroupCommit {
    log: PathBuf,
    /// Number of commits that wait or waited for a sync.
    requested: AtomicU64,
    /// Number of them that are durable. Locked by the task that syncs.
    synced: tokio::sync::Mutex<u64>,
    failed: Arc<AtomicBool>,
}

impl GroupCommit {
    pub(crate) fn of(database: &str) -> Self {
        let log = PathBuf::from(format!("{database}-wal"));
        Self { log, requested: AtomicU64::new(0), synced: tokio::sync::Mutex::new(0), failed: Arc::default() }
    }

    #[cfg(test)]
    pub(super) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Acquire)
    }

    /// Waits until everything committed before is durable.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        let mine = self.requested.fetch_add(1, Ordering::AcqRel) + 1;
        let mut done = self.synced.lock().await;
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier sync of the database failed"));
        }
        if *done >= mine {
            return Ok(());
        }
        let all = self.requested.load(Ordering::Acquire);
        let (log, failed) = (self.log.clone(), self.failed.clone());
        // Recorded inside the task, because the waiting caller may be dropped before the sync ends.
        let note = move || sync(&log).inspect_err(|_| failed.store(true, Ordering::Release));
        let synced = tokio::task::spawn_blocking(note).await;
        synced.unwrap_or_else(|_| Err(io::Error::other("the sync task failed")))?;
        *done = all;
        Ok(())
    }
}

fn sync(log: &Path) -> io::Result<()> {
    match File::open(log) {
        Ok(file) => file.sync_data(),
        // There is no log when all of it is in the database, which was synced.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_who_wait_are_served_and_after_a_failure_nobody_is() {
        let dir = tempfile::tempdir().unwrap();
        let syncs = Arc::new(GroupCommit::of(&dir.path().join("pool.db").display().to_string()));
        syncs.wait().await.expect("a log that is not there holds nothing");
        std::fs::write(dir.path().join("pool.db-wal"), "x").unwrap();
        let waits = (0..20).map(|_| {
            tokio::spawn({
                let syncs = syncs.clone();
                async move { syncs.wait().await }
            })
        });
        for wait in waits.collect::<Vec<_>>() {
            wait.await.unwrap().unwrap();
        }
        assert_eq!(*syncs.synced.lock().await, 21);
        let log = dir.path().join("pool.db-wal");
        let broken = GroupCommit { log: log.join("no folder"), ..Arc::into_inner(syncs).unwrap() };
        assert!(broken.wait().await.is_err());
        let mended = GroupCommit { log, ..broken };
        assert!(mended.wait().await.is_err(), "what was not written then may never be");
    }

    #[tokio::test]
    async fn a_failure_that_nobody_waits_for_any_more_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("pool.db-wal");
        std::fs::write(&log, "x").unwrap();
        let broken = GroupCommit { log: log.join("no folder"), ..GroupCommit::of("") };
        // Started, and mostly dropped before it ends.
        let _ = futures_util::FutureExt::now_or_never(broken.wait());
        while !broken.failed.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        assert!(GroupCommit { log, ..broken }.wait().await.is_err());
    }
}
