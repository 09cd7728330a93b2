//! The server: what it serves, and what it refuses in every form of request.

use crate::common::{self, connect, server_of};
use bytes::Bytes;
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};
use whimbrel_session::{
    proto::{
        AttrBatch, AttrCall, DigestCall, Digests, FileRef, Ident, Keyed, List, ListCall, ListTree, Lookup,
        LookupCall, Name, Op, OpCall, Open, OpenCall, Opened, PagesCall, Range, Read, ReadCall, ReadPages,
        RelPath, SPOKEN, SessionKey, Sync, SyncCall, Time, WalkCall, Walked, WalkedDir, Write, WriteCall,
        code, digest_of_page, errno, pack_pages, unpack_digests, unpack_dirs, unpack_pages,
    },
    server::{Export, ExportAccess, Limits, Server},
};
use whimbrel_wire::{
    Call, CallError, Code, Connection, Endpoint, PeerIdentity, PublicKey, Refusal, Rights, connect_io,
};

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

async fn open(connection: &Connection, dir: &Path) -> Result<Opened, Refusal> {
    let directory = dir.as_os_str().as_encoded_bytes().to_vec();
    answered(connection.request::<OpenCall>(&Open { protocol: SPOKEN.newest, directory }, Bytes::new()).await)
}

fn answered<T>(answer: Result<(T, Bytes), CallError>) -> Result<T, Refusal> {
    match answer {
        Ok((reply, _)) => Ok(reply),
        Err(CallError::Refused { source }) => Err(source),
        Err(other) => panic!("{other}"),
    }
}

async fn ask<C, B>(connection: &Connection, key: SessionKey, body: B) -> Result<C::Reply, Refusal>
where
    C: Call<Header = Keyed<B>>,
{
    answered(connection.request::<C>(&Keyed { key, body }, Bytes::new()).await)
}

async fn read(connection: &Connection, key: SessionKey, wanted: FileRef) -> Result<Vec<u8>, Refusal> {
    let body = Read { file: wanted, range: Range { offset: 0, len: 1 << 20 }, level: None };
    match connection.request::<ReadCall>(&Keyed { key, body }, Bytes::new()).await {
        Ok((done, packed)) => Ok(unpack_pages(&done.pages, &packed, 1 << 20).unwrap()),
        Err(CallError::Refused { source }) => Err(source),
        Err(other) => panic!("{other}"),
    }
}

async fn walk(connection: &Connection, key: SessionKey, body: ListTree) -> (Walked, Vec<WalkedDir>) {
    let (walked, packed) =
        connection.request::<WalkCall>(&Keyed { key, body }, Bytes::new()).await.expect("an answer");
    (walked, unpack_dirs(&packed).expect("directories"))
}

