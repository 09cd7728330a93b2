//! Tests of places and secrets: more copies of a file, a benefactor that joins, one that drains, encryption.

use crate::common::{Cluster, noise, until};
use std::sync::Arc;
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk::Chunking,
    client::{Pool, PoolError, Result, Secret, WriteFile, WriteOptions},
    policy::{Policy, Retention},
    protocol::{
        BenefactorStatus, FindChunks, FindGarbage, Heartbeat, Inventory, RegisterChunks, Reserve,
        ReserveSpace, WrittenChunk, code, get_bits, get_numbers, put_aged, put_digests, put_written,
    },
};
use whimbrel_wire::Identity;

fn one_copy() -> Policy {
    Policy { copies: 1, cutting: Chunking::Content { average: 16 << 10 }, ..Policy::default() }
}

fn set(cluster: &Cluster, node: u64, policy: Policy) {
    cluster.pool.block(cluster.pool.set_policy(node, Some(policy))).unwrap();
}

#[test]
fn a_file_gets_more_copies_than_its_folder_wants_and_its_next_versions_too() {
    let cluster = Cluster::new(3);
    set(&cluster, 1, one_copy());
    let (important, other) = (noise(1, 1 << 20), noise(2, 1 << 20));
    let node = cluster.write("important", &important);
    cluster.write("other", &other);
    let chunks = cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    assert_eq!(cluster.copies(), chunks);
    let of_file = cluster.pool.block(cluster.pool.versions(node.id)).unwrap()[0].chunks;
    set(&cluster, node.id, Policy { copies: 3, ..one_copy() });
    until("the file has three", || cluster.copies() == chunks + 2 * of_file);
    assert_eq!(cluster.pool.block(cluster.pool.policy(1)).unwrap().1.copies, 1);
    cluster.write("important", &noise(3, 100_000));
    let later = cluster.pool.block(cluster.pool.versions(node.id)).unwrap()[0].chunks;
    until("the next version has three", || cluster.copies() >= chunks + 2 * of_file + 3 * later);
    let last = Retention { last: Some(1), ..Retention::default() };
    set(&cluster, node.id, Policy { keep: last, ..one_copy() });
    let gone = cluster.pool.block(cluster.pool.purge(false)).unwrap();
    assert_eq!(gone.iter().map(|gone| (&*gone.path, gone.version)).collect::<Vec<_>>(), [("/important", 1)]);
}

#[test]
fn a_benefactor_that_joins_gets_its_share_and_nothing_is_lost_on_the_way() {
    let mut cluster = Cluster::new(1);
    set(&cluster, 1, one_copy());
    let data = noise(5, 4 << 20);
    let node = cluster.write("state", &data);
    let chunks = cluster.copies();
    cluster.add_benefactor(4 << 30);
    cluster.wait_online(2);
    // One file is open for writing all the time.
    let open = cluster.open("open", WriteOptions::default());
    open.write_at(0, b"a").unwrap();
    open.sync().unwrap();
    let manager = cluster.manager.as_ref().unwrap().1.clone();
    let moved = || cluster.runtime.block_on(manager.balance()).unwrap();
    until("chunks have moved", || moved() > 0);
    until("and no more do", || moved() == 0);
    let joined = cluster.benefactors[1].store.as_ref().unwrap().usage().chunks;
    assert!(joined * 3 > chunks && joined * 3 < chunks * 2, "{joined} of {chunks}");
    assert!(cluster.read_version(node.version) == data);
    let status = cluster.pool.block(cluster.pool.status()).unwrap();
    assert_eq!((status.lost, status.benefactors.iter().map(|b| b.faults).sum::<u64>()), (0, 0));
}

#[test]
fn small_open_files_do_not_reserve_the_whole_pool() {
    let mut cluster = Cluster::new(0);
    cluster.add_benefactor(1 << 30);
    cluster.wait_online(1);
    set(&cluster, 1, one_copy());
    let open: Vec<WriteFile> = (0..20)
        .map(|number| {
            let file = cluster.open(&format!("f{number}"), WriteOptions::default());
            file.write_at(0, &noise(number, 1000)).unwrap();
            file.sync().unwrap();
            file
        })
        .collect();
    open.iter().for_each(|file| drop(file.commit().unwrap()));
}

