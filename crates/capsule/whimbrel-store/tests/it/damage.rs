//! Damaged bytes, killed processes, full disks.

use crate::common::{commit, content, crash_disk::CrashDisk, expected, manifest, name, page};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun};
use whimbrel_store::{Expected, GcRoots, Options, Store, StoreError};

fn open(disk: &CrashDisk) -> Store {
    Store::open_on(Arc::new(disk.clone()), Options { workers: 1, ..Options::create() }).unwrap()
}

#[test]
fn every_flipped_bit_of_a_pack_is_found_by_verify_and_refused_on_read() {
    let pages: Vec<(u64, u64)> = (0..40).map(|n| (n, n + 1)).collect();
    let disk = CrashDisk::new();
    let id =
        commit(&open(&disk).writer().unwrap(), &open(&disk), None, 300, &pages, &[name("a")], 1).unwrap();
    let model = pages.iter().copied().collect();
    let mut random = StdRng::seed_from_u64(1);
    let (path, len) = disk.paths("packs").into_iter().max_by_key(|(_, len)| *len).unwrap();
    for _ in 0..200 {
        // The header of a pack is read only to rebuild an index.
        let (at, bit) = (random.random_range(24..len), random.random_range(0..8));
        disk.flip(&path, at, bit);
        let store = open(&disk);
        let report = store.verify(|_, _| true).unwrap();
        assert!(
            !report.damage.is_empty() && report.damage.iter().all(|d| d.file == path),
            "byte {at}: {report:?}"
        );
        assert!(
            !report.broken.is_empty() && report.broken.iter().all(|b| b.id == id),
            "byte {at}: {report:?}"
        );
        match content(&store, &id) {
            Err(StoreError::Damaged { pack, offset, object, .. }) => {
                assert!(
                    path.ends_with(&pack) && offset <= at as u64 && object.len() == 64,
                    "{pack} {offset} {object}"
                );
            }
            other => panic!("byte {at}: read {:?} pages", other.map(|pages| pages.len())),
        }
        disk.flip(&path, at, bit);
    }
    assert_eq!(content(&open(&disk), &id).unwrap(), expected(&model));
}

#[test]
fn damaged_indexes_are_left_out_and_made_again() {
    let disk = CrashDisk::new();
    let (mut base, mut model) = (None, BTreeMap::new());
    for round in 0..3u64 {
        let pages: Vec<(u64, u64)> = (0..60).map(|n| (n * 3, n + round * 100 + 1)).collect();
        let store = open(&disk);
        base =
            Some(commit(&store.writer().unwrap(), &store, base, 300, &pages, &[name("a")], round).unwrap());
        model.extend(pages);
    }
    for (path, _) in disk.paths("index") {
        disk.flip(&path, 3, 1);
    }
    let store = open(&disk);
    assert!(matches!(store.manifest(&base.unwrap()), Err(StoreError::Missing { .. })));
    assert!(!store.verify(|_, _| true).unwrap().orphans.is_empty());
    assert!(store.reindex().unwrap() > 0);
    assert_eq!(content(&store, &base.unwrap()).unwrap(), expected(&model));
    store.gc(GcRoots::Ancestors).unwrap();
    let report = open(&disk).verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.orphans.is_empty(), "{report:?}");
    assert!(disk.paths("index").iter().any(|(path, _)| path.contains(".damaged-")), "nothing is set aside");
    assert!(!store.reindex_if_needed().unwrap());
}

/// What such an index names is not missing, and collections go on once other indexes have it.
#[test]
fn an_index_that_can_never_be_read_again_stops_nothing_for_long() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), Options::create()).unwrap();
    let store = open();
    let pages: Vec<(u64, u64)> = (0..60).map(|n| (n * 3, n + 1)).collect();
    let id = commit(&store.writer().unwrap(), &store, None, 300, &pages, &[name("a")], 1).unwrap();
    drop(store);
    let files = std::fs::read_dir(dir.path().join("index")).unwrap().map(|file| file.unwrap().path());
    let files: Vec<_> = files.collect();
    for file in &files {
        std::fs::remove_file(file).unwrap();
        std::fs::create_dir(file).unwrap();
    }
    let store = open();
    assert!(matches!(store.manifest(&id), Err(StoreError::Io { .. })), "{:?}", store.manifest(&id));
    assert!(store.reindex_if_needed().unwrap());
    assert!(matches!(store.manifest(&CapsuleId(Digest::of(b"none"))), Err(StoreError::Missing { .. })));
    assert_eq!(content(&store, &id).unwrap(), expected(&pages.into_iter().collect()));
    store.gc(GcRoots::Referenced).unwrap();
    assert!(files.iter().all(|file| !file.exists()));
}

