//! Tests of sealed chunk maps: somebody with the manager's database changes what it says of encrypted files.

use crate::{
    common::{Cluster, noise},
    mount::mounted_as,
};
use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};
use sqlx::{Connection, Row, SqliteConnection};
use std::{fs, sync::Arc};
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_pool::{
    chunk::Chunking,
    chunk_map::{self, ChunkRef},
    client::{Pool, PoolError, Result, Secret, WriteFile, WriteOptions},
    policy::Policy,
    protocol::{
        Commit, CommitFile, Node, PutChunks, RegisterChunks, Reserve, ReserveSpace, WrittenChunk,
        get_numbers, put_written,
    },
};

const CHUNK: usize = 4096;

struct Sealed {
    cluster: Cluster,
    pool: Pool,
}

impl Sealed {
    fn new() -> Self {
        let cluster = Cluster::new(1);
        let cutting = Chunking::Fixed { size: CHUNK as u32 };
        let policy = Policy { copies: 1, cutting, ..Policy::default() };
        cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
        let pool = Self::handle(&cluster);
        Self { cluster, pool }
    }

    /// A handle with the secret and without cached data.
    fn handle(cluster: &Cluster) -> Pool {
        cluster.pool_with(Some(Arc::new(Secret::new(&[7; 32]).unwrap())))
    }

    fn write(&self, name: &str, data: &[u8], empty: bool) -> Node {
        let node = self.pool.block(self.pool.lookup(1, name)).ok();
        let make = Cluster::make(name);
        let opened = WriteFile::open(&self.pool, make, node, empty, WriteOptions::default());
        let file = self.pool.block(opened).unwrap();
        file.write_at(file.size(), data).unwrap();
        file.commit().unwrap().unwrap()
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let pool = Self::handle(&self.cluster);
        pool.block(async {
            let node = pool.lookup(1, name).await?;
            let file = pool.open_named(node.version, name).await?;
            Ok(file.read_at(0, file.size() as usize).await?.to_vec())
        })
    }

    /// Changes the database behind the manager's back.
    fn sql(&self, text: &str) {
        let url = format!("sqlite://{}", self.cluster.dir.path().join("manager/pool.db").display());
        self.cluster.runtime.block_on(async {
            let mut database = SqliteConnection::connect(&url).await.unwrap();
            let changed = sqlx::query(sqlx::AssertSqlSafe(text.to_owned())).execute(&mut database).await;
            assert!(changed.unwrap().rows_affected() > 0, "{text}");
        });
    }

    fn map(&self, version: u64) -> Vec<u8> {
        let url = format!("sqlite://{}", self.cluster.dir.path().join("manager/pool.db").display());
        self.cluster.runtime.block_on(async {
            let mut database = SqliteConnection::connect(&url).await.unwrap();
            let row = sqlx::query("SELECT map FROM version WHERE id = $1").bind(version as i64);
            row.fetch_one(&mut database).await.unwrap().get(0)
        })
    }

    fn set_map(&self, version: u64, map: &[u8]) {
        let hex: String = map.iter().map(|byte| format!("{byte:02x}")).collect();
        self.sql(&format!("UPDATE version SET map = x'{hex}' WHERE id = {version}"));
    }
}

fn pages(seeds: &[u64]) -> Vec<u8> {
    seeds.iter().flat_map(|seed| noise(*seed, CHUNK)).collect()
}

#[test]
fn pieces_that_are_moved_left_out_or_come_from_elsewhere_are_noticed() {
    let sealed = Sealed::new();
    let old = sealed.write("state", &pages(&[1, 2, 3, 4]), true);
    let node = sealed.write("state", &pages(&[1, 2, 5, 6]), true);
    let other = sealed.write("other", &pages(&[11, 12, 13, 14]), true);
    let whole = sealed.map(node.version);
    let (pieces, seal) = chunk_map::decode_sealed(&whole).unwrap();
    let [before, elsewhere] =
        [old.version, other.version].map(|version| chunk_map::decode(&sealed.map(version)).unwrap());
    let mut swapped = pieces.clone();
    swapped.swap(0, 1);
    let rolled_back: Vec<ChunkRef> = [&pieces[..2], &before[2..3], &pieces[3..]].concat();
    let foreign: Vec<ChunkRef> = [&pieces[..3], &elsewhere[3..]].concat();
    for (what, pieces) in [
        ("swapped", &swapped[..]),
        ("left out at the end", &pieces[..3]),
        ("left out at the start", &pieces[1..]),
        ("repeated", &[&pieces[..], &pieces[3..]].concat()),
        ("of the version before", &rolled_back),
        ("of another file", &foreign),
        ("nothing left", &[]),
    ] {
        sealed.set_map(node.version, &chunk_map::encode_sealed(pieces, seal));
        assert!(matches!(sealed.read("state"), Err(PoolError::WrongSeal { .. })), "{what}");
        // A chunk map without its seal, as earlier versions wrote them.
        sealed.set_map(node.version, &chunk_map::encode(pieces));
        let refused = sealed.read("state");
        assert!(matches!(refused, Err(PoolError::WrongSecret { .. })) || pieces.is_empty(), "{what}");
    }
    sealed.set_map(node.version, &whole);
    assert!(sealed.read("state").unwrap() == pages(&[1, 2, 5, 6]));
}

