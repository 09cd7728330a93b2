//! Tests of the metadata: invariants between calls in an unlucky order, on a database in a file.

use super::Meta;
use crate::{
    chunk_map::ChunkRef,
    domains::Domains,
    policy::{Policy, Retention},
    protocol::{BenefactorId, BenefactorStatus, Commit, Inventory, MemberLabels, NewNode, WrittenChunk},
};
use whimbrel_core::Digest;
use whimbrel_wire::PublicKey;

const NOW: i64 = 1_000_000_000;

struct Database {
    meta: Meta,
    _dir: tempfile::TempDir,
}

impl Database {
    async fn new(benefactors: u8) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&dir.path().join("pool.db").display().to_string()).await.unwrap();
        let database = Self { meta, _dir: dir };
        for number in 1..=benefactors {
            let (name, address) = (format!("b{number}"), format!("h:{number}"));
            let (capacity, free) = (1 << 40, 1 << 40);
            let status = BenefactorStatus {
                name,
                address,
                pool: 0,
                capacity,
                used: 0,
                free,
                chunks: 0,
                draining: false,
                owed: 0,
            };
            database.meta.register(&PublicKey([number; 32]), &status, NOW).await.unwrap();
        }
        database
    }

    async fn enroll(&self, session: u64, chunk: Digest, places: &[BenefactorId], now: i64) -> u64 {
        let written = WrittenChunk { digest: chunk, length: 10, stored: 10, places: places.to_vec() };
        self.meta.register_chunks(session, &[written], now).await.unwrap()[0]
    }

    async fn commit(&self, session: u64, name: &str, chunk: u64, copies: u8) -> crate::meta::Result<()> {
        let make = NewNode { parent: 1, name: name.into(), folder: false, mode: 0o644, uid: 0, gid: 0 };
        // The tests commit a chunk once in a session.
        let number = chunk as u32;
        let commit =
            Commit { session, number, node: None, make, size: 10, modified: 0, copies, sent: 10, base: 0 };
        self.meta
            .commit(&commit, vec![ChunkRef { chunk, length: 10, encrypted: false, digest: None }], &[], NOW)
            .await
            .map(drop)
    }

    /// Commits a file of several chunks over a version.
    async fn version(
        &self,
        (session, number): (u64, u32),
        name: &str,
        chunks: &[u64],
        base: u64,
    ) -> crate::meta::Result<crate::protocol::Node> {
        let make = NewNode { parent: 1, name: name.into(), folder: false, mode: 0o644, uid: 0, gid: 0 };
        let size = chunks.len() as u64 * 10;
        let commit =
            Commit { session, number, node: None, make, size, modified: 0, copies: 1, sent: 0, base };
        let pieces: Vec<ChunkRef> = chunks
            .iter()
            .map(|chunk| ChunkRef { chunk: *chunk, length: 10, encrypted: false, digest: None })
            .collect();
        self.meta.commit(&commit, pieces, &[], NOW).await
    }

    /// Commits a new file in a task of its own.
    fn send(
        &self,
        (session, number): (u64, u32),
        name: &str,
        chunks: &[u64],
        copies: u8,
    ) -> tokio::task::JoinHandle<crate::meta::Result<crate::protocol::Node>> {
        let make = NewNode { parent: 1, name: name.into(), folder: false, mode: 0o644, uid: 0, gid: 0 };
        let (size, node) = (chunks.len() as u64 * 10, None);
        let commit = Commit { session, number, node, make, size, modified: 0, copies, sent: 0, base: 0 };
        let piece = |chunk: &u64| ChunkRef { chunk: *chunk, length: 10, encrypted: false, digest: None };
        let (meta, pieces) = (self.meta.clone(), chunks.iter().map(piece).collect());
        tokio::spawn(async move { meta.commit(&commit, pieces, &[], NOW).await })
    }

    async fn chunks(&self, session: u64, count: u64, places: &[BenefactorId]) -> Vec<u64> {
        let written = |n: u64| {
            let digest = Digest::of(&n.to_le_bytes());
            WrittenChunk { digest, length: 10, stored: 10, places: places.to_vec() }
        };
        let written: Vec<WrittenChunk> = (0..count).map(written).collect();
        self.meta.register_chunks(session, &written, NOW).await.unwrap()
    }

    async fn collect(&self, benefactor: BenefactorId, listed: &[(Digest, u32)], now: i64) -> Vec<bool> {
        let all = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };
        self.meta.collect_garbage(benefactor, &all, listed, now, super::Quarantine::Off).await.unwrap()
    }
}

