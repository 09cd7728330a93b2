//! Tests of erasure coding: old versions are kept in pieces, read with hosts gone, made again, and removed.

use crate::common::{Cluster, noise, until};
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use whimbrel_pool::{
    chunk::Chunking,
    chunk_map,
    client::{Pool, Secret, WriteFile, WriteOptions},
    erasure::Coding,
    policy::Policy,
    protocol::{CodedChunk, Locate, LocatePieces, ReadMap, get_located, put_numbers},
};

const CHUNK: usize = 128 << 10;
const CHUNKS: usize = 10;

/// Silence after which a killed benefactor is lost, and one on a busy computer is not.
const LOST_AFTER: Duration = Duration::from_secs(20);

fn cluster(benefactors: usize) -> Cluster {
    let cluster = Cluster::with(benefactors, |options| options.lost_after = LOST_AFTER);
    let policy = Policy { copies: 2, cutting: Chunking::Fixed { size: CHUNK as u32 }, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    cluster
}

fn code(cluster: &Cluster, after: u64) {
    let coding = Coding { pieces: "4+2".parse().unwrap(), after };
    cluster.pool.block(cluster.pool.set_coding(1, Some(coding))).unwrap();
}

fn numbers(pool: &Pool, version: u64) -> Vec<u64> {
    let (_, map) = pool.block(pool.call_manager::<ReadMap>(&(version, 0), Bytes::new())).unwrap();
    chunk_map::decode(&map).unwrap().iter().map(|piece| piece.chunk).collect()
}

/// Counted copies of a version's chunks, and the pieces of those that are kept so.
fn kept(pool: &Pool, version: u64) -> (usize, Vec<CodedChunk>) {
    let chunks = numbers(pool, version);
    let payload = put_numbers(chunks);
    let (_, located) = pool.block(pool.call_manager::<Locate>(&(), payload.clone())).unwrap();
    let copies = get_located(&located).unwrap().iter().map(|one| one.places.len()).sum();
    let (_, coded) = pool.block(pool.call_manager::<LocatePieces>(&(), payload)).unwrap();
    (copies, postcard::from_bytes(&coded).unwrap())
}

fn wait_coded(cluster: &Cluster, version: u64) {
    until("all is kept in pieces only", || {
        let (copies, coded) = kept(&cluster.pool, version);
        copies == 0 && coded.len() == CHUNKS
    });
}

/// Whether each chunk has all its pieces, each at a benefactor of its own.
fn is_whole(coded: &[CodedChunk]) -> bool {
    coded.iter().all(|chunk| {
        let mut places: Vec<u16> =
            chunk.pieces.iter().flat_map(|piece| piece.places.first().copied()).collect();
        places.sort_unstable();
        places.dedup();
        places.len() == chunk.counts.data as usize + chunk.counts.parity as usize
    })
}

#[test]
fn an_old_file_is_read_with_any_two_hosts_gone_and_with_two_more_after_its_pieces_were_made_again() {
    let mut cluster = cluster(8);
    let data = noise(1, CHUNK * CHUNKS);
    let node = cluster.write("state", &data);
    assert_eq!(kept(&cluster.pool, node.version).0, CHUNKS * 2, "new data has copies");
    code(&cluster, 0);
    wait_coded(&cluster, node.version);
    assert!(is_whole(&kept(&cluster.pool, node.version).1));
    for number in [0, 1] {
        cluster.kill_benefactor(number);
    }
    assert!(cluster.read_version(node.version) == data, "two hosts are gone");
    let status = |cluster: &Cluster| cluster.pool.block(cluster.pool.status()).unwrap();
    until("they are lost", || status(&cluster).benefactors.iter().filter(|b| b.state == "lost").count() == 2);
    until("the pieces are made again", || {
        let status = status(&cluster);
        status.repair == 0 && status.lost == 0 && is_whole(&kept(&cluster.pool, node.version).1)
    });
    for number in [2, 3] {
        cluster.kill_benefactor(number);
    }
    assert!(cluster.read_version(node.version) == data, "four hosts are gone, two at a time");
}

#[test]
fn a_file_in_pieces_stays_encrypted_is_built_upon_and_leaves_nothing_when_it_is_removed() {
    let cluster = cluster(6);
    let secret = || Some(Arc::new(Secret::new(&[7; 32]).unwrap()));
    let sealed = cluster.pool_with(secret());
    let data = noise(2, CHUNK * CHUNKS);
    let write = |data: &[u8]| {
        let node = sealed.block(sealed.lookup(1, "state")).ok();
        let open = WriteFile::open(&sealed, Cluster::make("state"), node, true, WriteOptions::default());
        let file = sealed.block(open).unwrap();
        file.write_at(0, data).unwrap();
        file.commit().unwrap().unwrap()
    };
    let read = |version| {
        let pool = cluster.pool_with(secret());
        pool.block(async {
            let file = pool.read(version).await?;
            file.read_at(0, file.size() as usize).await
        })
    };
    let node = write(&data);
    code(&cluster, 0);
    wait_coded(&cluster, node.version);
    assert!(read(node.version).unwrap() == data);
    assert!(cluster.try_read(node.version).is_err(), "without the secret");
    let mut next = data.clone();
    next[..CHUNK].copy_from_slice(&noise(3, CHUNK));
    let second = write(&next);
    // Makes the manager look again at once.
    code(&cluster, 0);
    wait_coded(&cluster, second.version);
    assert!(read(second.version).unwrap() == next && read(node.version).unwrap() == data);
    cluster.pool.block(cluster.pool.remove(1, "state", false)).unwrap();
    until("nothing is left", || cluster.copies() == 0);
}

#[test]
fn a_piece_that_rots_is_read_around_and_made_again_and_young_files_keep_their_copies() {
    use std::{fs::File, os::unix::fs::FileExt};
    let cluster = cluster(7);
    let data = noise(4, CHUNK * CHUNKS);
    let node = cluster.write("state", &data);
    code(&cluster, 0);
    wait_coded(&cluster, node.version);
    code(&cluster, 3600);
    let young = cluster.write("young", &noise(5, CHUNK * 2));
    // Everything that one benefactor has.
    let path = cluster.benefactors[0].data.join("chunks/00000001.seg");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let length = file.metadata().unwrap().len();
    for at in (2000..length).step_by(8000) {
        file.write_all_at(b"rot", at).unwrap();
    }
    assert!(cluster.read_version(node.version) == data);
    // Benefactors are listed as they joined.
    let faults = || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.benefactors.iter().find(|one| one.name == "b0").unwrap().faults
    };
    until("the reader has reported it", || faults() > 0);
    until("the pieces are made again", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.repair == 0 && status.lost == 0 && is_whole(&kept(&cluster.pool, node.version).1)
    });
    assert!(cluster.read_version(node.version) == data);
    let (copies, coded) = kept(&cluster.pool, young.version);
    assert_eq!((copies, coded), (4, Vec::new()), "it is not old");
}

