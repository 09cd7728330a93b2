//! The queue of commits: those of many clients go into one database transaction.
//!
//! A task takes what waits and commits it together; what arrives meanwhile is the next batch. So the cost
//! of a transaction is shared by all who wait, and nobody waits for others to come. Each commit is answered
//! after its transaction is durable. If one of a batch fails late, the transaction is rolled back and each
//! is committed alone, so a failed one fails alone.

use super::{
    commits::{PendingCommit, commit_together},
    driver::{Connections, query},
    group_commit::GroupCommit,
};
use crate::{
    meta::{MetaError, Result},
    protocol::Node,
};
use std::{collections::VecDeque, io, sync::Arc};
use tokio::sync::{mpsc, oneshot};

/// Most commits of one transaction.
const TOGETHER: usize = 128;
/// Chunks of the maps in one transaction; a larger map is committed alone.
const TOGETHER_CHUNKS: usize = 100_000;
/// Most commits that wait for the task; further ones wait for room.
const WAITING: usize = 4096;
/// Advisory lock of PostgreSQL: batches of several managers, which lock many rows, follow one another.
const BATCH_LOCK: i64 = 7_751_014;

struct Waiting {
    pending: PendingCommit,
    answer: oneshot::Sender<Result<Node>>,
}

/// The sending end of the queue; the task ends with the last of them.
#[derive(Debug, Clone)]
pub(crate) struct CommitQueue(mpsc::Sender<Waiting>);

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Waiting")
    }
}

impl CommitQueue {
    pub(crate) fn start(write: Connections, syncs: Option<Arc<GroupCommit>>) -> Self {
        let (sender, queue) = mpsc::channel(WAITING);
        tokio::spawn(Committer { write, syncs, waiting: VecDeque::new() }.run(queue));
        Self(sender)
    }

    pub(crate) async fn commit(&self, pending: PendingCommit) -> Result<Node> {
        let (answer, answered) = oneshot::channel();
        let ended = || MetaError::Storage { source: sqlx::Error::WorkerCrashed };
        self.0.send(Waiting { pending, answer }).await.map_err(|_| ended())?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }
}

/// The task that commits.
struct Committer {
    write: Connections,
    /// For SQLite only; PostgreSQL has synced at the commit.
    syncs: Option<Arc<GroupCommit>>,
    waiting: VecDeque<Waiting>,
}

impl Committer {
    async fn run(mut self, mut queue: mpsc::Receiver<Waiting>) {
        loop {
            if self.waiting.is_empty() {
                let Some(first) = queue.recv().await else { return };
                self.waiting.push_back(first);
            }
            while self.waiting.len() < TOGETHER
                && let Ok(next) = queue.try_recv()
            {
                self.waiting.push_back(next);
            }
            let batch = self.next_batch();
            self.commit(batch).await;
        }
    }

    /// The first that wait, as many as one transaction takes.
    fn next_batch(&mut self) -> Vec<Waiting> {
        let (mut batch, mut chunks) = (Vec::new(), 0);
        while let Some(next) = self.waiting.front() {
            chunks += next.pending.pieces.len();
            if batch.len() >= TOGETHER || (!batch.is_empty() && chunks > TOGETHER_CHUNKS) {
                break;
            }
            batch.extend(self.waiting.pop_front());
        }
        batch
    }

    async fn commit(&mut self, batch: Vec<Waiting>) {
        let (pending, answers): (Vec<PendingCommit>, Vec<_>) =
            batch.into_iter().map(|waiting| (waiting.pending, waiting.answer)).unzip();
        let outcomes = match self.transaction(&pending).await {
            Err(error) if pending.len() == 1 => vec![Some(Err(error))],
            Err(error) => {
                tracing::debug!(%error, commits = pending.len(), "commits are repeated one by one");
                let mut outcomes = Vec::with_capacity(pending.len());
                for one in &pending {
                    outcomes.push(match self.transaction(std::slice::from_ref(one)).await {
                        Ok(mut outcome) => outcome.pop().flatten(),
                        Err(error) => Some(Err(error)),
                    });
                }
                outcomes
            }
            Ok(outcomes) => outcomes,
        };
        let mut done = Vec::with_capacity(answers.len());
        let mut again = VecDeque::new();
        for ((pending, answer), outcome) in pending.into_iter().zip(answers).zip(outcomes) {
            match outcome {
                Some(outcome) => done.push((answer, outcome)),
                None => again.push_back(Waiting { pending, answer }),
            }
        }
        // What was deferred came first.
        again.append(&mut self.waiting);
        self.waiting = again;
        self.answer(done);
    }

    /// Commits a batch, or nothing of it. None for what has to wait for another commit of the batch.
    async fn transaction(&self, batch: &[PendingCommit]) -> Result<Vec<Option<Result<Node>>>> {
        let mut tx = self.write.begin().await?;
        if tx.is_postgres() {
            query(format!("SELECT pg_advisory_xact_lock({BATCH_LOCK})")).execute(&mut tx).await?;
        }
        let outcomes = commit_together(&mut tx, &self.write, batch).await?;
        tx.commit().await?;
        Ok(outcomes)
    }

    /// Answers when all is durable; the next batch begins meanwhile.
    fn answer(&self, done: Vec<(oneshot::Sender<Result<Node>>, Result<Node>)>) {
        let syncs = self.syncs.clone();
        tokio::spawn(async move {
            let synced = match &syncs {
                Some(syncs) => syncs.wait().await,
                None => Ok(()),
            };
            for (answer, outcome) in done {
                let failed =
                    |error: &io::Error| MetaError::Sync { source: io::Error::other(error.to_string()) };
                let outcome = match &synced {
                    Ok(()) => outcome,
                    Err(error) => Err(failed(error)),
                };
                // The caller may have gone away.
                let _ = answer.send(outcome);
            }
        });
    }
}
