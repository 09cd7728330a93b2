//! Tests of orders to copy chunks: only managers give them, and a writer that loses a benefactor asks for
//! them.

use crate::common::{Cluster, noise, until};
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk::Chunking,
    chunk_map,
    client::WriteOptions,
    connections::{Dialer, TlsDialer},
    policy::{Policy, Safety},
    protocol::{
        BenefactorAddress, CopyChunks, Locate, OrderCopies, ReadMap, Reserve, ReserveSpace, get_bits,
        get_located, put_digests, put_numbers,
    },
};
use whimbrel_wire::{CallError, Code, Identity};

fn set(cluster: &Cluster, copies: u8) {
    let cutting = Chunking::Content { average: 16 << 10 };
    let policy = Policy { copies, cutting, safety: Safety::Pessimistic, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
}

#[test]
fn a_member_that_is_no_manager_cannot_have_a_benefactor_send_chunks() {
    let mut cluster = Cluster::new(1);
    set(&cluster, 1);
    cluster.write("state", &noise(1, 300_000));
    cluster.add_benefactor(4 << 30);
    cluster.wait_online(2);
    let listed = cluster.benefactors[0].store.as_ref().unwrap().list(&Digest([0; 32]), 1000);
    let digests = put_digests(listed.iter().map(|(digest, _)| digest));
    let identity = Arc::new(Identity::load_or_create(&cluster.dir.path().join("client")).unwrap());
    let dialer = TlsDialer::new(identity, "client".parse().unwrap(), ());
    let (source, target) = (&cluster.benefactors[0], &cluster.benefactors[1]);
    let pool = &cluster.pool;
    let connection = pool.block(dialer.dial(&source.listen.to_string(), source.key)).unwrap();
    let to = BenefactorAddress { id: 2, address: target.listen.to_string(), key: target.key };
    let refused = pool.block(connection.request::<CopyChunks>(&to, digests.clone())).unwrap_err();
    assert!(matches!(refused, CallError::Refused { source } if source.code == Code::FORBIDDEN));
    let chunks = || target.store.as_ref().unwrap().usage().chunks;
    assert_eq!(chunks(), 0);
    let order = |session| pool.block(pool.call_manager::<OrderCopies>(&(session, 1, 2), digests.clone()));
    assert_eq!(order(999).unwrap_err().code(), Some(Code(0x408)), "there is no such session");
    let ask = Reserve { session: 0, bytes: 1, unused: 0, width: 1, avoid: Vec::new() };
    let session = pool.block(pool.call_manager::<ReserveSpace>(&ask, Bytes::new())).unwrap().0.session;
    let (_, failed) = order(session).unwrap();
    assert!(!get_bits(&failed, listed.len()).contains(&true));
    assert_eq!(chunks(), listed.len() as u64);
}

#[test]
fn a_writer_that_loses_a_benefactor_commits_with_all_copies_and_does_not_wait_for_repair() {
    let mut cluster = Cluster::with(3, |options| options.repair_every = Duration::from_secs(3600));
    set(&cluster, 2);
    let data = noise(2, 6_000_000);
    let file = cluster.open("state", WriteOptions::default());
    file.write_at(0, &data).unwrap();
    let chunks = |number: usize| cluster.benefactors[number].store.as_ref().unwrap().usage().chunks;
    until("each has some", || (0..3).all(|number| chunks(number) > 50));
    cluster.kill_benefactor(0);
    let version = file.commit().unwrap().unwrap().version;
    let pool = &cluster.pool;
    let (_, map) = pool.block(pool.call_manager::<ReadMap>(&(version, 0), Bytes::new())).unwrap();
    let numbers = chunk_map::decode(&map).unwrap().into_iter().map(|piece| piece.chunk);
    let (_, located) = pool.block(pool.call_manager::<Locate>(&(), put_numbers(numbers))).unwrap();
    // Numbers are given in the order in which benefactors joined.
    let all = pool.block(pool.status()).unwrap().benefactors;
    let mut living: Vec<_> = all.iter().filter(|one| one.name != "b0").map(|one| one.id).collect();
    living.sort();
    assert_eq!(living.len(), 2, "{all:?}");
    for chunk in get_located(&located).unwrap() {
        assert_eq!(chunk.places, living, "two copies, at those that live");
    }
    assert!(cluster.read("state") == data);
}
