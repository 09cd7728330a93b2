//! Parents and children: history of refs, pages that a child adds, divergent changes, and independence of
//! children from their parents.

use crate::common::{commit, content, expected, manifest, name};
use proptest::prelude::*;
use std::collections::BTreeMap;
use whimbrel_core::{CapsuleId, PAGE_SIZE};
use whimbrel_store::{Expected, GcRoots, Options, Store};

const PAGES: u64 = 2_000;

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::create()).unwrap();
    (dir, store)
}

fn child(store: &Store, base: Option<CapsuleId>, pages: &[(u64, u64)], tag: &str, time: u64) -> CapsuleId {
    let writer = store.writer().unwrap();
    commit(&writer, store, base, PAGES, pages, &[name(tag)], time).unwrap()
}

#[test]
fn a_ref_remembers_what_it_named_and_forgets_it_with_itself() {
    let (dir, store) = store();
    let tag = name("golden");
    assert!(store.ref_history(&tag).unwrap().is_empty());
    let one = child(&store, None, &[(1, 1)], "golden", 1);
    let two = child(&store, Some(one), &[(1, 2)], "golden", 2);
    store.set_ref(&tag, &two, Expected::Anything).unwrap();
    let versions = |store: &Store| {
        let history = store.ref_history(&tag).unwrap();
        assert!(history.iter().all(|change| change.time > 1_600_000_000_000), "{history:?}");
        history.iter().map(|change| (change.id, change.old)).collect::<Vec<_>>()
    };
    assert_eq!(versions(&store), [(two, Some(one)), (one, None)], "the same again is no change");
    store.set_ref(&tag, &one, Expected::Capsule(two)).unwrap();
    let reader = Store::open(dir.path(), Options::default()).unwrap();
    assert_eq!(versions(&reader), [(one, Some(two)), (two, Some(one)), (one, None)]);
    assert_eq!(reader.get_ref(&tag).unwrap(), Some(one));
    assert!(reader.set_ref(&tag, &two, Expected::Absent).is_err());
    assert_eq!(versions(&reader).len(), 3, "a change that did not happen is not written down");
    store.delete_ref(&tag, Expected::Anything).unwrap();
    assert!(store.ref_history(&tag).unwrap().is_empty());
}

#[test]
fn a_history_is_bounded_and_keeps_the_newest() {
    let (_dir, store) = store();
    let one = child(&store, None, &[(1, 1)], "one", 1);
    let two = child(&store, Some(one), &[(1, 2)], "two", 2);
    for round in 0..200 {
        let id = if round % 2 == 0 { &one } else { &two };
        store.set_ref(&name("busy"), id, Expected::Anything).unwrap();
    }
    let history = store.ref_history(&name("busy")).unwrap();
    assert_eq!(history.len(), 64);
    assert_eq!((history[0].id, history[0].old, history[63].old), (two, Some(one), None));
}

#[test]
fn deleting_a_parent_never_touches_its_children() {
    let (_dir, store) = store();
    let (mut golden, mut kids) = (BTreeMap::new(), Vec::new());
    let pages: Vec<_> = (0..1_500).map(|page| (page, page + 1)).collect();
    golden.extend(pages.iter().copied());
    let parent = child(&store, None, &pages, "golden", 1);
    for kid in 0..3u64 {
        let own: Vec<_> = (0..40).map(|page| (page * 37 + kid, 100_000 + kid * 1_000 + page)).collect();
        let mut model = golden.clone();
        model.extend(own.iter().copied());
        kids.push((child(&store, Some(parent), &own, &format!("kid-{kid}"), 2 + kid), model));
    }
    assert_eq!(store.children(&parent).unwrap().len(), 3);
    store.delete_ref(&name("golden"), Expected::Anything).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    assert!(store.manifest(&parent).is_err(), "the parent is gone");
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete(), "{report:?}");
    for (kid, model) in &kids {
        assert_eq!(content(&store, kid).unwrap(), expected(model));
        assert_eq!(store.manifest(kid).unwrap().parents, [parent], "it still says where it came from");
        assert_eq!(store.log(kid).unwrap().len(), 1);
    }
    assert_eq!(store.children(&parent).unwrap().len(), 3);
}