#[test]
fn a_benefactor_that_is_told_to_leave_ends_when_all_is_elsewhere() {
    let cluster = Cluster::new(3);
    set(&cluster, 1, Policy { copies: 2, ..one_copy() });
    let data = noise(8, 3 << 20);
    let node = cluster.write("state", &data);
    let unknown = cluster.pool.block(cluster.pool.drain("b9", true)).unwrap_err();
    assert_eq!(unknown.code(), Some(code::NOT_FOUND));
    cluster.pool.block(cluster.pool.drain("b0", true)).unwrap();
    cluster.pool.block(cluster.pool.drain("b0", false)).unwrap();
    cluster.pool.block(cluster.pool.drain("b1", true)).unwrap();
    until("it has left", || cluster.benefactors[1].task.as_ref().unwrap().is_finished());
    let status = cluster.pool.block(cluster.pool.status()).unwrap();
    let names: Vec<_> = status.benefactors.iter().map(|b| (&*b.name, &*b.state)).collect();
    assert_eq!(names, [("b0", "online"), ("b2", "online")]);
    assert_eq!(
        cluster.benefactors[0].store.as_ref().unwrap().usage().chunks,
        status.chunks,
        "two copies are left"
    );
    assert!(cluster.read_version(node.version) == data);
}

/// The heartbeat of a benefactor with much room that nobody can reach.
fn heartbeat_of_nobody(pool: &Pool) {
    let status = BenefactorStatus {
        name: "nobody".into(),
        address: crate::common::free_port(),
        pool: 0,
        capacity: 1 << 50,
        used: 0,
        free: 1 << 50,
        chunks: 0,
        draining: false,
        owed: 0,
    };
    pool.block(pool.call_manager::<Heartbeat>(&status, bytes::Bytes::new())).unwrap();
}

#[test]
fn repair_does_not_insist_on_the_roomiest_if_it_takes_nothing() {
    let mut cluster = Cluster::new(1);
    set(&cluster, 1, Policy { copies: 2, ..one_copy() });
    let data = noise(9, 1 << 20);
    let node = cluster.write("state", &data);
    let nobody = cluster.newcomer("nobody");
    heartbeat_of_nobody(&nobody);
    cluster.add_benefactor(4 << 30);
    let status = || cluster.pool.block(cluster.pool.status()).unwrap();
    until("all chunks have two copies", || {
        heartbeat_of_nobody(&nobody);
        status().repair == 0
    });
    assert!(cluster.read_version(node.version) == data);
    assert_eq!(cluster.benefactors[1].store.as_ref().unwrap().usage().chunks, status().chunks);
}

#[test]
fn what_is_open_for_reading_stays_readable_when_it_is_removed_and_goes_when_it_is_closed() {
    let cluster = Cluster::with(1, |options| options.lease = 3);
    set(&cluster, 1, one_copy());
    let data = noise(10, 1 << 20);
    let node = cluster.write("state", &data);
    let reader = cluster.fresh_pool();
    let file = reader.block(reader.open(node.version)).unwrap();
    cluster.pool.block(cluster.pool.remove(1, "state", false)).unwrap();
    // The benefactor asks, as it does all the time.
    let benefactor = cluster.pool_as(Identity::load_or_create(&cluster.benefactors[0].data).unwrap(), None);
    let all = Inventory { from: [0; 32], to: [0xff; 32], age: 0 };
    let may_go = || {
        let listed = cluster.benefactors[0].store.as_ref().unwrap().list(&Digest([0; 32]), 20_000);
        let call = benefactor.call_manager::<FindGarbage>(&all, put_aged(&listed));
        let (_, bits) = benefactor.block(call).unwrap();
        get_bits(&bits, listed.len())
    };
    until("its writer has ended its session", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.sessions == 0
    });
    assert!(may_go().iter().all(|go| !go) && !may_go().is_empty());
    let found = reader.block(file.read_at(0, data.len())).unwrap();
    assert!(found == data);
    drop(file);
    until("nothing is left", || cluster.copies() == 0);
}

