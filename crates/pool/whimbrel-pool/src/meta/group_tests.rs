//! Tests of the metadata of groups: they appear and go as a whole, at whatever instant somebody dies.

use super::{Meta, MetaError};
use crate::protocol::{Commit, NewGroup, NewNode, NodeId};

const NOW: i64 = 1_000_000_000;

struct Database {
    meta: Meta,
    session: u64,
    _dir: tempfile::TempDir,
}

impl Database {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&dir.path().join("pool.db").display().to_string()).await.unwrap();
        let session = meta.start_session(&[], NOW).await.unwrap();
        Self { meta, session, _dir: dir }
    }

    async fn begin(&self, name: &str, files: u32, job: &str) -> NodeId {
        let group = NewGroup { files, job: job.into(), mode: 0o755, uid: 0, gid: 0 };
        self.meta.begin_group((1, name), &group, NOW).await.unwrap().id
    }

    /// A rank closes its file in a folder.
    async fn close(&self, folder: NodeId, rank: u32) -> super::Result<()> {
        let make =
            NewNode { parent: folder, name: format!("r{rank}"), folder: false, mode: 0, uid: 0, gid: 0 };
        let number = folder as u32 * 100 + rank;
        let (session, node, size, modified, copies, sent, base) = (self.session, None, 0, 0, 1, 0, 0);
        let commit = Commit { session, number, node, make, size, modified, copies, sent, base };
        self.meta.commit(&commit, Vec::new(), &[], NOW).await.map(drop)
    }

    async fn names(&self) -> Vec<String> {
        self.meta.list(1, "", 100).await.unwrap().into_iter().map(|node| node.name).collect()
    }
}

#[tokio::test]
async fn a_group_without_the_file_of_a_dead_rank_never_appears_and_is_begun_anew() {
    let database = Database::new().await;
    let meta = &database.meta;
    let first = database.begin("step1", 2, "job").await;
    database.close(first, 0).await.unwrap();
    let refused = meta.commit_group((1, "step1"), NOW).await;
    assert!(matches!(refused, Err(MetaError::Incomplete { found: 1, expected: 2 })), "{refused:?}");
    assert!(meta.lookup(1, "step1").await.is_err());
    // The job starts again, and a rank of the first attempt closes its file after all.
    let second = database.begin("step1", 2, "job").await;
    let late = database.close(first, 1).await;
    assert!(matches!(late, Err(MetaError::NotFound)), "{late:?}");
    for rank in [0, 1] {
        database.close(second, rank).await.unwrap();
    }
    let committed = meta.commit_group((1, "step1"), NOW).await.unwrap();
    assert_eq!((committed.id, database.names().await), (second, vec!["step1".to_owned()]));
    assert_eq!(meta.list(second, "", 10).await.unwrap().len(), 2);
    assert_eq!(meta.commit_group((1, "step1"), NOW).await.unwrap().id, second, "its answer was lost");
    let taken = meta.begin_group((1, "step1"), &group(1), NOW).await;
    assert!(matches!(taken, Err(MetaError::Exists)), "{taken:?}");
}

fn group(files: u32) -> NewGroup {
    NewGroup { files, job: String::new(), mode: 0o755, uid: 0, gid: 0 }
}

#[tokio::test]
async fn a_later_step_of_a_job_removes_those_that_never_were_complete_and_no_others() {
    let database = Database::new().await;
    let meta = &database.meta;
    let dead = database.begin("step1", 2, "job").await;
    database.close(dead, 0).await.unwrap();
    database.begin("other1", 2, "other").await;
    database.begin("free1", 2, "").await;
    let done = database.begin("step2", 1, "job").await;
    let ahead = database.begin("step3", 1, "job").await;
    database.close(done, 0).await.unwrap();
    meta.commit_group((1, "step2"), NOW).await.unwrap();
    assert_eq!(database.names().await, [".free1.group", ".other1.group", ".step3.group", "step2"]);
    database.close(ahead, 0).await.unwrap();
    meta.commit_group((1, "step3"), NOW).await.unwrap();
    meta.abandon_group((1, "free1"), NOW).await.unwrap();
    assert_eq!(database.names().await, [".other1.group", "step2", "step3"]);
    let found = meta.groups_in(1).await.unwrap();
    let shown: Vec<_> = found.iter().map(|one| (one.name.as_str(), one.is_committed, one.files)).collect();
    assert_eq!(shown, [("other1", false, 0), ("step2", true, 1), ("step3", true, 1)]);
}

#[tokio::test]
async fn a_group_with_a_pinned_version_stays_whole_and_else_goes_whole() {
    let database = Database::new().await;
    let meta = &database.meta;
    let step = database.begin("step1", 2, "").await;
    let below = NewNode { parent: step, name: "below".into(), folder: true, mode: 0, uid: 0, gid: 0 };
    let below = meta.make(&below, NOW).await.unwrap().id;
    database.close(step, 0).await.unwrap();
    database.close(below, 1).await.unwrap();
    meta.commit_group((1, "step1"), NOW).await.unwrap();
    assert!(meta.is_in_group(below).await.unwrap() && !meta.is_in_group(1).await.unwrap());
    let node = meta.lookup(below, "r1").await.unwrap();
    meta.pin(node.id, 1, true).await.unwrap();
    let refused = meta.remove_group(step, NOW).await;
    assert!(matches!(refused, Err(MetaError::Pinned { .. })), "{refused:?}");
    assert_eq!(meta.contents(step).await.unwrap(), (2, 0, true));
    meta.pin(node.id, 1, false).await.unwrap();
    assert!(meta.remove_group(step, NOW).await.unwrap());
    assert!(database.names().await.is_empty() && meta.node(node.id).await.is_err());
    assert!(!meta.remove_group(step, NOW).await.unwrap(), "it is gone");
}
