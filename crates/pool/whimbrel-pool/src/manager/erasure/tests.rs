//! Tests of the rounds that cut old chunks: what they look at, and what is retained meanwhile.

use super::*;
use crate::{
    chunk_map::ChunkRef,
    manager::ManagerOptions,
    meta::Meta,
    protocol::{BenefactorStatus, Commit, Inventory, MadePiece, NewNode, WrittenChunk, get_digests},
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use whimbrel_core::Digest;
use whimbrel_wire::{
    Answer, BoxFuture, Connection, Endpoint, Peer, PeerIdentity, PublicKey, Refusal, Reply, Request, Rights,
    Service, Trust, connect_io,
};

async fn service(dir: &std::path::Path) -> ManagerService {
    let meta = Meta::open(&dir.join("pool.db").display().to_string()).await.unwrap();
    let options = ManagerOptions::new(dir.to_owned(), "127.0.0.1:0".parse().unwrap());
    let trust = Arc::new(Trust::load(dir).unwrap());
    ManagerService::start(meta, trust, &options).await.unwrap()
}

fn new(parent: NodeId, name: &str, folder: bool) -> NewNode {
    NewNode { parent, name: name.into(), folder, mode: 0, uid: 0, gid: 0 }
}

/// A benefactor that makes pieces, and asks what it may delete before it says that it has made them.
struct Cutter {
    manager: ManagerService,
    given_up: Arc<AtomicUsize>,
}

impl Service for Cutter {
    fn handle<'a>(&'a self, _peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let order = request.decode::<CodeChunks>()?;
            let mut made = Vec::new();
            for chunk in get_digests(&request.payload).ok_or_else(|| Refusal::unknown_kind(0))? {
                let digest = |number: usize| Digest::of(&[&chunk.0[..], &[number as u8]].concat());
                let piece = |number| MadePiece { digest: digest(number), length: 9, stored: 9 };
                made.push((0..order.counts.all()).map(piece).collect::<Vec<_>>());
            }
            let listed: Vec<(Digest, u32)> = made.iter().flatten().map(|piece| (piece.digest, 0)).collect();
            let all = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };
            let (meta, now) = (&self.manager.shared.meta, self.manager.now());
            let may_go = meta.collect_garbage(order.at, &all, &listed, now, Quarantine::Off).await?;
            self.given_up.fetch_add(may_go.into_iter().filter(|go| *go).count(), Ordering::Relaxed);
            Reply::of::<CodeChunks>(&made, Bytes::new())
        })
    }
}

async fn connection(to: Cutter) -> Connection {
    let ((near_read, near_write), (far_read, far_write)) = {
        let (near, far) = tokio::io::duplex(1 << 20);
        (tokio::io::split(near), tokio::io::split(far))
    };
    let (near, far) =
        (Endpoint::new("manager".parse().unwrap(), ()), Endpoint::new("b".parse().unwrap(), to));
    let protocols = || [crate::protocol::PROTOCOL];
    let (near, far) = (near.with_protocols(protocols()), far.with_protocols(protocols()));
    let serving = tokio::spawn(async move {
        let served = connect_io(far_read, far_write, PeerIdentity::Stdio, Rights::all(), &far).await.unwrap();
        served.closed().await
    });
    drop(serving);
    connect_io(near_read, near_write, PeerIdentity::Stdio, Rights::all(), &near).await.unwrap()
}

#[tokio::test]
async fn no_piece_may_be_deleted_between_its_making_and_its_counting() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path()).await;
    let (meta, now, given_up) = (&service.shared.meta, service.now(), Arc::<AtomicUsize>::default());
    for number in 1..=6 {
        let (name, address, key) = (format!("b{number}"), format!("h:{number}"), PublicKey([number; 32]));
        let (pool, capacity, used, free, chunks, draining, owed) = (0, 1 << 40, 0, 1 << 40, 0, false, 0);
        let status = BenefactorStatus { name, address, pool, capacity, used, free, chunks, draining, owed };
        meta.register(&key, &status, now).await.unwrap();
        let cutter = Cutter { manager: service.clone(), given_up: given_up.clone() };
        let cutter = connection(cutter).await;
        service.shared.connections().insert(key, cutter);
    }
    let session = meta.start_session(&[], now).await.unwrap();
    let (digest, length) = (Digest::of(b"chunk"), 100_000);
    let written = WrittenChunk { digest, length, stored: length, places: vec![1, 2] };
    let chunk = meta.register_chunks(session, &[written], now).await.unwrap()[0];
    let (number, node, make) = (0, None, new(1, "file", false));
    let (size, modified, copies, sent, base) = (length.into(), 0, 2, 0, 0);
    let commit = Commit { session, number, node, make, size, modified, copies, sent, base };
    let piece = ChunkRef { chunk, length, encrypted: false, digest: None };
    meta.commit(&commit, vec![piece], &[], now).await.unwrap();
    // No writer is left whose session would retain what is new.
    meta.end_session(session).await.unwrap();
    meta.set_coding(1, Some(&Coding { pieces: "4+2".parse().unwrap(), after: 0 })).await.unwrap();
    assert_eq!(service.code_old().await.unwrap(), 1);
    assert_eq!(given_up.load(Ordering::Relaxed), 0);
    assert_eq!(meta.coded_chunks(&[chunk]).await.unwrap()[0].pieces.len(), 6);
}

#[tokio::test]
async fn a_round_looks_only_at_versions_that_are_new_and_remembers_when_they_are_old() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path()).await;
    let (meta, now) = (&service.shared.meta, service.now());
    let mut folders = Vec::new();
    for name in ["coded", "not"] {
        folders.push(meta.make(&new(1, name, true), now).await.unwrap().id);
    }
    let coding = Coding { pieces: "4+2".parse().unwrap(), after: 3600 };
    meta.set_coding(folders[0], Some(&coding)).await.unwrap();
    let session = meta.start_session(&[], now).await.unwrap();
    let mut number = 0;
    let mut write = async |folder| {
        number += 1;
        let (node, make) = (None, new(folder, &format!("f{number}"), false));
        let (size, modified, copies, sent, base) = (0, 0, 1, 0, 0);
        let commit = Commit { session, number, node, make, size, modified, copies, sent, base };
        meta.commit(&commit, Vec::new(), &[], now).await.unwrap().version
    };
    let first = write(folders[0]).await;
    write(folders[0]).await;
    write(folders[1]).await;
    let look = async || service.look_for_uncoded().await.unwrap();
    let waiting = || lock(&service.shared.coding_rounds).due.len();
    assert_eq!((look().await, waiting()), (3, 2));
    assert_eq!((look().await, waiting()), (0, 2), "nothing is new");
    write(folders[0]).await;
    assert_eq!((look().await, waiting()), (1, 3));
    let due = |at: i64| lock(&service.shared.coding_rounds).next(at).map(|(version, ..)| version);
    assert_eq!(due(now + 3_599_000), None, "too young");
    assert_eq!(due(now + 3_600_000), Some(first));
    assert_eq!(service.code_old().await.unwrap(), 0);
    service.coding_changed();
    assert_eq!((look().await, waiting()), (4, 3), "all of them");
    meta.set_coding(folders[0], Some(&Coding { after: 0, ..coding })).await.unwrap();
    service.coding_changed();
    // There is nothing to cut in empty files.
    assert_eq!(service.code_old().await.unwrap(), 0);
    assert_eq!(waiting(), 0);
    service.coding_changed();
    assert_eq!(look().await, 1, "what was looked at is marked");
}