#[tokio::test]
async fn what_is_promised_again_is_not_promised_twice() {
    let database = Database::new(1).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    database.meta.reserve(session, &[(1, 300)]).await.unwrap();
    // 250 of 300 bytes were written and are in the used bytes that the benefactor reports.
    database.meta.reserve(session, &[(1, 350)]).await.unwrap();
    assert_eq!(database.meta.members().await.unwrap()[0].reserved, 350);
    database.meta.end_session(session).await.unwrap();
    assert_eq!(database.meta.members().await.unwrap()[0].reserved, 0);
}

#[tokio::test]
async fn a_chunk_is_known_when_it_has_the_copies_that_are_wanted() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let (one, two) = (Digest::of(b"one"), Digest::of(b"two"));
    let ids =
        [database.enroll(session, one, &[1], NOW).await, database.enroll(session, two, &[1, 2], NOW).await];
    let known = async |copies| database.meta.find_chunks(&[one, two], copies, NOW - 1000, NOW).await.unwrap();
    assert_eq!(known(1).await, ids);
    assert_eq!(known(2).await, [0, ids[1]]);
    database.meta.mark_lost(2, NOW).await.unwrap();
    assert_eq!(known(2).await, [0, 0], "a copy that is lost does not count");
}

#[tokio::test]
async fn a_commit_that_is_sent_again_late_does_not_hide_what_others_wrote_since() {
    let database = Database::new(1).await;
    let sessions = [0, 1].map(|_| database.meta.start_session(&[], NOW));
    let [first, second] = sessions;
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    let one = database.enroll(first, Digest::of(b"one"), &[1], NOW).await;
    let two = database.enroll(second, Digest::of(b"two"), &[1], NOW).await;
    database.commit(first, "file", one, 1).await.unwrap();
    database.commit(second, "file", two, 1).await.unwrap();
    let seen = async || {
        let node = database.meta.lookup(1, "file").await.unwrap();
        (node.version, database.meta.versions(node.id).await.unwrap().len())
    };
    let before = seen().await;
    database.commit(first, "file", one, 1).await.unwrap();
    assert_eq!(seen().await, before);
    // A repetition after session and version were removed.
    database.meta.expire_sessions(NOW + 1).await.unwrap();
    let node = database.meta.lookup(1, "file").await.unwrap().id;
    database.meta.drop_version(node, 1, false, NOW).await.unwrap();
    database.commit(first, "file", one, 1).await.unwrap();
    assert_eq!(seen().await, (before.0, 1));
    database.meta.remove(1, "file", false, NOW).await.unwrap();
    assert!(database.commit(first, "file", one, 1).await.is_err(), "what was removed stays so");
}

#[tokio::test]
async fn what_builds_on_a_version_that_was_dropped_is_told_so() {
    let database = Database::new(1).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunk = database.enroll(session, Digest::of(b"base"), &[1], NOW).await;
    database.commit(session, "file", chunk, 1).await.unwrap();
    database.meta.remove(1, "file", false, NOW).await.unwrap();
    database.meta.end_session(session).await.unwrap();
    let later = NOW + 86_400_000;
    assert_eq!(database.collect(1, &[(Digest::of(b"base"), 86_400)], later).await, [true]);
    let next = database.meta.start_session(&[], later).await.unwrap();
    let refused = database.commit(next, "file", chunk, 1).await;
    assert!(matches!(refused, Err(crate::meta::MetaError::Gone)), "{refused:?}");
}

#[tokio::test]
async fn a_commit_does_not_name_what_only_the_lost_had() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let (one, two) = (Digest::of(b"one"), Digest::of(b"two"));
    let only = database.enroll(session, one, &[1], NOW).await;
    let both = database.enroll(session, two, &[1, 2], NOW).await;
    database.meta.mark_lost(1, NOW).await.unwrap();
    assert!(database.commit(session, "only", only, 1).await.is_err());
    database.commit(session, "both", both, 2).await.unwrap();
    let needy = database.meta.under_replicated(10).await.unwrap();
    assert_eq!(needy.iter().map(|chunk| chunk.chunk).collect::<Vec<_>>(), [both], "it lacks a copy");
}