fn write(pool: &Pool, name: &str, data: &[u8]) -> u64 {
    let file =
        pool.block(WriteFile::open(pool, Cluster::make(name), None, true, WriteOptions::default())).unwrap();
    file.write_at(0, data).unwrap();
    file.commit().unwrap().unwrap().version
}

fn read(pool: &Pool, version: u64) -> Result<Vec<u8>> {
    pool.block(async {
        let file = pool.read(version).await?;
        Ok(file.read_at(0, file.size() as usize).await?.to_vec())
    })
}

#[test]
fn a_copy_that_no_benefactor_confirms_is_not_counted_and_others_send_the_chunk() {
    let cluster = Cluster::new(2);
    let liar = &cluster.pool;
    let digest = Digest::of(b"never sent");
    let session = liar.block(async {
        let ask = Reserve { session: 0, bytes: 1 << 20, unused: 0, width: 2, avoid: Vec::new() };
        liar.call_manager::<ReserveSpace>(&ask, bytes::Bytes::new()).await.unwrap().0
    });
    let places = session.stripe.iter().map(|place| place.id).chain([999]).collect();
    let written = put_written(&[WrittenChunk { digest, length: 10, stored: 10, places }]);
    let refused = liar.block(liar.call_manager::<RegisterChunks>(&session.session, written)).unwrap_err();
    assert_eq!(refused.code(), Some(code::STORAGE));
    let asked = (session.session, 1);
    let known = liar.block(liar.call_manager::<FindChunks>(&asked, put_digests([&digest])));
    assert_eq!(get_numbers(&known.unwrap().1), Some(vec![0]));
}

#[test]
fn sealed_files_are_read_with_their_secret_only_and_equal_chunks_are_kept_once() {
    let cluster = Cluster::new(2);
    set(&cluster, 1, one_copy());
    let ours = Arc::new(Secret::new(&[7; 32]).unwrap());
    let text: Vec<u8> = (0..60_000_u32).flat_map(|n| format!("secret state {n}\n").into_bytes()).collect();
    let pool = cluster.pool_with(Some(ours.clone()));
    let version = write(&pool, "sealed", &text);
    let chunks = cluster.copies();
    write(&cluster.pool_with(Some(ours.clone())), "again", &text);
    assert_eq!(cluster.copies(), chunks, "somebody else with the secret writes the same");
    assert!(read(&cluster.pool_with(Some(ours)), version).unwrap() == text);
    let others = Arc::new(Secret::new(&[8; 32]).unwrap());
    let without = read(&cluster.pool_with(None), version);
    assert!(matches!(without, Err(PoolError::WrongSecret { .. })));
    let others = read(&cluster.pool_with(Some(others)), version);
    assert!(matches!(others, Err(PoolError::WrongSeal { .. })));
    for member in &cluster.benefactors {
        let bytes = std::fs::read(member.data.join("chunks/00000001.seg")).unwrap();
        assert!(!bytes.windows(12).any(|window| window == b"secret state"));
        assert_eq!(
            member.store.as_ref().unwrap().verify().1,
            [],
            "a benefactor can tell a right copy without it"
        );
    }
    let status = cluster.pool.block(cluster.pool.status()).unwrap();
    assert_eq!(
        status.benefactors.iter().map(|b| b.faults).sum::<u64>(),
        0,
        "a wrong secret is nobody's fault"
    );
    let plain = write(&cluster.pool_with(None), "plain", &text);
    let refused = read(&cluster.pool_with(Some(Arc::new(Secret::new(&[7; 32]).unwrap()))), plain);
    assert!(matches!(refused, Err(PoolError::WrongSecret { .. })), "anybody may have written it");
}