/// A damaged body still answers look-ups, some of them wrongly, and covers packs.
#[test]
fn an_index_with_a_damaged_body_is_made_again_and_stops_no_commit() {
    for place in 0..60 {
        let disk = CrashDisk::new();
        let pages: Vec<(u64, u64)> = (0..60).map(|n| (n * 3, n + 1)).collect();
        let store = open(&disk);
        let id = commit(&store.writer().unwrap(), &store, None, 300, &pages, &[name("a")], 1).unwrap();
        let (path, len) = disk.paths("index").into_iter().max_by_key(|(_, len)| *len).unwrap();
        disk.flip(&path, 64 + place * (len - 64) / 60, 5);
        let store = open(&disk);
        assert!(!store.verify(|_, _| true).unwrap().damage.is_empty(), "place {place}");
        // Merging meets the damaged file.
        for round in 0..5 {
            let more = [(round, 1_000 + round)];
            commit(&store.writer().unwrap(), &store, None, 300, &more, &[name("b")], round).unwrap();
        }
        store.gc(GcRoots::Referenced).unwrap();
        assert!(
            !disk.paths("index").iter().any(|(other, _)| *other == path),
            "place {place}: it is still there"
        );
        let report = open(&disk).verify(|_, _| true).unwrap();
        assert!(report.is_complete() && report.orphans.is_empty(), "place {place}: {report:?}");
        assert_eq!(
            content(&open(&disk), &id).unwrap(),
            expected(&pages.into_iter().collect()),
            "place {place}"
        );
    }
}

#[test]
fn an_exported_capsule_is_imported_whole_or_not_at_all() {
    let (disk, other) = (CrashDisk::new(), CrashDisk::new());
    let pages: Vec<(u64, u64)> = (0..40).map(|n| (n, n + 1)).collect();
    let id =
        commit(&open(&disk).writer().unwrap(), &open(&disk), None, 300, &pages, &[name("a")], 1).unwrap();
    let mut stream = Vec::new();
    open(&disk).export(&id, &mut stream).unwrap();
    assert_eq!(open(&other).import(stream.as_slice(), &[name("b")]).unwrap(), id);
    for cut in (0..stream.len()).step_by(stream.len() / 40) {
        let third = CrashDisk::new();
        assert!(open(&third).import(&stream[..cut], &[name("b")]).is_err(), "cut at {cut}");
        assert_eq!(open(&third).get_ref(&name("b")).unwrap(), None);
        let mut damaged = stream.clone();
        damaged[cut] ^= 4;
        assert!(open(&third).import(damaged.as_slice(), &[name("b")]).is_err(), "damaged at {cut}");
        assert_eq!(open(&third).get_ref(&name("b")).unwrap(), None);
    }
}

/// Process that the next test kills; not a test itself.
#[test]
fn child_that_commits_until_it_is_killed() {
    let Ok(dir) = std::env::var("WHIMBREL_TEST_STORE") else { return };
    let store = Store::open(Path::new(&dir), Options::create()).unwrap();
    let mut base = store.get_ref(&name("m")).unwrap();
    let first = base.map_or(0, |id| store.manifest(&id).unwrap().time + 1);
    for round in first.. {
        let pages: Vec<(u64, u64)> =
            (0..50).map(|n| ((n * 11 + round * 3) % 700, round * 50 + n + 1)).collect();
        let id = commit(&store.writer().unwrap(), &store, base, 700, &pages, &[name("m")], round).unwrap();
        println!("committed {round}");
        base = Some(id);
        if round % 5 == 4 {
            store.gc(GcRoots::Referenced).unwrap();
        }
    }
}

