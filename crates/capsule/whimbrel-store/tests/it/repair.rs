//! Damaged stores that are healed from another store.

use crate::common::{commit, content, crash_disk::CrashDisk, expected, name};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::pack_frame::Kind;
use whimbrel_store::{
    GcRoots, ObjectWant, Options, PageWant, RemoteObjects, RemoteObjectsError, RepairReport, Store,
    StoreError,
};

/// Another store, which gives only some pages.
struct Other {
    store: Store,
    gives: fn(&Digest) -> bool,
}

impl Other {
    fn get(&self, digest: &Digest) -> Result<Vec<u8>, RemoteObjectsError> {
        let failed = |source| RemoteObjectsError { source, retryable: false };
        self.store.blob(digest).map_err(|error| failed(error.into()))
    }
}

impl RemoteObjects for Other {
    fn objects(&self, _: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        wants.iter().map(|want| self.get(&want.digest)).collect()
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        let page = |digest: &Digest| match (self.gives)(digest) {
            true => self.get(digest),
            false => Err(RemoteObjectsError { source: "nobody has it".into(), retryable: false }),
        };
        wants.iter().flat_map(|want| &want.digests).map(page).collect()
    }
}

fn open(disk: &CrashDisk) -> Store {
    Store::open_on(Arc::new(disk.clone()), Options { workers: 1, ..Options::create() }).unwrap()
}

/// Two versions of a machine; the second has deltas of pages of the first.
fn write(disk: &CrashDisk) -> (CapsuleId, BTreeMap<u64, u64>) {
    write_to(|| open(disk))
}

fn write_to(open: impl Fn() -> Store) -> (CapsuleId, BTreeMap<u64, u64>) {
    let (mut id, mut model) = (None, BTreeMap::new());
    for round in 0..2 {
        let pages: Vec<(u64, u64)> = (0..120).step_by(round + 1).map(|n| (n * 3, n + 1)).collect();
        let pages: Vec<_> = pages.into_iter().map(|(at, seed)| (at, seed + 1000 * round as u64)).collect();
        let store = open();
        let writer = store.writer().unwrap();
        let names = [name("a"), name(&format!("v{round}"))];
        id = Some(commit(&writer, &store, id, 400, &pages, &names, round as u64).unwrap());
        model.extend(pages);
    }
    (id.unwrap(), model)
}

fn damage(disk: &CrashDisk, random: &mut StdRng) {
    for (path, len) in disk.paths("packs") {
        for _ in 0..4 {
            disk.flip(&path, random.random_range(24..len), random.random_range(0..8));
        }
    }
    let (index, len) = disk.paths("index").remove(0);
    disk.flip(&index, random.random_range(64..len), 3);
}

fn repair(store: &Store, other: &Store, gives: fn(&Digest) -> bool) -> RepairReport {
    store.repair(None, &[], &Other { store: other.clone(), gives }, |_, _| true).unwrap()
}

#[test]
fn a_damaged_store_is_healed_from_another_and_then_needs_nothing() {
    let (other, mut random) = (CrashDisk::new(), StdRng::seed_from_u64(20));
    let (id, model) = write(&other);
    let other = open(&other);
    for round in 0..30 {
        let disk = CrashDisk::new();
        assert_eq!(write(&disk).0, id);
        damage(&disk, &mut random);
        let store = open(&disk);
        assert!(!store.verify(|_, _| true).unwrap().is_complete(), "round {round}");
        let report = repair(&store, &other, |_| true);
        assert!(report.capsules.iter().all(|capsule| capsule.missing == 0), "round {round}: {report:?}");
        assert!(report.capsules.iter().any(|capsule| capsule.healed > 0), "round {round}: {report:?}");
        // Of a handle that has nothing cached.
        let store = open(&disk);
        let found = store.verify(|_, _| true).unwrap();
        assert!(found.is_complete() && found.orphans.is_empty(), "round {round}: {found:?}");
        assert_eq!(content(&store, &id).unwrap(), expected(&model), "round {round}");
        let again = repair(&store, &other, |_| panic!("nothing is asked for"));
        assert!(again.capsules.is_empty() && again.frames == 0, "round {round}: {again:?}");
        store.gc(GcRoots::Referenced).unwrap();
        assert!(open(&disk).verify(|_, _| true).unwrap().is_complete(), "round {round}");
        assert_eq!(content(&open(&disk), &id).unwrap(), expected(&model), "round {round}");
    }
}

#[test]
fn what_nobody_has_is_counted_and_what_was_healed_outlives_a_collection() {
    let (other, mut random) = (CrashDisk::new(), StdRng::seed_from_u64(21));
    let (id, model) = write(&other);
    let other = open(&other);
    let mut left = 0;
    for round in 0..30 {
        let disk = CrashDisk::new();
        write(&disk);
        damage(&disk, &mut random);
        let store = open(&disk);
        let missing = |report: &RepairReport| report.capsules.iter().map(|c| c.missing).max().unwrap_or(0);
        let first = repair(&store, &other, |digest| digest.0[0] % 2 == 0);
        assert_eq!(missing(&first) > 0, first.failure.is_some(), "round {round}: {first:?}");
        left += missing(&first);
        let damaged = !store.verify(|_, _| true).unwrap().damage.is_empty();
        assert_eq!(damaged, missing(&first) > 0, "round {round}: what nobody has stays in the index");
        store.gc(GcRoots::Referenced).unwrap();
        let store = open(&disk);
        assert_eq!(store.verify(|_, _| true).unwrap().is_complete(), missing(&first) == 0, "round {round}");
        let second = repair(&store, &other, |digest| digest.0[0] % 2 == 1);
        assert_eq!(missing(&second), 0, "round {round}: a healed page was lost: {second:?}");
        assert!(open(&disk).verify(|_, _| true).unwrap().is_complete(), "round {round}");
        assert_eq!(content(&open(&disk), &id).unwrap(), expected(&model), "round {round}");
    }
    assert!(left > 0, "no round lacked a page");
}

