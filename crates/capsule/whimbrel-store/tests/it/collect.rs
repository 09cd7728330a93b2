//! Garbage collection removes exactly the unneeded objects, also with concurrent writers.

use crate::common::{self, commit, content, expected, name, page};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};
use whimbrel_core::{CapsuleId, PageRun, RefName};
use whimbrel_store::{Expected, GcRoots, Options, Store, StoreError};

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::create()).unwrap();
    (dir, store)
}

fn packed(dir: &Path) -> u64 {
    std::fs::read_dir(dir.join("packs")).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum()
}

fn assert_whole(store: &Store) {
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete(), "{report:?}");
}

#[derive(Debug, Clone)]
enum Step {
    Commit { name: u8, base: Option<u8>, pages: Vec<(u64, u64)> },
    Delete(u8),
    Collect(bool),
    Reopen,
    Pass(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let pages = prop::collection::vec((0..600u64, 0..60u64), 0..80);
    prop_oneof![
        4 => (0..4u8, prop::option::of(0..4u8), pages).prop_map(|(name, base, pages)| Step::Commit { name, base, pages }),
        2 => (0..4u8).prop_map(Step::Delete),
        2 => any::<bool>().prop_map(Step::Collect),
        1 => Just(Step::Reopen),
        1 => (0..4u8).prop_map(Step::Pass),
    ]
}

type Model = BTreeMap<CapsuleId, (BTreeMap<u64, u64>, Option<CapsuleId>)>;

fn reachable(model: &Model, refs: &BTreeMap<u8, CapsuleId>) -> BTreeSet<CapsuleId> {
    let mut found = BTreeSet::new();
    for id in refs.values() {
        let mut next = Some(*id);
        while let Some(id) = next.filter(|id| model.contains_key(id) && found.insert(*id)) {
            next = model[&id].1;
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn what_refs_name_survives_any_order_of_work(steps in prop::collection::vec(step(), 1..25)) {
        let (dir, mut store) = store();
        let (mut model, mut refs) = (Model::new(), BTreeMap::<u8, CapsuleId>::new());
        for (time, step) in steps.into_iter().enumerate() {
            match step {
                Step::Commit { name: n, base, pages } => {
                    let base = base.and_then(|b| refs.get(&b).copied());
                    let writer = store.writer().unwrap();
                    let id = commit(&writer, &store, base, 600, &pages, &[name(&format!("r{n}"))], time as u64).unwrap();
                    let mut content = base.map(|b| model[&b].0.clone()).unwrap_or_default();
                    content.extend(pages);
                    model.insert(id, (content, base));
                    refs.insert(n, id);
                }
                Step::Delete(n) => if refs.remove(&n).is_some() {
                    store.delete_ref(&name(&format!("r{n}")), Expected::Anything).unwrap();
                },
                Step::Collect(ancestors) => {
                    store.gc(if ancestors { GcRoots::Ancestors } else { GcRoots::Referenced }).unwrap();
                    let keep: BTreeSet<_> = if ancestors { reachable(&model, &refs) } else { refs.values().copied().collect() };
                    model.retain(|id, _| keep.contains(id));
                }
                Step::Reopen => store = Store::open(dir.path(), Options::default()).unwrap(),
                Step::Pass(n) => if let Some(id) = refs.get(&n) {
                    let other = tempfile::tempdir().unwrap();
                    let other = Store::open(other.path(), Options::create()).unwrap();
                    let mut bytes = Vec::new();
                    store.export(id, &mut bytes).unwrap();
                    prop_assert_eq!(other.import(bytes.as_slice(), &[]).unwrap(), *id);
                    prop_assert_eq!(content(&other, id).unwrap(), expected(&model[id].0));
                },
            }
        }
        prop_assert_eq!(store.capsules().unwrap().iter().map(|c| c.id).collect::<BTreeSet<_>>(), model.keys().copied().collect());
        for (id, (pages, _)) in &model { prop_assert_eq!(content(&store, id).unwrap(), expected(pages)); }
        let report = store.verify(|_, _| true).unwrap();
        prop_assert!(report.is_complete() && report.orphans.is_empty(), "{:?}", report);
    }
}

#[test]
fn a_deleted_capsule_gives_its_space_back_and_its_children_stay_whole() {
    let (dir, store) = store();
    let big: Vec<(u64, u64)> = (0..2000).map(|n| (n, n + 1)).collect();
    let small: Vec<(u64, u64)> = (0..2000).map(|n| (n, if n < 1900 { 0 } else { n + 1 })).collect();
    let first = commit(&store.writer().unwrap(), &store, None, 2000, &big, &[name("a")], 1).unwrap();
    let child = commit(&store.writer().unwrap(), &store, Some(first), 2000, &small, &[name("b")], 2).unwrap();
    let full = packed(dir.path());
    store.delete_ref(&name("a"), Expected::Capsule(first)).unwrap();
    let report = store.gc(GcRoots::Referenced).unwrap();
    assert_eq!((report.capsules, report.waiting), (1, 0));
    assert!(packed(dir.path()) * 5 < full, "{} of {full}", packed(dir.path()));
    assert_eq!(content(&store, &child).unwrap().len(), 100);
    assert!(matches!(store.manifest(&first), Err(StoreError::Missing { .. })));
    assert!(matches!(store.set_ref(&name("a"), &first, Expected::Absent), Err(StoreError::Missing { .. })));
    assert_whole(&store);
}

#[test]
fn a_session_that_found_an_object_before_it_was_condemned_can_count_on_it() {
    let (dir, store) = store();
    let pages: Vec<(u64, u64)> = (0..300).map(|n| (n, n + 1)).collect();
    commit(&store.writer().unwrap(), &store, None, 300, &pages, &[name("a")], 1).unwrap();
    let writer = store.writer().unwrap();
    let mut image = writer.image(None, 300).unwrap();
    for (number, seed) in &pages {
        image.put(PageRun::new(*number, 1), &page(*seed)).unwrap();
    }
    let finished = image.finish().unwrap();
    let other = Store::open(dir.path(), Options::default()).unwrap();
    other.delete_ref(&name("a"), Expected::Anything).unwrap();
    assert!(other.gc(GcRoots::Referenced).unwrap().waiting > 0);

    // Started after the condemnation: stores its own copies although the condemned ones still exist.
    let late = other.writer().unwrap();
    let second = commit(&late, &other, None, 300, &pages[..50], &[name("late")], 3).unwrap();
    let first = writer.commit(&common::manifest(&[("memory", finished)], &[], 2), &[name("b")]).unwrap();
    drop(writer);
    for _ in 0..3 {
        other.gc(GcRoots::Referenced).unwrap();
        assert_whole(&other);
    }
    assert_eq!(content(&store, &first).unwrap().len(), 300);
    assert_eq!(content(&store, &second).unwrap().len(), 50);
    drop(late);
    assert_eq!(other.gc(GcRoots::Referenced).unwrap().waiting, 0);
    assert_whole(&other);
}

#[test]
fn a_pinned_capsule_outlives_its_ref() {
    let (dir, store) = store();
    let id = commit(&store.writer().unwrap(), &store, None, 300, &[(1, 1), (2, 2)], &[name("a")], 1).unwrap();
    let pin = store.pin(&id).unwrap();
    store.delete_ref(&name("a"), Expected::Anything).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    let fresh = Store::open(dir.path(), Options::default()).unwrap();
    assert_eq!(content(&fresh, &id).unwrap().len(), 2);
    drop(pin);
    store.gc(GcRoots::Referenced).unwrap();
    assert!(matches!(
        Store::open(dir.path(), Options::default()).unwrap().manifest(&id),
        Err(StoreError::Missing { .. })
    ));
    assert_eq!(packed(dir.path()), 0);
}

#[test]
fn a_capsule_that_was_whole_once_is_refused_when_it_was_collected_since() {
    let (dir, store) = store();
    let id = commit(&store.writer().unwrap(), &store, None, 300, &[(1, 1)], &[name("a")], 1).unwrap();
    drop(store.pin(&id).unwrap());
    store.delete_ref(&name("a"), Expected::Anything).unwrap();
    let other = Store::open(dir.path(), Options::default()).unwrap();
    other.gc(GcRoots::Referenced).unwrap();
    assert!(store.pin(&id).is_err());
    assert!(store.set_ref(&name("b"), &id, Expected::Absent).is_err());
}

#[test]
fn a_base_whose_capsule_was_collected_in_part_is_refused() {
    let (_dir, store) = store();
    let pages: Vec<(u64, u64)> = (0..300).map(|n| (n, n + 1)).collect();
    let id = commit(&store.writer().unwrap(), &store, None, 300, &pages, &[name("a")], 1).unwrap();
    let root = store.manifest(&id).unwrap().images[0].root;
    store.delete_ref(&name("a"), Expected::Anything).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    assert!(store.writer().unwrap().image(root, 300).is_err());
}

#[test]
fn writers_in_several_handles_and_collections_work_side_by_side() {
    let (dir, store) = store();
    let stop = AtomicBool::new(false);
    let stop = &stop;
    let writer = |number: u64| {
        let store = Store::open(dir.path(), Options::default()).unwrap();
        let tag: RefName = name(&format!("w{number}"));
        let (mut base, mut model) = (None, BTreeMap::new());
        for round in 0..12u64 {
            let pages: Vec<_> =
                (0..60).map(|i| ((i * 7 + round * 13 + number) % 900, (round * 5 + i) % 97)).collect();
            let id = commit(
                &store.writer().unwrap(),
                &store,
                base,
                900,
                &pages,
                std::slice::from_ref(&tag),
                round,
            );
            model.extend(pages);
            let id = id.unwrap();
            assert_eq!(content(&store, &id).unwrap(), expected(&model), "writer {number}, round {round}");
            base = Some(id);
        }
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3).map(|number| scope.spawn(move || writer(number))).collect();
        let collector = scope.spawn(|| {
            let mut runs = 0;
            while !stop.load(Ordering::Relaxed) || runs == 0 {
                store.gc(GcRoots::Referenced).unwrap();
                runs += 1;
            }
        });
        let results: Vec<_> = writers.into_iter().map(|w| w.join()).collect();
        stop.store(true, Ordering::Relaxed);
        collector.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    store.gc(GcRoots::Referenced).unwrap();
    assert_whole(&store);
    assert_eq!(store.capsules().unwrap().len(), 3);
}