async fn ident(connection: &Connection, key: SessionKey, name: &str) -> Option<Ident> {
    let found = ask::<LookupCall, _>(connection, key, Lookup { dir: path(name), name: None, list: 0 }).await;
    found.ok()?.attr.map(|attr| attr.ident)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_named_directories_are_opened_however_they_are_spelt() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::create_dir_all(root.join("vms/deep")).unwrap();
    fs::create_dir(root.join("vms-secret")).unwrap();
    symlink(root.join("vms-secret"), root.join("vms/out")).unwrap();
    let (connection, _server) = connect(server_of(&root.join("vms"))).await.unwrap();
    for good in ["vms", "vms/", "vms//deep", "vms/deep/"] {
        open(&connection, &root.join(good)).await.unwrap_or_else(|refusal| panic!("{good}: {refusal}"));
    }
    for bad in
        ["", "vms-secret", "vms/../vms-secret", "vms/deep/../..", "vms/./deep", "vm", "vms/out", "vms/none"]
    {
        assert!(open(&connection, &root.join(bad)).await.is_err(), "{bad}");
    }
    assert_eq!(open(&connection, Path::new("/")).await.unwrap_err().code, code::EXPORT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_path_leads_out_and_nothing_but_files_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("export");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    fs::write(root.join("plain"), "plain").unwrap();
    symlink("../secret", root.join("link")).unwrap();
    symlink("..", root.join("up")).unwrap();
    symlink("/proc/self/root", root.join("magic")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        root.join("null"),
        rustix::fs::FileType::CharacterDevice,
        0o666.into(),
        rustix::fs::makedev(1, 3),
    )
    .unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, root.join("fifo"), rustix::fs::FileType::Fifo, 0o666.into(), 0)
        .unwrap();
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root.canonicalize().unwrap()).await.unwrap().key;
    for name in ["up/secret", "magic/etc/passwd", "link/x", "up", "magic"] {
        let refused =
            ask::<LookupCall, _>(&connection, key, Lookup { dir: path(name), name: None, list: 0 }).await;
        let leads = refused
            .ok()
            .and_then(|found| found.attr)
            .is_some_and(|attr| attr.kind != whimbrel_session::proto::Kind::Symlink);
        assert!(!leads, "{name}");
        let refused =
            ask::<ListCall, _>(&connection, key, List { dir: path(name), listing: 0, from: 0, count: 10 })
                .await;
        assert!(refused.is_err(), "{name} is listed");
        let body = ListTree { dirs: vec![path(name), path("")], below: true, names: 100, most: 100 };
        let (walked, dirs) = walk(&connection, key, body).await;
        assert_eq!(walked.reached, 2);
        assert_eq!(dirs.len(), 2, "the export and `sub`, and nothing through {name}");
    }
    let plain = ident(&connection, key, "plain").await.unwrap();
    assert_eq!(
        read(&connection, key, FileRef { path: path("plain"), ident: plain }).await.unwrap(),
        b"plain"
    );
    for name in ["null", "fifo", "link", "sub"] {
        let found = ident(&connection, key, name).await.unwrap();
        let refused = read(&connection, key, FileRef { path: path(name), ident: found }).await;
        assert_eq!(errno(&refused.unwrap_err()), Some(1), "{name}: not permitted, and not opened");
    }
    let other = Ident { ino: plain.ino + 1, ..plain };
    let refused = read(&connection, key, FileRef { path: path("plain"), ident: other }).await;
    assert_eq!(refused.unwrap_err().code, code::STALE);
    for op in [
        Op::Create { path: path("up/new"), mode: 0o644, stamp: Time::now() },
        Op::Rename { from: path("plain"), path: path("up/plain"), no_replace: false },
        Op::Link { from: path("up/secret"), path: path("stolen") },
        Op::SetAttr { path: path("up/secret"), mode: Some(0o777), uid: None, gid: None, mtime: None },
    ] {
        assert!(ask::<OpCall, _>(&connection, key, op.clone()).await.is_err(), "{op:?}");
    }
    // The third is the directory of fencing tokens.
    assert!(fs::read_dir(dir.path()).unwrap().count() == 3, "nothing came about outside");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_becomes_a_symlink_again_and_again_never_leads_out() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("export");
    fs::create_dir_all(root.join("a")).unwrap();
    fs::create_dir(dir.path().join("outside")).unwrap();
    fs::write(dir.path().join("outside/file"), "secret").unwrap();
    fs::write(root.join("a/file"), "inside").unwrap();
    symlink("../outside", root.join("evil")).unwrap();
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root.canonicalize().unwrap()).await.unwrap().key;
    let (stop, racing) = (std::sync::Arc::new(AtomicBool::new(false)), root.clone());
    let stopped = stop.clone();
    let racer = std::thread::spawn(move || {
        let exchange = rustix::fs::RenameFlags::EXCHANGE;
        while !stopped.load(Ordering::Relaxed) {
            let swapped = rustix::fs::renameat_with(
                rustix::fs::CWD,
                racing.join("a"),
                rustix::fs::CWD,
                racing.join("evil"),
                exchange,
            );
            swapped.unwrap();
        }
    });
    let (mut inside, secret) = (0, ident_outside(&dir.path().join("outside/file")));
    for _ in 0..2000 {
        if let Ok(found) =
            ask::<AttrCall, _>(&connection, key, AttrBatch { paths: vec![path("a/file")] }).await
            && let Some(attr) = found[0]
        {
            assert_ne!(attr.ident.ino, secret);
            inside += 1;
            let content = read(&connection, key, FileRef { path: path("a/file"), ident: attr.ident }).await;
            assert!(content.is_err() || content == Ok(b"inside".to_vec()));
        }
    }
    stop.store(true, Ordering::Relaxed);
    racer.join().unwrap();
    assert!(inside > 0);
}