#[test]
fn only_the_named_capsule_is_healed_and_a_failed_source_changes_nothing() {
    let (other, disk) = (CrashDisk::new(), CrashDisk::new());
    let (id, model) = write(&other);
    write(&disk);
    damage(&disk, &mut StdRng::seed_from_u64(22));
    let store = open(&disk);
    store.reindex().unwrap();
    let before = store.verify(|_, _| true).unwrap();
    let empty = open(&CrashDisk::new());
    let report = repair(&store, &empty, |_| true);
    assert!(report.capsules.iter().all(|c| c.healed == 0) && report.failure.is_some(), "{report:?}");
    let after = store.verify(|_, _| true).unwrap();
    assert_eq!((after.damage, after.broken.len()), (before.damage, before.broken.len()));
    let source = Other { store: open(&other), gives: |_| true };
    let report = store.repair(Some(id), &[], &source, |_, _| true).unwrap();
    assert_eq!(report.capsules.iter().map(|c| c.id).collect::<Vec<_>>(), [id]);
    assert_eq!(content(&open(&disk), &id).unwrap(), expected(&model));
}

/// Number of objects that capsules lack.
fn lacking(store: &Store) -> usize {
    store.verify(|_, _| true).unwrap().broken.iter().map(|broken| broken.missing.len()).sum()
}

#[test]
fn a_repair_that_a_power_failure_ends_loses_nothing_and_can_be_repeated() {
    let other = CrashDisk::new();
    let (id, model) = write(&other);
    let source = Other { store: open(&other), gives: |_| true };
    for operation in 0.. {
        let disk = CrashDisk::new();
        write(&disk);
        damage(&disk, &mut StdRng::seed_from_u64(23));
        let store = open(&disk);
        store.reindex().unwrap();
        let before = lacking(&store);
        disk.power_off_at(disk.operations() + operation);
        let ended = store.repair(None, &[], &source, |_, _| true);
        let disk = disk.after_power_failure(operation);
        let store = open(&disk);
        store.reindex().unwrap();
        assert!(lacking(&store) <= before, "operation {operation}: something was lost");
        let report = repair(&store, &source.store, |_| true);
        assert!(report.capsules.iter().all(|capsule| capsule.missing == 0), "{operation}: {report:?}");
        assert!(open(&disk).verify(|_, _| true).unwrap().is_complete(), "operation {operation}");
        assert_eq!(content(&open(&disk), &id).unwrap(), expected(&model), "operation {operation}");
        if ended.is_ok() {
            assert!(operation > 10 && report.capsules.is_empty(), "operation {operation}: {report:?}");
            return;
        }
    }
}

#[test]
fn a_repair_that_is_cancelled_ends_at_once_and_loses_nothing() {
    let other = CrashDisk::new();
    write(&other);
    let source = Other { store: open(&other), gives: |_| true };
    // Names of packs are random, and so is what lies where the damage is.
    let cancelled = |goes_on: &mut dyn FnMut(u64, u64) -> bool| {
        let disk = CrashDisk::new();
        write(&disk);
        damage(&disk, &mut StdRng::seed_from_u64(24));
        let store = open(&disk);
        store.reindex().unwrap();
        let before = lacking(&store);
        let ended = store.repair(None, &[], &source, goes_on);
        assert!(lacking(&store) <= before, "something was lost");
        let is_cancelled = matches!(ended, Err(StoreError::Cancelled));
        assert!(is_cancelled || ended.is_ok());
        is_cancelled
    };
    let mut calls = 0;
    while cancelled(&mut {
        let mut left = calls;
        move |_, _| {
            left -= 1;
            assert!(left >= -1, "asked again after a cancel");
            left >= 0
        }
    }) {
        calls += 1;
    }
    assert!(calls > 10, "{calls} calls");
    // All is read before anything is fetched, and each fetch asks.
    let while_fetching = |_| {
        let mut read = 0;
        cancelled(&mut |done, total| {
            read += u32::from(done == total);
            read < 2
        })
    };
    assert!((0..20).any(while_fetching), "nothing was cancelled while it was fetched");
}

#[test]
fn packs_that_are_gone_are_made_again() {
    let (other, dir) = (CrashDisk::new(), tempfile::tempdir().unwrap());
    write(&other);
    let open_dir = || Store::open(dir.path(), Options { workers: 1, ..Options::create() }).unwrap();
    let (id, model) = write_to(open_dir);
    for pack in std::fs::read_dir(dir.path().join("packs")).unwrap() {
        std::fs::remove_file(pack.unwrap().path()).unwrap();
    }
    let report = repair(&open_dir(), &open(&other), |_| true);
    assert!(report.frames > 0 && report.capsules.iter().all(|capsule| capsule.missing == 0), "{report:?}");
    assert_eq!(content(&open_dir(), &id).unwrap(), expected(&model));
    open_dir().gc(GcRoots::Referenced).unwrap();
    assert!(open_dir().verify(|_, _| true).unwrap().is_complete());
}