#[tokio::test]
async fn what_loses_a_copy_while_repair_looks_at_it_is_looked_at_again() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunk = database.enroll(session, Digest::of(b"a"), &[1], NOW).await;
    database.commit(session, "f", chunk, 2).await.unwrap();
    let seen = database.meta.under_replicated(10).await.unwrap();
    database.meta.insert_copies(&[chunk], 2, NOW).await.unwrap();
    let fault = crate::protocol::Fault { chunk, benefactor: 1, wrong: true };
    database.meta.record_fault(&fault, NOW).await.unwrap();
    database.meta.remove_from_repair(&[(chunk, seen[0].since)]).await.unwrap();
    let left = database.meta.under_replicated(10).await.unwrap();
    assert_eq!(left.len(), 1);
    database.meta.remove_from_repair(&[(chunk, left[0].since)]).await.unwrap();
    assert!(database.meta.under_replicated(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_copy_that_was_put_again_outlives_the_end_of_another() {
    let database = Database::new(2).await;
    let digest = Digest::of(b"a");
    let old = database.meta.start_session(&[], NOW - 50_000).await.unwrap();
    database.enroll(old, digest, &[1, 2], NOW - 50_000).await;
    database.meta.end_session(old).await.unwrap();
    // A session starts, and one benefactor deletes its copy. The session is told that the chunk is unknown,
    // and puts it on the other benefactor.
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    assert_eq!(database.collect(2, &[(digest, 50)], NOW + 1000).await, [true]);
    assert_eq!(database.meta.find_chunks(&[digest], 1, NOW - 1000, NOW + 2000).await.unwrap(), [0]);
    assert_eq!(database.collect(1, &[(digest, 0)], NOW + 3000).await, [false]);
    let chunk = database.enroll(session, digest, &[1], NOW + 4000).await;
    database.commit(session, "f", chunk, 1).await.unwrap();
    assert_eq!(database.collect(1, &[(digest, 5)], NOW + 9000).await, [false]);
    assert_eq!(database.meta.locate(&[chunk]).await.unwrap()[0].places, [1]);
}

#[tokio::test]
async fn a_benefactor_that_lost_its_disk_is_known_to_hold_nothing() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let digest = |n: u64| Digest::of(&n.to_le_bytes());
    // More than one page.
    let many = super::chunks::PAGE as u64 + 10;
    let written: Vec<WrittenChunk> = (0..many)
        .map(|n| WrittenChunk { digest: digest(n), length: 10, stored: 10, places: vec![1, 2] })
        .collect();
    let ids = database.meta.register_chunks(session, &written, NOW).await.unwrap();
    let later = NOW + 600_000;
    assert!(database.collect(1, &[], later).await.is_empty());
    let mut listed: Vec<_> = (0..many).map(|n| (digest(n), 700)).collect();
    listed.sort();
    assert!(database.collect(2, &listed, later).await.iter().all(|go| !go), "a session lives");
    let places = |located: Vec<crate::protocol::LocatedChunk>| {
        located.into_iter().map(|one| one.places).collect::<std::collections::BTreeSet<_>>()
    };
    let found = places(database.meta.locate(&ids).await.unwrap());
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [vec![2]]);
}

#[tokio::test]
async fn a_pin_ends_when_nobody_has_said_it_for_long_and_not_because_the_manager_was_away() {
    let database = Database::new(1).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunk = database.enroll(session, Digest::of(b"a"), &[1], NOW).await;
    database.commit(session, "f", chunk, 1).await.unwrap();
    let node = database.meta.lookup(1, "f").await.unwrap();
    database.meta.hold_pin(node.version, &[7; 32], "alpha/web", NOW, NOW + 1000).await.unwrap();
    database.meta.hold_pin(node.version, &[8; 32], "alpha/web", NOW, NOW + 500).await.unwrap();
    assert_eq!(
        database.meta.held_pins(None).await.unwrap().len(),
        2,
        "two hosts of one name are two holders"
    );
    // The manager restarts much later.
    database.meta.extend_pins(NOW + 5000).await.unwrap();
    assert_eq!(database.meta.expire_pins(NOW + 4999).await.unwrap(), 0);
    database.meta.hold_pin(node.version, &[7; 32], "alpha/web", NOW, NOW + 9000).await.unwrap();
    assert_eq!(database.meta.expire_pins(NOW + 5001).await.unwrap(), 1);
    let refused = database.meta.remove(1, "f", false, NOW + 8999).await;
    assert!(matches!(refused, Err(crate::meta::MetaError::Pinned { number: 1, .. })), "{refused:?}");
    // A pin that has ended has no effect, even before it is deleted.
    database.meta.remove(1, "f", false, NOW + 9001).await.unwrap();
    assert!(database.meta.held_pins(None).await.unwrap().is_empty());
    let gone = database.meta.hold_pin(node.version, &[7; 32], "alpha/web", NOW, NOW + 1).await;
    assert!(matches!(gone, Err(crate::meta::MetaError::NotFound)), "{gone:?}");
}