fn ident_outside(file: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(file).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_worth_something_to_its_peer_while_its_session_lives() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    let root = dir.path().canonicalize().unwrap();
    let limits = Limits { idle: std::time::Duration::from_millis(300), ..Limits::default() };
    let server = Server::new(vec![Export::new(&root).unwrap()], false, limits);
    let (connection, _server) = connect(server.clone()).await.unwrap();
    let wanted = || Lookup { dir: RelPath::root(), name: Some(Name::new(b"file").unwrap()), list: 0 };
    let refused = ask::<LookupCall, _>(&connection, SessionKey::random(), wanted()).await;
    assert_eq!(refused.unwrap_err().code, code::KEY);
    let key = open(&connection, &root).await.unwrap().key;
    assert!(ask::<LookupCall, _>(&connection, key, wanted()).await.unwrap().attr.is_some());
    common::until("the session is over when it was not used", || {
        std::thread::sleep(std::time::Duration::from_millis(400));
        tokio::task::block_in_place(|| {
            let asked = ask::<LookupCall, _>(&connection, key, wanted());
            tokio::runtime::Handle::current().block_on(asked).is_err_and(|refusal| refusal.code == code::KEY)
        })
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_over_what_the_writer_does_not_expect_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::write(root.join("file"), "theirs").unwrap();
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let found = ask::<LookupCall, _>(&connection, key, Lookup { dir: path("file"), name: None, list: 0 })
        .await
        .unwrap();
    let attr = found.attr.unwrap();
    let (pages, packed) = pack_pages(b"ours", None);
    let stamp = Time { seconds: 1_000_000, nanos: 77 };
    let write = |expect: Vec<Time>| Write {
        file: FileRef { path: path("file"), ident: attr.ident },
        offset: 2,
        expect,
        stamp,
        cut: None,
        size: Some(6),
        pages: pages.clone(),
    };
    let (connection, packed) = (&connection, Bytes::from(packed));
    let send = |body| {
        let packed = packed.clone();
        async move { connection.request::<WriteCall>(&Keyed { key, body }, packed).await }
    };
    let old = Time { seconds: 5, nanos: 5 };
    let refused = answered(send(write(vec![old])).await);
    assert_eq!(refused.unwrap_err().code, code::CONFLICT);
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "theirs");
    let grown = answered(send(write(vec![old, attr.mtime])).await).unwrap();
    assert_eq!((grown.attr.mtime, grown.attr.size), (stamp, 6));
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "thours");
    // Sent again because its answer was lost: its own stamp is expected, too.
    answered(send(write(vec![attr.mtime, stamp])).await).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_exported_for_reading_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let server = Server::new(vec![Export::new(&root).unwrap()], true, Limits::default());
    let (connection, _server) = connect(server).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let refused = ask::<OpCall, _>(&connection, key, Op::Mkdir { path: path("dir"), mode: 0o755 }).await;
    assert_eq!(errno(&refused.unwrap_err()), Some(30));
}