#[test]
fn other_bytes_under_the_number_of_a_chunk_are_noticed_before_and_after_the_file_is_opened() {
    let sealed = Sealed::new();
    let node = sealed.write("state", &pages(&[1, 2, 3]), true);
    let pool = Sealed::handle(&sealed.cluster);
    let open = pool.block(pool.open_named(node.version, "state")).unwrap();
    let [first, second, _] = chunk_map::decode(&sealed.map(node.version)).unwrap()[..] else { panic!() };
    for (from, to) in
        [(first.chunk, i64::MAX as u64), (second.chunk, first.chunk), (i64::MAX as u64, second.chunk)]
    {
        for (table, column) in [("chunk", "id"), ("place", "chunk")] {
            sealed.sql(&format!("UPDATE {table} SET {column} = {to} WHERE {column} = {from}"));
        }
    }
    assert!(pool.block(open.read_at(0, CHUNK)).is_err());
    assert!(matches!(sealed.read("state"), Err(PoolError::WrongSeal { .. })));
}

#[test]
fn files_that_changed_their_names_behind_our_back_are_refused_and_renamed_ones_are_not() {
    let sealed = Sealed::new();
    for (name, seed) in [("a", 1), ("b", 2)] {
        sealed.write(name, &pages(&[seed]), true);
    }
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted_as(Sealed::handle(&sealed.cluster), dir.path());
    let path = |name: &str| dir.path().join(name);
    fs::rename(path("a"), path("c")).unwrap();
    assert!(sealed.read("c").unwrap() == pages(&[1]));
    // As programs save: a new file over the old one.
    fs::write(path("new"), pages(&[3])).unwrap();
    fs::rename(path("new"), path("b")).unwrap();
    assert!(fs::read(path("b")).unwrap() == pages(&[3]));
    assert!(sealed.read("b").unwrap() == pages(&[3]));
    for (from, to) in [("b", "x"), ("c", "b"), ("x", "c")] {
        sealed.sql(&format!("UPDATE node SET name = '{to}' WHERE name = '{from}'"));
    }
    for name in ["b", "c"] {
        assert!(matches!(sealed.read(name), Err(PoolError::OtherName { .. })));
    }
    let fresh = tempfile::tempdir().unwrap();
    let _other = mounted_as(Sealed::handle(&sealed.cluster), fresh.path());
    let refused = fs::read(fresh.path().join("b")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(fs::OpenOptions::new().append(true).open(fresh.path().join("b")).is_err(), "not sealed anew");
    fs::rename(fresh.path().join("b"), fresh.path().join("d")).unwrap();
    assert!(matches!(sealed.read("d"), Err(PoolError::OtherName { .. })), "not sealed anew");
    fs::rename(fresh.path().join("d"), fresh.path().join("b2")).unwrap();
    fs::rename(fresh.path().join("c"), fresh.path().join("b")).unwrap();
    assert!(fs::read(fresh.path().join("b")).unwrap() == pages(&[3]), "it has its name again");
}

/// Writes a file as versions without seals did, by the description of the format.
fn write_unsealed(cluster: &Cluster, name: &str, raw: &[u8]) -> Node {
    let derived =
        |what: &str| blake3::derive_key(&format!("whimbrel pool 2026-11-21 chunk {what}"), &[7; 32]);
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM_SIV, &derived("encryption")).unwrap());
    let nonce: [u8; 12] = blake3::keyed_hash(&derived("nonce"), raw).as_bytes()[..12].try_into().unwrap();
    let mut inner = Encoder::new(1).encode(Kind::Blob, raw, &[raw.len()]).unwrap();
    key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut inner).unwrap();
    let chunk = [&nonce[..], &inner].concat();
    let (digest, frame) =
        (Digest::of(&chunk), Encoder::new(1).encode(Kind::Blob, &chunk, &[chunk.len()]).unwrap());
    let (pool, length, stored) = (&cluster.pool, raw.len() as u32, frame.len() as u32);
    pool.block(async {
        let ask = Reserve { session: 0, bytes: 1 << 20, unused: 0, width: 1, avoid: Vec::new() };
        let session = pool.call_manager::<ReserveSpace>(&ask, bytes::Bytes::new()).await.unwrap().0;
        let member = &session.stripe[0];
        let client = whimbrel_wire::Identity::load_or_create(&cluster.dir.path().join("client")).unwrap();
        let dialer =
            whimbrel_pool::connections::TlsDialer::new(Arc::new(client), "client".parse().unwrap(), ());
        let link = whimbrel_pool::connections::ConnectionCache::new(Arc::new(dialer));
        let link = link.connect(&member.address, member.key).await.unwrap();
        link.request::<PutChunks>(&vec![(digest, stored)], frame.into()).await.unwrap();
        let written = put_written(&[WrittenChunk { digest, length, stored, places: vec![member.id] }]);
        let (_, numbers) = pool.call_manager::<RegisterChunks>(&session.session, written).await.unwrap();
        let chunk = get_numbers(&numbers).unwrap()[0];
        let (make, size) = (Cluster::make(name), u64::from(length));
        let session = session.session;
        let commit =
            Commit { session, number: 0, node: None, make, size, modified: 1, copies: 1, sent: 0, base: 0 };
        let map = chunk_map::encode(&[ChunkRef { chunk, length, encrypted: true, digest: None }]);
        pool.call_manager::<CommitFile>(&commit, map.into()).await.unwrap().0
    })
}

#[test]
fn a_file_from_before_seals_still_opens_and_is_sealed_when_it_is_written() {
    let sealed = Sealed::new();
    let raw = noise(9, 10_000);
    let node = write_unsealed(&sealed.cluster, "old", &raw);
    assert_eq!(chunk_map::decode_sealed(&sealed.map(node.version)).unwrap().1, &[] as &[u8]);
    assert!(sealed.read("old").unwrap() == raw);
    let grown = sealed.write("old", b"more", false);
    assert_ne!(chunk_map::decode_sealed(&sealed.map(grown.version)).unwrap().1, &[] as &[u8]);
    assert!(sealed.read("old").unwrap() == [&raw[..], b"more"].concat());
}