#[tokio::test]
async fn what_is_counted_by_what_changes_is_what_living_versions_have() {
    use rand::{Rng, SeedableRng, rngs::StdRng};
    for seed in 0..8_u64 {
        let mut random = StdRng::seed_from_u64(seed);
        let database = Database::new(1).await;
        let session = database.meta.start_session(&[], NOW).await.unwrap();
        let all = database.chunks(session, 20, &[1]).await;
        // Chunks by file and version number.
        let mut living: std::collections::BTreeMap<(u64, u32), Vec<u64>> = Default::default();
        let mut newest = [0_u64; 3];
        for number in 0..60_u32 {
            let file = random.random_range(0..3);
            let name = format!("f{file}");
            if random.random_range(0..3) > 0 {
                let count = random.random_range(1..8);
                let content: Vec<u64> = (0..count).map(|_| all[random.random_range(0..all.len())]).collect();
                // Over its own last version, another file's, a removed one, or one that never existed.
                let base = [0, newest[random.random_range(0..3)], 777][random.random_range(0..3)];
                let node = database.version((session, number), &name, &content, base).await.unwrap();
                let version = database.meta.versions(node.id).await.unwrap()[0].number;
                newest[file as usize] = node.version;
                living.insert((file, version), content);
            } else if let Ok(node) = database.meta.lookup(1, &name).await {
                if random.random_range(0..6) == 0 {
                    database.meta.remove(1, &name, false, NOW).await.unwrap();
                    living.retain(|(of, _), _| *of != file);
                } else {
                    let versions = database.meta.versions(node.id).await.unwrap();
                    let one = versions[random.random_range(0..versions.len())].number;
                    if database.meta.drop_version(node.id, one, false, NOW).await.is_ok() {
                        living.remove(&(file, one));
                    }
                }
            }
            let used: std::collections::BTreeSet<u64> = living.values().flatten().copied().collect();
            let counted = database.meta.totals().await.unwrap().chunks;
            assert_eq!(counted, used.len() as u64, "seed {seed}, step {number}");
        }
    }
}

#[tokio::test]
async fn what_lacks_a_copy_or_is_out_of_reach_is_not_built_upon_unasked() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let all = database.chunks(session, 3, &[1, 2]).await;
    let node = database.version((session, 0), "f", &[all[0], all[1], all[0], all[2]], 0).await.unwrap();
    let standing =
        async |copies| database.meta.find_reusable(node.version, copies, NOW - 1000).await.unwrap();
    assert_eq!(standing(1).await, [true; 4]);
    assert_eq!(standing(2).await, [false; 4], "so many copies were never wanted of it");
    let fault = crate::protocol::Fault { chunk: all[0], benefactor: 1, wrong: true };
    database.meta.record_fault(&fault, NOW).await.unwrap();
    assert_eq!(standing(1).await, [false, true, false, true]);
    let silent = database.meta.find_reusable(node.version, 1, NOW + 1).await.unwrap();
    assert_eq!(silent, [false; 4], "nobody was heard of since");
    let gone = database.meta.find_reusable(999, 1, NOW).await;
    assert!(matches!(gone, Err(crate::meta::MetaError::NotFound)), "{gone:?}");
}

