//! Tests of the metadata of chunks in pieces: what may go, and what may not.

use super::{LostPiece, Meta, MetaError, NewPiece, Quarantine, driver::query};
use crate::{
    chunk_map::ChunkRef,
    erasure::PieceCounts,
    protocol::{BenefactorStatus, ChunkId, Commit, Fault, Inventory, NewNode, WrittenChunk},
};
use whimbrel_core::Digest;
use whimbrel_wire::PublicKey;

const NOW: i64 = 1_000_000_000;
const COUNTS: PieceCounts = PieceCounts { data: 2, parity: 1 };
const ALL: Inventory = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };

struct Database {
    meta: Meta,
    session: u64,
    dir: tempfile::TempDir,
}

impl Database {
    /// Five benefactors, and a session.
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&dir.path().join("pool.db").display().to_string()).await.unwrap();
        for number in 1..=5 {
            let (name, address) = (format!("b{number}"), format!("h:{number}"));
            let (pool, capacity, used, free, chunks, draining, owed) = (0, 1 << 40, 0, 1 << 40, 0, false, 0);
            let status =
                BenefactorStatus { name, address, pool, capacity, used, free, chunks, draining, owed };
            meta.register(&PublicKey([number; 32]), &status, NOW).await.unwrap();
        }
        let session = meta.start_session(&[], NOW).await.unwrap();
        Self { meta, session, dir }
    }

    async fn commit(&self, name: &str, number: u32, chunk: ChunkId, base: u64) -> super::Result<u64> {
        let make = NewNode { parent: 1, name: name.into(), folder: false, mode: 0o644, uid: 0, gid: 0 };
        let (session, node, size, copies) = (self.session, None, 100_000, 2);
        let commit = Commit { session, number, node, make, size, modified: 0, copies, sent: 0, base };
        let piece = ChunkRef { chunk, length: 100_000, encrypted: false, digest: None };
        Ok(self.meta.commit(&commit, vec![piece], &[], NOW).await?.version)
    }

    async fn register(&self) -> ChunkId {
        let (digest, length, stored, places) = (Digest::of(b"chunk"), 100_000, 100_000, vec![4, 5]);
        let written = WrittenChunk { digest, length, stored, places };
        self.meta.register_chunks(self.session, &[written], NOW).await.unwrap()[0]
    }

    /// A file of one chunk, which is cut into pieces at benefactors 1 to 3; the chunk and its pieces.
    async fn coded(&self) -> (ChunkId, Vec<ChunkId>) {
        let chunk = self.register().await;
        self.commit("file", 0, chunk, 0).await.unwrap();
        let piece = |n: u8| NewPiece { digest: Digest::of(&[n]), length: 1, stored: 1, place: n.into() };
        let pieces: Vec<NewPiece> = (1..=3).map(piece).collect();
        let insert =
            async |session| self.meta.insert_pieces(session, chunk, COUNTS, &pieces, NOW).await.unwrap();
        assert!(!insert(self.session + 1).await, "nobody has retained them");
        assert!(insert(self.session).await);
        assert!(!insert(self.session).await, "it has pieces");
        let coded = self.meta.coded_chunks(&[chunk]).await.unwrap().remove(0);
        (chunk, coded.pieces.iter().map(|piece| piece.chunk).collect())
    }

    async fn lose(&self, piece: ChunkId, benefactor: u16) {
        let fault = Fault { chunk: piece, benefactor, wrong: true };
        self.meta.record_fault(&fault, NOW).await.unwrap();
    }

    async fn surplus(&self, benefactor: u16) -> u64 {
        self.meta.release_surplus(benefactor, &ALL, NOW, &Default::default()).await.unwrap()
    }

    async fn places(&self, chunk: ChunkId) -> Vec<u16> {
        self.meta.locate(&[chunk]).await.unwrap().remove(0).places
    }
}

#[tokio::test]
async fn copies_of_a_chunk_go_when_all_its_pieces_are_there_and_not_while_one_is_lost() {
    let database = Database::new().await;
    let (chunk, pieces) = database.coded().await;
    assert_eq!(database.surplus(4).await, 1);
    database.lose(pieces[0], 1).await;
    assert_eq!((database.surplus(5).await, database.places(chunk).await), (0, vec![5]));
    let lost: Vec<LostPiece> = database.meta.lost_pieces(&[pieces[0], chunk]).await.unwrap();
    assert_eq!((lost.len(), lost[0].of.pieces[1].places.clone()), (1, vec![2]));
    // A copy that nobody counts turns up where it was given up.
    let listed = [(Digest::of(b"chunk"), 1000)];
    let verdict = database.meta.collect_garbage(4, &ALL, &listed, NOW, Quarantine::Off).await.unwrap();
    assert_eq!((verdict, database.places(chunk).await), (vec![false], vec![4, 5]));
    database.meta.insert_copies(&[pieces[0]], 1, NOW).await.unwrap();
    assert_eq!((database.surplus(4).await, database.surplus(5).await), (1, 1));
    assert!(database.places(chunk).await.is_empty());
}