#[test]
fn a_killed_process_loses_nothing_it_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(9);
    let mut acknowledged = None;
    for _ in 0..10 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "damage::child_that_commits_until_it_is_killed", "--nocapture"])
            .env("WHIMBREL_TEST_STORE", dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let rounds = random.random_range(1..8);
        let seen: Vec<u64> = lines
            .by_ref()
            .filter_map(|l| l.unwrap().strip_prefix("committed ")?.parse().ok())
            .take(rounds)
            .collect();
        child.kill().unwrap();
        child.wait().unwrap();
        let late = lines.map_while(|l| l.ok()).filter_map(|l| l.strip_prefix("committed ")?.parse().ok());
        acknowledged = late.last().or(seen.last().copied()).max(acknowledged);

        let store = Store::open(dir.path(), Options::default()).unwrap();
        let id = store.get_ref(&name("m")).unwrap().unwrap();
        let last = store.manifest(&id).unwrap().time;
        assert!(Some(last) >= acknowledged && last <= acknowledged.unwrap() + 1, "{last}, {acknowledged:?}");
        let mut model = BTreeMap::new();
        (0..=last).for_each(|r| model.extend((0..50).map(|n| ((n * 11 + r * 3) % 700, r * 50 + n + 1))));
        assert_eq!(content(&store, &id).unwrap(), expected(&model));
        let report = store.verify(|_, _| true).unwrap();
        assert!(report.is_complete(), "{report:?}");
    }
    let store = Store::open(dir.path(), Options::default()).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.orphans.is_empty(), "{report:?}");
}

/// Process that has no room for the stack of a thread; not a test itself.
#[test]
fn child_without_room_for_threads() {
    let Ok(dir) = std::env::var("WHIMBREL_TEST_THREADS") else { return };
    let store = Store::open(Path::new(&dir), Options::create()).unwrap();
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let used: u64 = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * PAGE_SIZE as u64;
    let limit = rustix::process::Rlimit { current: Some(used + (1 << 20)), maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    println!("refused: {}", store.writer().is_err());
}

#[test]
fn a_writer_whose_threads_cannot_start_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "damage::child_without_room_for_threads", "--nocapture"])
        .env("WHIMBREL_TEST_THREADS", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("refused: true"), "{text}");
    let store = Store::open(dir.path(), Options::default()).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    assert!(std::fs::read_dir(dir.path().join("leases")).unwrap().next().is_none(), "it left a lease");
}

/// A file system of a few MiB, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "whimbrel-test"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(status.success(), "mounting a tmpfs needs root");
        Self(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_fails_one_commit_and_leaves_a_store_that_verifies_and_collects() {
    let disk = SmallDisk::new(8 << 20);
    let store = Store::open(disk.0.path(), Options::create()).unwrap();
    let pages: Vec<(u64, u64)> = (0..100).map(|n| (n, n + 1)).collect();
    let id = commit(&store.writer().unwrap(), &store, None, 10_000, &pages, &[name("a")], 1).unwrap();
    let writer = store.writer().unwrap();
    let mut image = writer.image(None, 10_000).unwrap();
    let data: Vec<u8> = (1..=100).flat_map(|n| page(n + 1_000_000)).collect();
    let filled = (0..100u64).try_for_each(|part| {
        let mut data = data.clone();
        data.chunks_exact_mut(PAGE_SIZE).for_each(|page| page[..8].copy_from_slice(&part.to_le_bytes()));
        let mut random = StdRng::seed_from_u64(part);
        data.iter_mut().for_each(|byte| *byte ^= random.random::<u8>());
        image.put(PageRun::new(part * 100, 100), &data)
    });
    let finished = filled.and_then(|()| image.finish());
    let failed =
        finished.and_then(|image| writer.commit(&manifest(&[("memory", image)], &[], 2), &[name("b")]));
    assert!(failed.is_err());
    drop(writer);
    assert_eq!(content(&store, &id).unwrap().len(), 100, "reading goes on");
    commit(&store.writer().unwrap(), &store, Some(id), 10_000, &[(5, 76)], &[name("c")], 3).unwrap();

    let store = Store::open(disk.0.path(), Options::default()).unwrap();
    assert_eq!(store.get_ref(&name("b")).unwrap(), None);
    store.gc(GcRoots::Referenced).unwrap();
    commit(&store.writer().unwrap(), &store, Some(id), 10_000, &[(5, 77)], &[name("a")], 3).unwrap();
    store.delete_ref(&name("a"), Expected::Anything).unwrap();
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.orphans.is_empty(), "{report:?}");
}