#[test]
fn pieces_work_the_same_in_postgresql() {
    let dir = tempfile::tempdir().unwrap();
    let server = crate::postgres::start(dir.path());
    let url = server.url.clone();
    let mut cluster = Cluster::with(7, move |options| {
        options.database = Some(url.clone());
        options.lost_after = LOST_AFTER;
    });
    let policy = Policy { copies: 2, cutting: Chunking::Fixed { size: CHUNK as u32 }, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    let data = noise(6, CHUNK * CHUNKS);
    let node = cluster.write("state", &data);
    code(&cluster, 0);
    wait_coded(&cluster, node.version);
    cluster.kill_benefactor(0);
    assert!(cluster.read_version(node.version) == data);
    until("the pieces are made again", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.benefactors.iter().any(|b| b.state == "lost")
            && status.repair == 0
            && is_whole(&kept(&cluster.pool, node.version).1)
    });
    assert!(cluster.write("again", &data).version > 0, "built upon chunks in pieces");
    let forgotten = cluster.pool.block(cluster.pool.forget("b0", false)).unwrap();
    assert_eq!(forgotten.lost, 0);
    for name in ["state", "again"] {
        cluster.pool.block(cluster.pool.remove(1, name, false)).unwrap();
    }
    let left = "SELECT count(*) FROM piece";
    until("their pieces are given up", || server.ask(left) == "0");
}

#[test]
fn those_that_are_counted_lost_after_a_short_silence_are_asked_all_the_same() {
    let mut cluster = cluster(6);
    let (data, copied) = (noise(7, CHUNK * CHUNKS), noise(8, CHUNK * CHUNKS));
    let (node, other) = (cluster.write("state", &data), cluster.write("copied", &copied));
    let coding = Coding { pieces: "4+2".parse().unwrap(), after: 0 };
    cluster.pool.block(cluster.pool.set_coding(node.id, Some(coding))).unwrap();
    wait_coded(&cluster, node.version);
    cluster.kill_manager();
    // Each is lost from soon after a report of it until the next one, a second later.
    cluster.tweak = Box::new(|options| options.lost_after = Duration::from_millis(1));
    cluster.start_manager();
    let lost = |cluster: &Cluster| {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.benefactors.iter().filter(|one| one.state == "lost").count()
    };
    for round in 0..20 {
        until("most are lost", || lost(&cluster) >= 5);
        assert!(cluster.try_read(node.version).unwrap() == data, "round {round}");
        assert!(cluster.try_read(other.version).unwrap() == copied, "round {round}");
    }
    cluster.kill_manager();
    cluster.tweak = Box::new(|options| options.lost_after = LOST_AFTER);
    cluster.start_manager();
    cluster.wait_online(6);
    until("everything has its copies and pieces", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.repair == 0 && status.lost == 0
    });
    assert!(cluster.read_version(node.version) == data && cluster.read_version(other.version) == copied);
}