#[tokio::test]
async fn what_has_lost_too_many_pieces_is_neither_promised_nor_built_upon() {
    let database = Database::new().await;
    let (chunk, pieces) = database.coded().await;
    database.surplus(4).await;
    database.surplus(5).await;
    let known = async || database.meta.find_chunks(&[Digest::of(b"chunk")], 2, NOW, NOW).await.unwrap()[0];
    assert_eq!(known().await, chunk, "its pieces are as good as copies");
    let version = database.commit("other", 1, chunk, 0).await.unwrap();
    database.lose(pieces[0], 1).await;
    assert_eq!(known().await, 0, "who has it sends it again");
    database.commit("third", 2, chunk, version).await.unwrap();
    database.lose(pieces[1], 2).await;
    for (name, base) in [("fourth", 0), ("fifth", version)] {
        let refused = database.commit(name, 3, chunk, base).await;
        assert!(matches!(refused, Err(MetaError::Gone)), "{refused:?}");
    }
    // Its content is written again.
    assert_eq!(database.register().await, chunk);
    database.commit("sixth", 4, chunk, 0).await.unwrap();
    assert_eq!((database.surplus(4).await, database.places(chunk).await), (0, vec![4, 5]));
}

#[tokio::test]
async fn a_member_is_not_forgotten_if_that_leaves_too_few_pieces() {
    let database = Database::new().await;
    let (_, pieces) = database.coded().await;
    let forget = async |id| database.meta.remove_member(Some(id), None, false, NOW).await;
    forget(1).await.unwrap();
    database.surplus(4).await;
    database.surplus(5).await;
    assert_eq!(forget(4).await.unwrap().lost, 0, "a copy is left");
    let refused = forget(5).await;
    assert!(matches!(refused, Err(MetaError::LastCopies { chunks: 1 })), "{refused:?}");
    database.meta.insert_copies(&[pieces[0]], 5, NOW).await.unwrap();
    assert_eq!(database.surplus(5).await, 1);
    assert_eq!(forget(2).await.unwrap().lost, 0);
    let refused = forget(3).await;
    assert!(matches!(refused, Err(MetaError::LastCopies { chunks: 1 })), "{refused:?}");
}

#[tokio::test]
async fn pieces_stay_while_a_version_or_a_session_needs_them_and_then_go_whole() {
    let database = Database::new().await;
    let (chunk, pieces) = database.coded().await;
    database.surplus(4).await;
    database.surplus(5).await;
    let (meta, later) = (&database.meta, NOW + 1000);
    let garbage = async |id: u8| {
        let listed = [(Digest::of(&[id]), 1)];
        meta.collect_garbage(id.into(), &ALL, &listed, later + 2000, Quarantine::Off).await.unwrap()[0]
    };
    assert_eq!((meta.release_coded(later).await.unwrap(), garbage(1).await), (0, false));
    assert_eq!(meta.totals().await.unwrap().chunks, 1, "pieces are not content");
    meta.remove(1, "file", false, later).await.unwrap();
    assert_eq!((meta.release_coded(later).await.unwrap(), garbage(1).await), (0, false), "a session lives");
    meta.end_session(database.session).await.unwrap();
    assert_eq!(meta.release_coded(later + 1).await.unwrap(), 1);
    assert!(meta.coded_chunks(&[chunk]).await.unwrap().is_empty());
    assert_eq!((garbage(1).await, garbage(2).await, garbage(3).await), (true, true, true));
    let left: Vec<_> =
        meta.locate(&pieces).await.unwrap().into_iter().filter(|one| one.digest.0 != [0; 32]).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn pieces_are_given_up_also_when_the_copies_of_their_chunk_were_collected_before() {
    let database = Database::new().await;
    let (chunk, pieces) = database.coded().await;
    let (meta, later) = (&database.meta, NOW + 1000);
    meta.remove(1, "file", false, later).await.unwrap();
    meta.end_session(database.session).await.unwrap();
    let collect = async |id: u16, content: &[u8]| {
        let listed = [(Digest::of(content), 1)];
        meta.collect_garbage(id, &ALL, &listed, later + 2000, Quarantine::Off).await.unwrap()[0]
    };
    assert_eq!((collect(4, b"chunk").await, collect(5, b"chunk").await), (true, true));
    assert_eq!(meta.release_coded(later + 1).await.unwrap(), 1);
    assert!(meta.coded_chunks(&[chunk]).await.unwrap().is_empty());
    for id in 1..=3 {
        assert!(collect(id.into(), &[id]).await, "piece {id}");
    }
    let all = [pieces, vec![chunk]].concat();
    let left = meta.locate(&all).await.unwrap().into_iter().filter(|one| one.digest.0 != [0; 32]).count();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn pieces_that_an_earlier_version_left_behind_are_given_up_when_the_database_is_opened() {
    let database = Database::new().await;
    let (chunk, pieces) = database.coded().await;
    let write = async |text: &str| {
        query(text).execute(&database.meta.write).await.unwrap();
    };
    write(&format!("DELETE FROM chunk WHERE id = {chunk}")).await;
    // A file has the bytes of the third piece, too.
    write(&format!("UPDATE chunk SET refs = refs + 1 WHERE id = {}", pieces[2])).await;
    write("UPDATE counter SET value = value - 2 WHERE name = 'schema'").await;
    let path = database.dir.path().join("pool.db").display().to_string();
    let meta = Meta::open(&path).await.unwrap();
    meta.end_session(database.session).await.unwrap();
    for id in 1..=3 {
        let listed = [(Digest::of(&[id]), 1)];
        let verdict = meta.collect_garbage(id.into(), &ALL, &listed, NOW + 2000, Quarantine::Off).await;
        assert_eq!(verdict.unwrap(), [id < 3], "piece {id}");
    }
    assert!(meta.locate(&pieces[..2]).await.unwrap().iter().all(|one| one.digest.0 == [0; 32]));
}