/// The state of a file whose server was killed between writing content and setting the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_write_of_a_server_that_was_killed_is_gone_on_with_and_a_strangers_write_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let file = root.join("file");
    fs::write(&file, "old content").unwrap();
    let stamp = Time { seconds: 1_000_000, nanos: 77 };
    let encoded = |time: Time| [&time.seconds.to_le_bytes()[..], &time.nanos.to_le_bytes()[..]].concat();
    let note = |began: Time| {
        let value = [encoded(stamp), encoded(began)].concat();
        rustix::fs::setxattr(&file, "user.whimbrel.write", &value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let found = ident(&connection, key, "file").await.unwrap();
    let (pages, packed) = pack_pages(b"new", None);
    let write = |expect: Vec<Time>| {
        let file = FileRef { path: path("file"), ident: found };
        let body = Write { file, offset: 0, expect, stamp, cut: None, size: Some(11), pages: pages.clone() };
        let packed = Bytes::from(packed.clone());
        let connection = &connection;
        async move { answered(connection.request::<WriteCall>(&Keyed { key, body }, packed).await) }
    };
    let old = Time { seconds: 5, nanos: 5 };
    note(Time::now());
    fs::write(&file, "nex content").unwrap();
    assert_eq!(
        write(vec![old]).await.unwrap_err().code,
        code::CONFLICT,
        "another writer's stamp explains nothing"
    );
    let wanted = FileRef { path: path("file"), ident: found };
    let body = Read { file: wanted, range: Range { offset: 0, len: 100 }, level: None };
    let seen = ask::<ReadCall, _>(&connection, key, body).await.unwrap().attr;
    assert_eq!(seen.mtime, stamp, "who reads in the middle of it sees no stranger's work");
    assert_eq!(write(vec![old, stamp]).await.unwrap().attr.mtime, stamp);
    assert_eq!(fs::read_to_string(&file).unwrap(), "new content");
    let left = rustix::fs::getxattr(&file, "user.whimbrel.write", &mut [0; 64][..]);
    assert_eq!(left, Err(rustix::io::Errno::NODATA));
    // Another program writes long after.
    note(Time { seconds: Time::now().seconds - 60, nanos: 0 });
    fs::write(&file, "theirs").unwrap();
    assert_eq!(write(vec![old, stamp]).await.unwrap_err().code, code::CONFLICT);
    assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_has_its_mode_and_stamp_when_it_has_its_name_and_a_directory_can_be_synced() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let stamp = Time { seconds: 1_000_000, nanos: 77 };
    let create = |stamp| Op::Create { path: path("new"), mode: 0o4755, stamp };
    for _ in 0..2 {
        let made = ask::<OpCall, _>(&connection, key, create(stamp)).await.unwrap().attr.unwrap();
        assert_eq!((made.mtime, made.mode, made.links), (stamp, 0o4755, 1));
    }
    let other = Time { nanos: 78, ..stamp };
    assert_eq!(errno(&ask::<OpCall, _>(&connection, key, create(other)).await.unwrap_err()), Some(17));
    let names = Sync { file: FileRef { path: RelPath::root(), ident: Ident::default() } };
    ask::<SyncCall, _>(&connection, key, names).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_walk_brings_the_nearest_directories_and_says_where_it_ended() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    for number in 0..10 {
        fs::create_dir_all(root.join(format!("{number}/deep"))).unwrap();
        (0..number * 3).for_each(|file| fs::write(root.join(format!("{number}/{file}")), "x").unwrap());
    }
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let wanted = |dirs: &[&str], below, names, most| ListTree {
        dirs: dirs.iter().map(|dir| path(dir)).collect(),
        below,
        names,
        most,
    };
    let (_, all) = walk(&connection, key, wanted(&[""], true, 1000, 100)).await;
    assert_eq!(all.len(), 21);
    let names: usize = all.iter().filter_map(|dir| dir.entries.as_ref()).map(Vec::len).sum();
    assert_eq!(names, 10 + 10 + 3 * 45);
    let large = all.iter().position(|dir| dir.entries.is_none());
    assert_eq!(large, None);
    let (_, few) = walk(&connection, key, wanted(&[""], true, 1000, 20)).await;
    let large = few.iter().filter(|dir| dir.entries.is_none()).count();
    assert_eq!(large, 3, "those of 22, 25 and 28 names come without them, and what is below is not known");
    assert_eq!(few.len(), 18);
    let (walked, some) = walk(&connection, key, wanted(&["9", "none", "8", "7"], false, 30, 100)).await;
    assert_eq!((walked.reached, some.len()), (3, 2), "who is not there is passed over");
    let many = vec![path("9"); 1001];
    let body = ListTree { dirs: many, below: false, names: 1, most: 1 };
    assert!(ask::<WalkCall, _>(&connection, key, body).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digests_say_what_pages_are_and_then_only_what_is_lacking_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let mut content = [[1u8; 4096], [0; 4096], [2; 4096], [3; 4096]].concat();
    content.extend([4; 100]);
    fs::write(root.join("file"), &content).unwrap();
    let (connection, _server) = connect(server_of(&root)).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let file = FileRef { path: path("file"), ident: ident(&connection, key, "file").await.unwrap() };
    let range = Range { offset: 0, len: 1 << 20 };
    let asked = Keyed { key, body: Digests { file: file.clone(), range } };
    let (said, bytes) = connection.request::<DigestCall>(&asked, Bytes::new()).await.unwrap();
    assert_eq!((said.attr.size, bytes.len()), (content.len() as u64, 4 * 32));
    let digests = unpack_digests(&said.pages, &bytes, 1 << 20).unwrap();
    let expected =
        content.chunks(4096).enumerate().map(|(number, page)| (number != 1).then(|| digest_of_page(page)));
    assert_eq!(digests, expected.collect::<Vec<_>>());
    // A map that is too short, or has bits of zero pages or beyond the end, requests nothing more.
    for (wanted, pages) in [(vec![0b1_1010], vec![3, 4]), (vec![], vec![]), (vec![0xe2, 0xff, 0xff], vec![])]
    {
        let body = ReadPages { read: Read { file: file.clone(), range, level: None }, wanted };
        let (done, bytes) =
            connection.request::<PagesCall>(&Keyed { key, body }, Bytes::new()).await.unwrap();
        let given = unpack_pages(&done.pages, &bytes, 1 << 20).unwrap();
        for (number, (page, given)) in content.chunks(4096).zip(given.chunks(4096)).enumerate() {
            let whole = if pages.contains(&number) { page.to_vec() } else { vec![0; page.len()] };
            assert!(given == whole, "page {number}");
        }
    }
    // A path that leads to another file now is refused, as for reading.
    fs::rename(root.join("file"), root.join("old")).unwrap();
    fs::write(root.join("file"), "new").unwrap();
    let other = ident(&connection, key, "file").await.unwrap();
    let asked = Digests { file: FileRef { path: path("old"), ident: other }, range };
    assert_eq!(ask::<DigestCall, _>(&connection, key, asked).await.unwrap_err().code, code::STALE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owners_and_bits_that_run_a_program_as_another_are_refused_unless_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    fs::write(root.join("tool"), "x").unwrap();
    fs::set_permissions(root.join("tool"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(root.join("program"), "x").unwrap();
    fs::set_permissions(root.join("program"), PermissionsExt::from_mode(0o4755)).unwrap();
    let server = Server::new(vec![Export::new(&root).unwrap()], false, Limits::default());
    let (connection, _server) = connect(server).await.unwrap();
    let key = open(&connection, &root).await.unwrap().key;
    let own = fs::metadata(root.join("tool")).unwrap().uid();
    let set = |mode, uid, gid| Op::SetAttr { path: path("tool"), mode, uid, gid, mtime: None };
    let stamp = Time { seconds: 1_000_000, nanos: 77 };
    let refused = [
        Op::Create { path: path("new"), mode: 0o4755, stamp },
        Op::Replace { path: path("tool"), mode: 0o2755, stamp },
        set(Some(0o4755), None, None),
        set(Some(0o2755), None, None),
        set(None, Some(own + 1), None),
        set(Some(0o600), None, Some(own + 1)),
    ];
    for op in refused {
        assert_eq!(
            errno(&ask::<OpCall, _>(&connection, key, op.clone()).await.unwrap_err()),
            Some(1),
            "{op:?}"
        );
    }
    for op in [set(Some(0o1755), Some(own), None), Op::Mkdir { path: path("dir"), mode: 0o2755 }] {
        ask::<OpCall, _>(&connection, key, op).await.unwrap();
    }
    assert_eq!(fs::metadata(root.join("tool")).unwrap().mode() & 0o7777, 0o1755);
    assert!(!root.join("new").exists());
    let file = FileRef { path: path("program"), ident: ident(&connection, key, "program").await.unwrap() };
    let (pages, packed) = pack_pages(b"evil", None);
    let body = Write { file, offset: 0, expect: Vec::new(), stamp, cut: None, size: None, pages };
    let written = connection.request::<WriteCall>(&Keyed { key, body }, packed.into()).await;
    assert_eq!(errno(&answered(written).unwrap_err()), Some(1));
    assert_eq!(fs::read(root.join("program")).unwrap(), b"x");
}

/// A key is told apart by the transport, so both ends are those of the wire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_key_opens_its_own_exports_and_changes_what_it_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (first, second) = (PublicKey([1; 32]), PublicKey([2; 32]));
    let export = |name: &str, clients| {
        fs::create_dir(root.join(name)).unwrap();
        Export::new(&root.join(name)).unwrap().only_for(clients)
    };
    let exports = vec![
        export("ours", vec![(first, ExportAccess::Write), (second, ExportAccess::Read)]),
        export("theirs", vec![(second, ExportAccess::Write)]),
        export("nobodys", vec![]),
    ];
    let server = Server::new(exports, false, Limits::default());
    let make = Op::Mkdir { path: path("made"), mode: 0o755 };
    for (key, expected) in [
        (Some(first), [Some(ExportAccess::Write), None, None]),
        (Some(second), [Some(ExportAccess::Read), Some(ExportAccess::Write), None]),
        (Some(PublicKey([3; 32])), [None; 3]),
        (None, [None; 3]),
    ] {
        let identity = key.map_or(PeerIdentity::Stdio, PeerIdentity::Key);
        let (connection, _served) = connect_as(server.clone(), identity).await;
        for (name, access) in ["ours", "theirs", "nobodys"].into_iter().zip(expected) {
            let opened = open(&connection, &root.join(name)).await;
            let Some(access) = access else {
                assert_eq!(opened.unwrap_err().code, Code::FORBIDDEN, "{name} {key:?}");
                continue;
            };
            let opened = opened.unwrap();
            assert_eq!(opened.read_only, access == ExportAccess::Read);
            let made = ask::<OpCall, _>(&connection, opened.key, make.clone()).await;
            assert_eq!(made.is_ok(), access == ExportAccess::Write, "{name} {key:?}");
            assert_eq!(made.err().and_then(|refusal| errno(&refusal)), opened.read_only.then_some(30));
        }
    }
    assert!(root.join("ours/made").exists() && root.join("theirs/made").exists());
}

async fn connect_as(server: Server, identity: PeerIdentity) -> (Connection, Connection) {
    let (near, far) = tokio::io::duplex(4 << 20);
    let (near_read, near_write) = tokio::io::split(near);
    let (far_read, far_write) = tokio::io::split(far);
    let (client, served) =
        (Endpoint::new("client".parse().unwrap(), ()), Endpoint::new("server".parse().unwrap(), server));
    let serving = connect_io(far_read, far_write, identity, Rights::all(), &served);
    let calling = connect_io(near_read, near_write, PeerIdentity::Stdio, Rights::all(), &client);
    let (serving, calling) = tokio::join!(serving, calling);
    (calling.unwrap(), serving.unwrap())
}