#[tokio::test]
async fn a_version_is_not_built_on_one_whose_last_copies_are_lost() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let all = database.chunks(session, 3, &[1]).await;
    let node = database.version((session, 0), "f", &all, 0).await.unwrap();
    database.meta.mark_lost(1, NOW).await.unwrap();
    let refused = database.version((session, 1), "f", &all, node.version).await;
    assert!(matches!(refused, Err(crate::meta::MetaError::Gone)), "{refused:?}");
    database.meta.remove(1, "f", false, NOW).await.unwrap();
    assert_eq!(database.meta.totals().await.unwrap().chunks, 0, "what was refused counts nothing");
}

#[tokio::test]
async fn a_benefactor_does_not_leave_with_what_a_session_is_about_to_commit() {
    let database = Database::new(2).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunk = database.enroll(session, Digest::of(b"a"), &[1], NOW).await;
    database.meta.start_drain(1, NOW).await.unwrap();
    assert!(!database.meta.leave(1, &[2]).await.unwrap(), "the session may commit it");
    database.commit(session, "f", chunk, 1).await.unwrap();
    database.meta.end_session(session).await.unwrap();
    assert!(!database.meta.leave(1, &[2]).await.unwrap(), "a file has it");
    database.meta.insert_copies(&[chunk], 2, NOW).await.unwrap();
    assert!(database.meta.leave(1, &[2]).await.unwrap());
    assert_eq!(database.meta.locate(&[chunk]).await.unwrap()[0].places, [2]);
}

#[tokio::test]
async fn copies_above_the_required_number_go_and_the_last_required_ones_never() {
    let database = Database::new(4).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let digest = Digest::of(b"a");
    let chunk = database.enroll(session, digest, &[1, 2, 3, 4], NOW).await;
    database.commit(session, "f", chunk, 2).await.unwrap();
    let all = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };
    let released = async |benefactor| {
        database.meta.release_surplus(benefactor, &all, NOW, &Default::default()).await.unwrap()
    };
    let places = async || database.meta.locate(&[chunk]).await.unwrap().remove(0).places;
    // Copies of those that are away for long or leave do not count as standing.
    database.meta.mark_lost(1, NOW).await.unwrap();
    database.meta.start_drain(2, NOW).await.unwrap();
    assert_eq!((released(3).await, released(4).await), (0, 0));
    database.meta.stop_drain(2).await.unwrap();
    assert_eq!((released(2).await, released(3).await, released(4).await), (1, 0, 0));
    assert_eq!(places().await, [1, 3, 4]);
    assert_eq!(released(1).await, 1, "it is back, and its copies were replaced");
    assert_eq!(places().await, [3, 4]);
    let silent = database.meta.release_surplus(3, &all, NOW + 1, &Default::default()).await.unwrap();
    assert_eq!((silent, released(3).await, released(4).await), (0, 0, 0));
}

#[tokio::test]
async fn the_surplus_copy_that_goes_is_not_the_one_in_the_other_rack() {
    let database = Database::new(3).await;
    let racks = ["a", "a", "b"].map(|rack| MemberLabels { rack: rack.into(), ..MemberLabels::default() });
    let domains = Domains::new((1..).zip(&racks));
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunk = database.enroll(session, Digest::of(b"one"), &[1, 2, 3], NOW).await;
    database.commit(session, "file", chunk, 2).await.unwrap();
    let all = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };
    let released =
        async |benefactor| database.meta.release_surplus(benefactor, &all, NOW, &domains).await.unwrap();
    assert_eq!(released(3).await, 0, "the others are in one rack");
    assert_eq!(released(1).await, 1);
    assert_eq!((released(2).await, released(3).await), (0, 0), "no other is too many");
}

