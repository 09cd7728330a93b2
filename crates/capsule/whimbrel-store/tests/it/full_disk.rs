//! A full disk: garbage collection makes room on it, and what failed for lack of room works afterwards.

use crate::common::{commit, content, crash_disk::CrashDisk, name};
use std::sync::Arc;
use whimbrel_core::CapsuleId;
use whimbrel_store::{Expected, GcRoots, Options, Store, StoreError};

const PAGES: u64 = 3000;

fn open(disk: &CrashDisk) -> Store {
    Store::open_on(Arc::new(disk.clone()), Options { workers: 1, ..Options::create() }).unwrap()
}

fn pages(count: u64, from: u64) -> Vec<(u64, u64)> {
    (0..count).map(|n| (n, from + n)).collect()
}

fn put(store: &Store, pages: &[(u64, u64)], tag: &str) -> Result<CapsuleId, StoreError> {
    commit(&store.writer()?, store, None, PAGES, pages, &[name(tag)], 1)
}

#[test]
fn garbage_is_collected_on_a_full_disk_and_the_next_commit_has_room() {
    for more in [0, 100, 400, 3_000, 20_000, 200_000] {
        let disk = CrashDisk::new();
        let store = open(&disk);
        put(&store, &pages(2_000, 1), "dead").unwrap();
        let live = put(&store, &pages(50, 100_000), "live").unwrap();
        // Packs that are partly dead have to be moved, for which there is no room.
        put(&store, &[pages(50, 100_000), pages(50, 200_000)].concat(), "mixed").unwrap();
        store.delete_ref(&name("dead"), Expected::Anything).unwrap();
        disk.limit(Some(more));
        assert!(put(&store, &pages(2_000, 300_000), "more").is_err(), "{more}");
        assert_eq!(store.verify(|_, _| true).unwrap().orphans, [] as [String; 0], "{more}: it left a pack");

        let report = store.gc(GcRoots::Referenced).unwrap();
        assert!(report.removed.0 > 1_000_000, "{more}: {report:?}");
        assert_eq!(content(&store, &live).unwrap().len(), 50);
        put(&store, &pages(500, 300_000), "more").unwrap();
        disk.limit(None);
        let report = open(&disk).verify(|_, _| true).unwrap();
        assert!(report.is_complete() && report.orphans.is_empty(), "{more}: {report:?}");
    }
}

#[test]
fn the_reserve_has_room_for_the_largest_index() {
    let disk = CrashDisk::new();
    let store = open(&disk);
    for round in 0..40 {
        put(&store, &pages(300, round * 1_000 + 1), &format!("r{round}")).unwrap();
        let largest = disk.paths("index").into_iter().map(|(_, len)| len as u64).max().unwrap();
        assert!(store.reserved_bytes().unwrap() >= largest + (1 << 20), "round {round}");
    }
    assert!(disk.paths("reserve").len() <= 3, "{:?}", disk.paths("reserve"));
}
