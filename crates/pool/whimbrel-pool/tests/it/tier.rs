//! Tests of the object tier with a real S3 server in its own process, which is killed, restarted and damaged.

use crate::common::{Cluster, noise, until};
use bytes::Bytes;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};
use tokio::runtime::Runtime;
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_pool::{
    benefactor::{Bucket, ChunkError, ChunkStore, ObjectTier, TierError, TierOptions, TierOwner},
    client::PoolError,
    mount::errno_of,
};
use whimbrel_wire::PublicKey;

/// The server process; it ends when this is dropped.
pub(crate) struct Server {
    child: Child,
    root: PathBuf,
    address: String,
}

impl Server {
    pub(crate) fn start(root: &Path) -> Self {
        fs::create_dir_all(root.join("bucket")).unwrap();
        Self::start_at(root, "127.0.0.1:0")
    }

    fn start_at(root: &Path, address: &str) -> Self {
        // The server is built with the tests, in the folder above theirs.
        let me = std::env::current_exe().unwrap();
        let program = me.ancestors().nth(2).unwrap().join("examples/s3_server");
        let child = Command::new(program).arg(root).arg(address).stdout(Stdio::piped()).spawn();
        let mut child =
            child.expect("the server: `cargo test -p whimbrel-pool` without names of tests makes it");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the server ended");
        Self { child, root: root.to_owned(), address: line.trim().to_owned() }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts the server at the same address.
    fn again(&mut self) {
        *self = Self::start_at(&self.root, &self.address);
    }

    pub(crate) fn options(&self, keep_here: u64) -> TierOptions {
        let url = format!("s3://bucket/a/b1?endpoint=http://{}", self.address).parse().unwrap();
        let settings = [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test-secret")];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        TierOptions { url, keep_local: keep_here, take_over: false, settings }
    }

    /// Segment files of the server.
    fn objects(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.root.join("bucket/a/b1")).into_iter().flatten();
        let files = files.map(|entry| entry.unwrap().path());
        let mut segments: Vec<PathBuf> =
            files.filter(|path| path.extension().is_some_and(|e| e == "seg")).collect();
        segments.sort();
        segments
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn open(dir: &Path, server: &Server, runtime: &Runtime) -> Result<ChunkStore, ChunkError> {
    open_as((1, None, false), dir, server, runtime)
}

/// Opens the store as the benefactor whose key has this byte, of this pool.
fn open_as(
    (key, pool, take_over): (u8, Option<u64>, bool),
    dir: &Path,
    server: &Server,
    runtime: &Runtime,
) -> Result<ChunkStore, ChunkError> {
    let owner = TierOwner { key: PublicKey([key; 32]), pool, name: format!("b{key}").parse().unwrap() };
    let bucket = Bucket::new(server.options(0), runtime.handle().clone())?;
    let tier = ObjectTier::claim(bucket, dir, owner, take_over, 0)?;
    ChunkStore::open_with_tier(dir, 1 << 30, 0, Some(tier))
}

fn chunk(seed: u64) -> (Digest, Bytes) {
    let raw = noise(seed, 1 << 20);
    (Digest::of(&raw), Encoder::new(1).encode(Kind::Blob, &raw, &[raw.len()]).unwrap().into())
}

fn chunks(count: u64) -> Vec<(Digest, Bytes)> {
    (0..count).map(chunk).collect()
}

fn put(store: &ChunkStore, chunks: &[(Digest, Bytes)]) {
    chunks.iter().for_each(|chunk| store.put(std::slice::from_ref(chunk)).unwrap());
    assert!(
        store
            .flush(&chunks.iter().map(|(digest, _)| *digest).collect::<Vec<_>>())
            .unwrap()
            .iter()
            .all(|here| *here)
    );
    store.offload().unwrap();
}

fn all_there(store: &ChunkStore, chunks: &[(Digest, Bytes)]) {
    for (digest, frame) in chunks {
        assert_eq!(store.get(digest).unwrap(), frame);
    }
}

#[test]
fn chunks_lie_in_packs_outlive_a_restart_and_a_lost_disk_and_go_when_they_may() {
    let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
    let (data, server) = (dir.path().join("chunks"), Server::start(&dir.path().join("s3")));
    let store = open(&data, &server, &runtime).unwrap();
    let chunks = chunks(30);
    put(&store, &chunks);
    assert_eq!(server.objects().len(), 3, "30 MiB in packs of 8 MiB, the last one is not full");
    let here = || {
        fs::read_dir(&data)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|e| e == "seg"))
            .count()
    };
    assert_eq!(here(), 1);
    all_there(&store, &chunks);
    drop(store);
    assert!(
        matches!(ChunkStore::open(&data, 1 << 30, 0), Err(ChunkError::TierMissing { .. })),
        "without the object store"
    );

    let store = open(&data, &server, &runtime).unwrap();
    assert_eq!(store.usage().chunks, 30);
    all_there(&store, &chunks);
    drop(store);
    // The disk is lost, and with it the segment that was not full.
    fs::remove_dir_all(&data).unwrap();
    let store = open(&data, &server, &runtime).unwrap();
    let left = store.usage().chunks as usize;
    assert!((24..30).contains(&left), "{left}");
    all_there(&store, &chunks[..left]);

    let doomed: Vec<Digest> = chunks[..20].iter().map(|(digest, _)| *digest).collect();
    assert_eq!(store.delete(&doomed, Instant::now()), 20);
    assert!(store.compact().unwrap() >= 16 << 20);
    assert_eq!(server.objects().len(), 1, "two packs were left with less than half");
    all_there(&store, &chunks[20..left]);
    assert!(matches!(store.get(&doomed[0]), Err(ChunkError::Missing { .. })));
    drop(store);
    let store = open(&data, &server, &runtime).unwrap();
    // Deleted chunks in the segment that was not compacted are listed again, until the manager releases them
    // again.
    assert_eq!(store.usage().chunks as usize, left - 16);
    all_there(&store, &chunks[20..left]);
}

#[test]
fn what_was_moved_out_of_a_pack_is_found_though_its_heads_outlived_the_object() {
    let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
    let (data, server) = (dir.path().join("chunks"), Server::start(&dir.path().join("s3")));
    let store = open(&data, &server, &runtime).unwrap();
    let chunks = chunks(20);
    put(&store, &chunks);
    let first = server.objects()[0].with_extension("far");
    let heads = data.join(first.file_name().unwrap());
    let kept = fs::read(&heads).unwrap();
    let doomed: Vec<Digest> = chunks[..6].iter().map(|(digest, _)| *digest).collect();
    assert_eq!(store.delete(&doomed, Instant::now()), 6);
    assert!(store.compact().unwrap() > 0);
    assert!(!heads.exists());
    drop(store);
    // As if the process had ended after the object was removed and before its heads were.
    fs::write(&heads, kept).unwrap();
    let store = open(&data, &server, &runtime).unwrap();
    all_there(&store, &chunks[6..]);
}

#[test]
fn what_the_object_store_damages_or_cannot_give_is_never_taken_for_a_chunk() {
    let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
    let (data, mut server) = (dir.path().join("chunks"), Server::start(&dir.path().join("s3")));
    let store = open(&data, &server, &runtime).unwrap();
    let chunks = chunks(20);
    put(&store, &chunks);
    let path = &server.objects()[0];
    let mut bytes = fs::read(path).unwrap();
    bytes[1 << 19] ^= 1;
    fs::write(path, bytes).unwrap();
    let damaged = store.get(&chunks[0].0);
    assert!(matches!(damaged, Err(ChunkError::Damaged { .. })), "{damaged:?}");
    assert!(matches!(store.get(&chunks[0].0), Err(ChunkError::Missing { .. })), "forgotten");
    all_there(&store, &chunks[1..]);
    put(&store, &chunks[..1]);
    all_there(&store, &chunks);

    server.kill();
    let away = store.get(&chunks[1].0);
    assert!(matches!(away, Err(ChunkError::Tier(TierError::Failed { .. }))), "{away:?}");
    assert_eq!(store.verify().1, [], "what cannot be had now is not damaged");
    let unreachable = open(&dir.path().join("new"), &server, &runtime);
    assert!(matches!(unreachable, Err(ChunkError::Tier(TierError::Failed { .. }))), "{unreachable:?}");
    server.again();
    all_there(&store, &chunks);
}

#[test]
fn a_prefix_is_refused_to_another_benefactor_and_to_another_pool_until_it_is_taken_over() {
    let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
    let (data, server) = (dir.path().join("chunks"), Server::start(&dir.path().join("s3")));
    let store = open(&data, &server, &runtime).unwrap();
    store.bind_tier(7).unwrap();
    let chunks = chunks(20);
    put(&store, &chunks);
    let before = server.objects();
    let other = |take_over, pool| open_as((2, pool, take_over), &dir.path().join("other"), &server, &runtime);
    let refused = other(false, None).unwrap_err().to_string();
    let cause = std::error::Error::source(&other(false, None).unwrap_err()).unwrap().to_string();
    assert!(cause.contains("0000000000000007 b1") && cause.contains("--take-over"), "{refused}: {cause}");
    let strange = other(true, Some(8));
    assert!(matches!(strange, Err(ChunkError::Tier(TierError::OtherPool { found: 7, ours: 8, .. }))));
    assert_eq!(server.objects(), before);

    let taken = other(true, None).unwrap();
    assert_eq!(taken.tier_pool(), Some(7), "no other pool can have its chunks deleted");
    assert!(taken.usage().chunks > 0);
    // The first owner still runs: it neither stores nor removes a segment any more.
    let doomed: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
    store.delete(&doomed, Instant::now());
    let stopped = store.compact();
    assert!(matches!(stopped, Err(ChunkError::Tier(TierError::Foreign { .. }))), "{stopped:?}");
    assert_eq!(server.objects(), before);
    drop(store);
    assert!(open(&data, &server, &runtime).is_err());
}

#[test]
fn a_prefix_of_an_earlier_version_opens_for_its_owner_only() {
    let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
    let (data, server) = (dir.path().join("chunks"), Server::start(&dir.path().join("s3")));
    let chunks = chunks(20);
    put(&open(&data, &server, &runtime).unwrap(), &chunks);
    let owner = server.root.join("bucket/a/b1/owner");
    fs::write(&owner, "00000000000000ab\n").unwrap();
    for number in ["00000000000000ac", "00000000000000ab"] {
        fs::write(data.join("owner"), format!("{number}\n")).unwrap();
        let opened = open(&data, &server, &runtime);
        assert_eq!(opened.is_ok(), number.ends_with('b'), "{opened:?}");
    }
    fs::remove_file(data.join("owner")).unwrap();
    all_there(&open(&data, &server, &runtime).unwrap(), &chunks);
}

#[test]
fn a_file_of_a_pool_waits_for_the_object_store_and_then_says_that_it_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start(&dir.path().join("s3"));
    let mut cluster = Cluster::new(0);
    cluster.add_benefactor_before(1 << 30, Some(server.options(0)));
    cluster.wait_online(1);
    let data = noise(7, 20 << 20);
    let node = cluster.write("file", &data);
    until("full segments are in the object store", || server.objects().len() >= 2);
    assert!(cluster.try_read(node.version).unwrap() == data);
    server.kill();
    let failed = cluster.try_read(node.version).unwrap_err();
    assert!(matches!(failed, PoolError::Unreadable { .. }), "{failed:?}");
    assert_eq!(format!("{:?}", errno_of(&failed)), "EIO");
    server.again();
    assert!(cluster.try_read(node.version).unwrap() == data);
}