#[test]
fn a_capsule_adds_what_its_nearest_parent_lacks() {
    let (_dir, store) = store();
    let page = |count: u64| whimbrel_core::ByteSize(count * PAGE_SIZE as u64);
    let one = child(&store, None, &[(1, 1), (2, 2), (3, 2)], "one", 1);
    assert_eq!(store.added(&one).unwrap(), page(2), "equal pages count once");
    let two = child(&store, Some(one), &[(1, 9), (2, 0), (700, 5)], "two", 2);
    assert_eq!(store.added(&two).unwrap(), page(2), "pages that became zero cost nothing");
    let far = child(&store, None, &(0..500).map(|p| (p, 9_000 + p)).collect::<Vec<_>>(), "far", 3);
    let image = store.manifest(&two).unwrap().images[0].clone();
    let writer = store.writer().unwrap();
    let held = writer.image(image.root, PAGES).unwrap().finish().unwrap();
    let merged = manifest(&[("memory", held)], &[far, two], 4);
    let merged = writer.commit(&merged, &[name("merged")]).unwrap();
    assert_eq!(store.added(&merged).unwrap(), page(0));
    drop(writer);
    for tag in ["one", "two", "far"] {
        store.delete_ref(&name(tag), Expected::Anything).unwrap();
    }
    store.gc(GcRoots::Referenced).unwrap();
    assert_eq!(store.added(&merged).unwrap(), page(3), "without its parents here all of it is its own");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn conflicts_are_what_both_sides_changed_to_something_else(
        base in prop::collection::vec((0..PAGES, 1..20u64), 0..60),
        ours in prop::collection::vec((0..PAGES, 0..20u64), 0..60),
        theirs in prop::collection::vec((0..PAGES, 0..20u64), 0..60),
        shared in prop::collection::vec((0..PAGES, 0..20u64), 0..20),
    ) {
        let (_dir, store) = store();
        let both = |own: &[(u64, u64)]| own.iter().chain(&shared).copied().collect::<Vec<_>>();
        let (ours, theirs) = (both(&ours), both(&theirs));
        let ids = [(None, &base), (Some(()), &ours), (Some(()), &theirs)];
        let root = child(&store, None, &base, "base", 1);
        let [b, o, t] = ids.map(|(parent, pages)| match parent {
            None => root,
            Some(()) => child(&store, Some(root), pages, &format!("t{}", pages.len()), 2),
        });
        let model = |own: &[(u64, u64)]| {
            let mut model: BTreeMap<u64, u64> = base.iter().copied().collect();
            model.extend(own.iter().copied());
            move |page: u64| model.get(&page).copied().unwrap_or(0)
        };
        let (in_base, in_ours, in_theirs) = (model(&[]), model(&ours), model(&theirs));
        let [b, o, t] = [b, o, t].map(|id| store.manifest(&id).unwrap());
        let found = store.divergence("memory", &b, &o, &t).unwrap().unwrap();
        let wanted = |differs: &dyn Fn(u64) -> bool| (0..PAGES).filter(|page| differs(*page)).collect::<Vec<_>>();
        prop_assert_eq!(found.ours.iter().collect::<Vec<_>>(), wanted(&|p| in_ours(p) != in_base(p)));
        prop_assert_eq!(found.theirs.iter().collect::<Vec<_>>(), wanted(&|p| in_theirs(p) != in_base(p)));
        let conflict =
            |p: u64| in_ours(p) != in_base(p) && in_theirs(p) != in_base(p) && in_ours(p) != in_theirs(p);
        prop_assert_eq!(found.conflicts.iter().collect::<Vec<_>>(), wanted(&conflict));
        prop_assert!(store.divergence("disk0", &b, &o, &t).unwrap().is_none());
    }
}
