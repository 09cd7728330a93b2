//! Making commits of SQLite durable together: of several that wait, one sync of the log serves all.
//!
//! The database is told to write its log and not to sync it (`synchronous=NORMAL`: it still does so around
//! checkpoints, so it is never torn). Who has committed waits here until a sync has ended that began after
//! that. The log is written in order and has check sums, so what is durable is a beginning of what was
//! committed: nobody's commit is kept without those it was built on. What others may have read of a commit
//! before it was durable can be gone after a loss of power; what anybody was answered cannot.
//!
//! After a sync that failed nothing is answered any more: the kernel may have dropped what was not written.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The syncs of a database's log.
#[derive(Debug)]
pub(crate) struct GroupCommit {
    log: PathBuf,
    /// Commits that want to be durable.
    asked: AtomicU64,
    /// How many of them are. Held by whoever syncs.
    done: tokio::sync::Mutex<u64>,
    failed: Arc<AtomicBool>,
}

impl GroupCommit {
    /// Those of a database in a file.
    pub(crate) fn of(database: &str) -> Self {
        let log = PathBuf::from(format!("{database}-wal"));
        Self { log, asked: AtomicU64::new(0), done: tokio::sync::Mutex::new(0), failed: Arc::default() }
    }

    /// Returns when everything that was committed before is durable.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        let mine = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut done = self.done.lock().await;
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("a sync of the database failed before"));
        }
        if *done >= mine {
            return Ok(());
        }
        let all = self.asked.load(Ordering::Acquire);
        let (log, failed) = (self.log.clone(), self.failed.clone());
        // Noted where it happens: whoever waits may be gone before it ends.
        let note = move || sync(&log).inspect_err(|_| failed.store(true, Ordering::Release));
        let synced = tokio::task::spawn_blocking(note).await;
        synced.unwrap_or_else(|_| Err(io::Error::other("the sync did not end")))?;
        *done = all;
        Ok(())
    }
}

fn sync(log: &Path) -> io::Result<()> {
    match File::open(log) {
        Ok(file) => file.sync_data(),
        // It is gone when all of it is in the database, which was synced.
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
        assert_eq!(*syncs.done.lock().await, 21);
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
        // Begun, and mostly given up before it ends.
        let _ = futures_util::FutureExt::now_or_never(broken.wait());
        while !broken.failed.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        assert!(GroupCommit { log, ..broken }.wait().await.is_err());
    }
}