#[tokio::test]
async fn only_files_below_a_policy_that_removes_versions_are_read_for_it() {
    let database = Database::new(1).await;
    let session = database.meta.start_session(&[], NOW).await.unwrap();
    let chunks = database.chunks(session, 3, &[1]).await;
    let mut nodes = Vec::new();
    for (number, (name, chunk)) in (0..).zip(["free", "kept", "last"].into_iter().zip(&chunks)) {
        nodes.push(database.version((session, number), name, &[*chunk], 0).await.unwrap().id);
    }
    let read = async || {
        let mut names: Vec<_> = Vec::new();
        for folder in database.meta.policy_folders().await.unwrap() {
            let only_own = database.meta.policy(folder).await.unwrap().1.keep == Retention::default();
            names.extend(
                database.meta.versions_in(folder, only_own).await.unwrap().into_iter().map(|one| one.name),
            );
        }
        names.sort();
        names
    };
    assert!(read().await.is_empty(), "without policies all versions are retained");
    let all = Policy { copies: 3, ..Policy::default() };
    database.meta.set_policy(nodes[1], Some(&all), NOW).await.unwrap();
    assert!(read().await.is_empty());
    let last = Policy { keep: Retention { last: Some(1), ..Retention::default() }, ..Policy::default() };
    database.meta.set_policy(nodes[2], Some(&last), NOW).await.unwrap();
    assert_eq!(read().await, ["kept", "last"], "these have policies of their own");
    database.meta.set_policy(1, Some(&last), NOW).await.unwrap();
    assert_eq!(read().await, ["free", "kept", "last"]);
}

#[tokio::test]
async fn a_commit_that_fails_in_a_batch_fails_alone_and_takes_no_other_with_it() {
    let database = Database::new(1).await;
    let (meta, open) = (&database.meta, async || database.meta.start_session(&[], NOW).await.unwrap());
    let (session, ended) = (open().await, open().await);
    let chunks = database.chunks(session, 20, &[1]).await;
    database.version((session, 0), "old", &chunks[..2], 0).await.unwrap();
    meta.end_session(ended).await.unwrap();
    let before = meta.syncs_requested();
    // Nobody can begin a transaction until all are waiting.
    let held = meta.write.begin().await.unwrap();
    let send =
        |session, number, name: &str, chunks: &[u64]| database.send((session, number), name, chunks, 1);
    let mut sent: Vec<_> = (1..=10).map(|n| send(session, n, &format!("f{n}"), &chunks[..3])).collect();
    sent.push(send(session, 11, "gone", &[chunks[0], 999_999]));
    sent.push(send(ended, 12, "over", &chunks[..1]));
    sent.push(send(session, 13, "old", &chunks[1..4]));
    sent.push(send(session, 14, "old", &chunks[5..6]));
    sent.push(send(session, 14, "old", &chunks[5..6]));
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(held);
    let mut nodes = Vec::new();
    for one in sent {
        nodes.push(one.await.unwrap());
    }
    use crate::meta::MetaError;
    assert!(nodes[..10].iter().all(Result::is_ok), "{nodes:?}");
    assert!(matches!(nodes[10], Err(MetaError::Gone)), "{:?}", nodes[10]);
    assert!(matches!(nodes[11], Err(MetaError::SessionOver)), "{:?}", nodes[11]);
    assert!(meta.lookup(1, "gone").await.is_err() && meta.lookup(1, "over").await.is_err());
    let old = meta.lookup(1, "old").await.unwrap();
    let numbers: Vec<u32> = meta.versions(old.id).await.unwrap().iter().map(|one| one.number).collect();
    assert_eq!(numbers, [3, 2, 1], "two commits to a file, and one of them twice");
    assert_eq!((old.size, meta.totals().await.unwrap().chunks), (10, 5));
    let shared = meta.syncs_requested() - before;
    assert!(shared < 8, "{shared} syncs for 15 commits");
}

#[tokio::test]
async fn chunks_that_commits_of_a_batch_share_count_for_each_and_have_the_most_copies_of_all() {
    let database = Database::new(2).await;
    let meta = &database.meta;
    let session = meta.start_session(&[], NOW).await.unwrap();
    let chunks = database.chunks(session, 6, &[1, 2]).await;
    let held = meta.write.begin().await.unwrap();
    let sent = [(1, &chunks[..4], 1), (2, &chunks[..4], 1), (3, &chunks[2..], 2)];
    let sent = sent.map(|(number, chunks, copies)| {
        database.send((session, number), &format!("f{number}"), chunks, copies)
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(held);
    for one in sent {
        one.await.unwrap().unwrap();
    }
    let rows =
        super::driver::query("SELECT refs, want FROM chunk ORDER BY id").fetch_all(&meta.read).await.unwrap();
    let found: Vec<(i64, i64)> =
        rows.iter().map(|row| (row.try_get(0).unwrap(), row.try_get(1).unwrap())).collect();
    assert_eq!(found, [(2, 1), (2, 1), (3, 2), (3, 2), (1, 2), (1, 2)]);
}
