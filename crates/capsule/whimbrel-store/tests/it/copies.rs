//! Copies of capsules in other stores.

use crate::common::{commit, content, crash_disk::CrashDisk, expected, name};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_core::CapsuleId;
use whimbrel_store::{Expected, GcRoots, Options, Store, StoreError};

fn open(disk: &CrashDisk) -> Store {
    Store::open_on(Arc::new(disk.clone()), Options { workers: 1, ..Options::create() }).unwrap()
}

/// A store with a capsule, and a later one of which 30 of 3,000 pages differ.
fn two_versions() -> (Store, [CapsuleId; 2], [BTreeMap<u64, u64>; 2]) {
    let store = open(&CrashDisk::new());
    let first: Vec<(u64, u64)> = (0..3000).map(|n| (n * 2, n + 1)).collect();
    let changed: Vec<(u64, u64)> = (0..30).map(|n| (n * 200, n + 10_000)).collect();
    let put = |base, pages: &[(u64, u64)], time| {
        commit(&store.writer().unwrap(), &store, base, 6000, pages, &[name("web")], time).unwrap()
    };
    let older = put(None, &first, 1);
    let newer = put(Some(older), &changed, 2);
    let before: BTreeMap<u64, u64> = first.into_iter().collect();
    let mut after = before.clone();
    after.extend(changed);
    (store, [older, newer], [before, after])
}

#[test]
fn a_copy_is_whole_and_a_second_one_costs_what_has_changed() {
    let (from, [older, newer], [before, after]) = two_versions();
    let disk = CrashDisk::new();
    let copy = |id: &CapsuleId| from.copy_to(id, &open(&disk), &[name("web")], &mut |_, _| true).unwrap();
    assert_eq!([copy(&older), copy(&older), copy(&newer)], [3000, 0, 30]);
    let to = open(&disk);
    assert_eq!(to.get_ref(&name("web")).unwrap(), Some(newer));
    assert_eq!(content(&to, &older).unwrap(), expected(&before));
    assert_eq!(content(&to, &newer).unwrap(), expected(&after));
    assert!(to.is_complete(&newer).unwrap());
    assert!(to.verify(|_, _| true).unwrap().is_complete());
}

#[test]
fn what_garbage_collection_is_about_to_remove_is_copied_again() {
    let (from, [older, newer], [_, after]) = two_versions();
    let disk = CrashDisk::new();
    let to = open(&disk);
    from.copy_to(&older, &to, &[name("web")], &mut |_, _| true).unwrap();
    to.delete_ref(&name("web"), Expected::Anything).unwrap();
    // While a writer lives, packs are condemned and not removed.
    let writer = to.writer().unwrap();
    to.gc(GcRoots::Referenced).unwrap();
    let copied = from.copy_to(&newer, &open(&disk), &[name("web")], &mut |_, _| true).unwrap();
    drop(writer);
    assert_eq!(copied, 3000, "it relies on packs that go");
    for _ in 0..2 {
        to.gc(GcRoots::Referenced).unwrap();
    }
    let to = open(&disk);
    assert_eq!(content(&to, &newer).unwrap(), expected(&after));
    assert!(to.verify(|_, _| true).unwrap().is_complete());
}

#[test]
fn a_copy_that_is_cancelled_has_no_name_and_the_next_one_goes_on() {
    let (from, [older, _], [before, _]) = two_versions();
    let disk = CrashDisk::new();
    let mut calls = 0;
    let cancelled = from.copy_to(&older, &open(&disk), &[name("web")], &mut |_, _| {
        calls += 1;
        calls < 2
    });
    assert!(matches!(cancelled, Err(StoreError::Cancelled)), "{cancelled:?}");
    let to = open(&disk);
    assert_eq!(to.get_ref(&name("web")).unwrap(), None);
    from.copy_to(&older, &to, &[name("web")], &mut |_, _| true).unwrap();
    assert_eq!(content(&open(&disk), &older).unwrap(), expected(&before));
}
