//! Power failures, kills and failed writes at every operation: acknowledged changes are complete, others do
//! not exist.

use crate::common::{self, commit, content, crash_disk::CrashDisk, expected, name};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::io::Errno;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use whimbrel_core::CapsuleId;
use whimbrel_store::{Expected, GcRoots, Options, Result, Store, StoreError, vfs::Vfs};

const PAGES: u64 = 400;

/// A ref's capsule and the pages it should have.
type Content = Option<(CapsuleId, BTreeMap<u64, u64>)>;

/// Expected refs, and the change that was in progress for one of them.
#[derive(Default, Clone)]
struct Model {
    refs: BTreeMap<String, (CapsuleId, BTreeMap<u64, u64>)>,
    /// A ref and the pages it would get; none if it is being deleted.
    under_way: Option<(String, Option<BTreeMap<u64, u64>>)>,
}

fn options() -> Options {
    Options { workers: 1, cache: 1 << 20, ..Options::create() }
}

fn open(disk: &CrashDisk) -> Result<Store> {
    Store::open_on(Arc::new(disk.clone()), options())
}

fn one_step(store: &Store, model: &mut Model, random: &mut StdRng, time: u64) -> Result<()> {
    let tag = format!("r{}", random.random_range(0..3));
    match random.random_range(0..10) {
        0..6 => {
            let base = model.refs.get(&format!("r{}", random.random_range(0..3))).cloned();
            let count = random.random_range(0..60);
            let pages: Vec<_> =
                (0..count).map(|_| (random.random_range(0..PAGES), random.random_range(0..50))).collect();
            let mut after = base.as_ref().map(|(_, pages)| pages.clone()).unwrap_or_default();
            after.extend(pages.iter().copied());
            model.under_way = Some((tag.clone(), Some(after.clone())));
            let writer = store.writer()?;
            let id = commit(&writer, store, base.map(|(id, _)| id), PAGES, &pages, &[name(&tag)], time)?;
            model.refs.insert(tag, (id, after));
        }
        6 if model.refs.contains_key(&tag) => {
            model.under_way = Some((tag.clone(), None));
            store.delete_ref(&name(&tag), Expected::Anything)?;
            model.refs.remove(&tag);
        }
        _ => drop(store.gc(GcRoots::Referenced)?),
    }
    model.under_way = None;
    Ok(())
}

fn run(disk: &CrashDisk, seed: u64, steps: u64) -> (Model, Result<()>) {
    let (mut model, mut random) = (Model::default(), StdRng::seed_from_u64(seed));
    let result = open(disk)
        .and_then(|store| (0..steps).try_for_each(|t| one_step(&store, &mut model, &mut random, t)));
    (model, result)
}

fn found(store: &Store, tag: &str) -> Content {
    let id = store.get_ref(&name(tag)).unwrap()?;
    let pages = content(store, &id).unwrap();
    Some((id, pages.keys().map(|page| (*page, 0)).collect()))
}

/// All acknowledged changes exist, the interrupted step happened completely or not at all, and the store
/// works.
fn check(disk: &CrashDisk, model: &Model, what: &str) {
    let store = open(disk).unwrap();
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete(), "{what}: {report:?}");
    for tag in ["r0", "r1", "r2"] {
        let now = store.get_ref(&name(tag)).unwrap();
        let before = model.refs.get(tag);
        let pages = now.map(|id| content(&store, &id).unwrap());
        let is_before = now == before.map(|(id, _)| *id) && pages == before.map(|(_, pages)| expected(pages));
        let is_after = model
            .under_way
            .as_ref()
            .is_some_and(|(changing, after)| changing == tag && pages == after.as_ref().map(expected));
        assert!(is_before || is_after, "{what}: {tag} is {:?}", found(&store, tag).map(|(id, _)| id));
    }
    let kept = ["r0", "r1", "r2"].map(|tag| found(&store, tag));
    store.gc(GcRoots::Referenced).unwrap();
    commit(&store.writer().unwrap(), &store, None, PAGES, &[(1, 999)], &[name("new")], 1).unwrap();
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.orphans.is_empty(), "{what}: {report:?}");
    assert_eq!(["r0", "r1", "r2"].map(|tag| found(&store, tag)), kept, "{what}");
}

fn operations(seed: u64, steps: u64) -> u64 {
    let disk = CrashDisk::new();
    run(&disk, seed, steps).1.unwrap();
    disk.operations()
}

#[test]
fn power_may_fail_at_any_operation_of_hundreds_of_histories() {
    for seed in 0..300 {
        let total = operations(seed, 8);
        let at = StdRng::seed_from_u64(seed ^ 0xc0ffee).random_range(1..=total);
        let disk = CrashDisk::new();
        disk.power_off_at(at);
        let (model, _) = run(&disk, seed, 8);
        for variant in 0..3 {
            let what = format!("seed {seed}, operation {at} of {total}, variant {variant}");
            check(&disk.after_power_failure(seed * 10 + variant), &model, &what);
        }
        check(&disk.after_kill(), &model, &format!("seed {seed}, killed at {at} of {total}"));
    }
}

#[test]
fn power_may_fail_at_every_single_operation_of_one_history() {
    let total = operations(7, 12);
    for at in 1..=total {
        let disk = CrashDisk::new();
        disk.power_off_at(at);
        let (model, _) = run(&disk, 7, 12);
        check(&disk.after_power_failure(at), &model, &format!("operation {at} of {total}"));
    }
}

#[test]
fn power_may_fail_again_while_the_store_recovers() {
    for seed in 0..60 {
        let total = operations(seed, 10);
        let disk = CrashDisk::new();
        disk.power_off_at(total * 3 / 4);
        let (model, _) = run(&disk, seed, 10);
        let mut random = StdRng::seed_from_u64(seed);
        let mut disk = disk.after_power_failure(seed);
        for attempt in 0..4 {
            disk.power_off_at(random.random_range(1..60));
            let collected = open(&disk).and_then(|store| store.gc(GcRoots::Referenced));
            disk = disk.after_power_failure(seed * 7 + attempt);
            if collected.is_ok() {
                break;
            }
        }
        check(&disk, &model, &format!("seed {seed}"));
    }
}

/// Refs that a process has seen stay, and so does what it builds on what a killed one left.
#[test]
fn power_may_fail_after_a_killed_process_was_followed_by_another() {
    for seed in 0..200 {
        let total = operations(seed, 8);
        let mut random = StdRng::seed_from_u64(seed ^ 0xdecade);
        let disk = CrashDisk::new();
        disk.power_off_at(random.random_range(1..=total));
        let (mut model, _) = run(&disk, seed, 8);
        let disk = disk.after_kill();
        let store = open(&disk).unwrap();
        let seen = ["r0", "r1", "r2"].map(|tag| found(&store, tag));
        for (tag, seen) in ["r0", "r1", "r2"].iter().zip(&seen) {
            decide(&mut model, &store, tag, seen.is_some());
        }
        if random.random() {
            store.gc(GcRoots::Referenced).unwrap();
        }
        for time in 100..100 + random.random_range(0..3) {
            one_step(&store, &mut model, &mut random, time).unwrap();
        }
        let what = format!("seed {seed}, second life");
        (0..3).for_each(|variant| check(&disk.after_power_failure(seed * 10 + variant), &model, &what));
    }
}

/// Settles the interrupted change of a ref by what the next process sees.
fn decide(model: &mut Model, store: &Store, tag: &str, is_there: bool) {
    let Some((changing, after)) = model.under_way.clone() else { return };
    if changing != tag {
        return;
    }
    let id = store.get_ref(&name(tag)).unwrap();
    if id == model.refs.get(tag).map(|(id, _)| *id) {
        model.under_way = None;
        return;
    }
    assert_eq!(is_there, after.is_some());
    match id.zip(after) {
        Some((id, pages)) => drop(model.refs.insert(changing, (id, pages))),
        None => drop(model.refs.remove(tag)),
    }
    model.under_way = None;
}

/// A disk with capsules upon capsules, some of them without a ref, and the refs that remain.
fn with_garbage(seed: u64) -> (CrashDisk, BTreeMap<String, CapsuleId>) {
    let disk = CrashDisk::new();
    let store = open(&disk).unwrap();
    let mut random = StdRng::seed_from_u64(seed);
    let (mut refs, mut base) = (BTreeMap::new(), None);
    for time in 0..24u64 {
        let write =
            |random: &mut StdRng| (random.random_range(0..PAGES), random.random_range(0..50) + time * 50);
        let pages: Vec<_> = (0..40).map(|_| write(&mut random)).collect();
        let tag = format!("r{}", time % 3);
        let id = commit(&store.writer().unwrap(), &store, base, PAGES, &pages, &[name(&tag)], time).unwrap();
        refs.insert(tag, id);
        base = (random.random_range(0..4) > 0).then_some(id);
    }
    for tag in ["r0", "r1", "r2"] {
        if random.random() {
            store.delete_ref(&name(tag), Expected::Anything).unwrap();
            refs.remove(tag);
        }
    }
    (disk, refs)
}

#[test]
fn a_collection_that_was_killed_at_any_operation_leaves_no_damage() {
    for seed in 0..4 {
        let (garbage, refs) = with_garbage(seed);
        let whole = garbage.after_kill();
        open(&whole).unwrap().gc(GcRoots::Referenced).unwrap();
        for at in 1..=whole.operations() {
            let disk = garbage.after_kill();
            disk.power_off_at(at);
            let _ = open(&disk).and_then(|store| store.gc(GcRoots::Referenced));
            let store = open(&disk.after_kill()).unwrap();
            let report = store.verify(|_, _| true).unwrap();
            assert!(report.is_complete(), "seed {seed}, operation {at}: {report:?}");
            for (tag, id) in &refs {
                assert_eq!(store.get_ref(&name(tag)).unwrap(), Some(*id), "seed {seed}, operation {at}");
            }
        }
    }
}

#[test]
fn an_io_error_latches_the_handle_and_loses_nothing_committed() {
    let total = operations(3, 8);
    let mut latched = 0;
    for at in 1..=total {
        let disk = CrashDisk::new();
        disk.fail_at(at, Errno::IO);
        let (mut model, mut random) = (Model::default(), StdRng::seed_from_u64(3));
        let Ok(store) = open(&disk) else { continue };
        let failed = (0..8).find_map(|time| one_step(&store, &mut model, &mut random, time).err());
        if failed.is_some() && matches!(store.writer().err(), Some(StoreError::Latched { .. })) {
            latched += 1;
            assert!(common::is_latched(&store.delete_ref(&name("r0"), Expected::Anything).unwrap_err()));
            assert!(common::is_latched(&store.writer().unwrap_err()), "operation {at}");
            disk.fail_at(disk.operations() + 1, Errno::IO);
            assert!(store.reopen().is_err(), "operation {at}: the disk still fails");
            assert!(common::is_latched(&store.writer().unwrap_err()), "operation {at}");
            store.reopen().unwrap();
            let id =
                commit(&store.writer().unwrap(), &store, None, PAGES, &[(1, 7)], &[name("x")], 9).unwrap();
            assert_eq!(content(&store, &id).unwrap().len(), 1, "operation {at}");
        }
        drop(store);
        check(&disk, &model, &format!("failed operation {at} of {total}"));
    }
    assert!(latched * 3 > total, "{latched} of {total}");
}

#[test]
fn a_writer_that_was_open_when_the_disk_failed_stays_failed() {
    let disk = CrashDisk::new();
    let store = open(&disk).unwrap();
    let writer = store.writer().unwrap();
    let base = commit(&writer, &store, None, PAGES, &[(1, 1)], &[], 1).unwrap();
    disk.fail_at(disk.operations() + 1, Errno::IO);
    assert!(store.set_ref(&name("a"), &base, Expected::Anything).is_err());
    store.reopen().unwrap();
    assert!(commit(&writer, &store, None, PAGES, &[(1, 2)], &[name("a")], 2).is_err());
    commit(&store.writer().unwrap(), &store, None, PAGES, &[(1, 2)], &[name("a")], 2).unwrap();
}

/// A full disk, or too many open files, fails what meets it and nothing after it.
#[test]
fn an_operation_without_room_fails_alone_and_leaves_nothing() {
    let total = operations(3, 8);
    for error in [Errno::NOSPC, Errno::MFILE] {
        let mut failed = 0;
        for at in 1..=total {
            let disk = CrashDisk::new();
            let Ok(store) = open(&disk) else { panic!() };
            disk.fail_at(at, error);
            let (mut model, mut random) = (Model::default(), StdRng::seed_from_u64(3));
            for time in 0..8 {
                let (before, packs) = (model.clone(), disk.paths("packs"));
                let Err(error) = one_step(&store, &mut model, &mut random, time) else { continue };
                let is_sync = matches!(error, StoreError::Latched { .. }) || store.writer().is_err();
                if is_sync {
                    break;
                }
                failed += 1;
                if before.refs == model.refs && !matches!(error, StoreError::Index { .. }) {
                    let left: Vec<_> =
                        disk.paths("packs").into_iter().filter(|p| !packs.contains(p)).collect();
                    let known = store.verify(|_, _| true).unwrap().orphans;
                    assert!(known.is_empty(), "{at}: {left:?} {known:?} {error:?}");
                    assert!(disk.paths("tmp").is_empty(), "{at}: {:?}", disk.paths("tmp"));
                }
                let tag = [name("after")];
                commit(&store.writer().unwrap(), &store, None, PAGES, &[(1, 7)], &tag, 9).unwrap();
                store.gc(GcRoots::Referenced).unwrap();
            }
            drop(store);
            check(&disk, &model, &format!("failed operation {at} of {total}"));
        }
        assert!(failed * 4 > total, "{failed} of {total}");
    }
}

/// A store with two refs, the second of which has pages of its own and changes of the first one's.
fn with_two_refs(disk: &CrashDisk) -> Store {
    let store = open(disk).unwrap();
    let pages: Vec<_> = (0..40).map(|at| (at, at + 1)).collect();
    let first = commit(&store.writer().unwrap(), &store, None, PAGES, &pages, &[name("a")], 1).unwrap();
    let changes: Vec<_> = (20..60).map(|at| (at, at + 100)).collect();
    commit(&store.writer().unwrap(), &store, Some(first), PAGES, &changes, &[name("b")], 2).unwrap();
    store
}

fn assert_all_whole(disk: &CrashDisk, when: &str) {
    let store = open(disk).unwrap();
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete(), "{when}: {report:?}");
    store.list_refs().unwrap().values().for_each(|id| drop(content(&store, id).unwrap()));
}

#[test]
fn a_name_that_a_loss_of_power_brings_back_finds_its_capsule() {
    let mut back = 0;
    for seed in 0..32 {
        let disk = CrashDisk::new();
        let store = with_two_refs(&disk);
        // Somebody removes it, and the sync of its folder is still to come.
        disk.remove("refs/b").unwrap();
        if seed % 2 == 0 {
            store.gc(GcRoots::Referenced).unwrap();
        }
        let disk = disk.after_power_failure(seed);
        assert_all_whole(&disk, &format!("seed {seed}"));
        back += u32::from(open(&disk).unwrap().get_ref(&name("b")).unwrap().is_some());
    }
    assert!(back > 0, "no name has come back");
}

#[test]
fn a_read_that_fails_while_an_index_is_rebuilt_leaves_nothing_out_of_it() {
    let written = CrashDisk::new();
    drop(with_two_refs(&written));
    let mut failed = 0;
    for reads in 0.. {
        let disk = written.after_kill();
        disk.paths("index").iter().for_each(|(path, _)| disk.delete(path));
        let store = open(&disk).unwrap();
        disk.fail_read_after(reads);
        let rebuilt = store.reindex();
        let is_reached = !disk.reads_are_to_fail();
        drop(store);
        let disk = disk.after_kill();
        open(&disk).unwrap().reindex().unwrap();
        assert_all_whole(&disk, &format!("after read {reads} has failed: {rebuilt:?}"));
        if !is_reached {
            break;
        }
        failed += 1;
    }
    assert!(failed > 3, "only {failed} reads");
}

#[test]
fn what_an_index_names_stays_while_nobody_can_open_the_index() {
    // One file or folder that cannot be opened, or two with one between them that can.
    for refused in [0b1, 0b101] {
        for left in 0.. {
            let disk = CrashDisk::new();
            let store = with_two_refs(&disk);
            let changes: Vec<_> = (200..240).map(|at| (at, at)).collect();
            disk.refuse_descriptors(left, refused);
            let work = store.writer().and_then(|writer| {
                commit(&writer, &store, None, PAGES, &changes, &[name("a")], 3)?;
                drop(writer);
                store.gc(GcRoots::Referenced)
            });
            let is_reached = disk.has_refused();
            assert_all_whole(&disk, &format!("opened {left}: {work:?}"));
            store.gc(GcRoots::Referenced).unwrap();
            drop(store);
            assert_all_whole(&disk, &format!("opened {left}: after the next collection"));
            if !is_reached {
                assert!(left > 20, "only {left} are opened");
                break;
            }
        }
    }
}

/// Versions of one machine of which only the last one is named. Each changes
/// the same few pages, so its nodes are deltas of those before.
fn versions(disk: &CrashDisk) -> Vec<CapsuleId> {
    let store = open(disk).unwrap();
    let mut ids = Vec::<CapsuleId>::new();
    for version in 0..14 {
        let changed = if version == 0 { PAGES } else { 5 };
        let changes: Vec<_> = (0..changed).map(|at| (at, at * 1_000 + version + 1)).collect();
        let writer = store.writer().unwrap();
        let base = ids.last().copied();
        ids.push(commit(&writer, &store, base, PAGES, &changes, &[name("a")], version).unwrap());
    }
    ids
}

#[test]
fn no_pack_is_without_an_index_wherever_a_collection_was_ended() {
    let written = CrashDisk::new();
    let ids = versions(&written);
    let before: BTreeSet<String> = written.paths("packs").into_iter().map(|(path, _)| path).collect();
    let mut halves = 0;
    for operation in 0.. {
        let disk = written.after_kill();
        let store = open(&disk).unwrap();
        disk.power_off_at(disk.operations() + operation);
        let ended = store.gc(GcRoots::Referenced);
        drop(store);
        let store = open(&disk.after_kill()).unwrap();
        halves += u32::from(store.reindex_if_needed().unwrap());
        let report = store.verify(|_, _| true).unwrap();
        // That of the collection itself may be: nothing relies on it.
        let mut unnamed = report.orphans.iter().map(|pack| format!("packs/{pack}"));
        assert!(report.is_complete(), "ended at operation {operation}: {report:?}");
        assert!(!unnamed.any(|pack| before.contains(&pack)), "ended at operation {operation}: {report:?}");
        for id in ids.iter().filter(|id| store.is_complete(id).unwrap_or(false)) {
            content(&store, id).unwrap();
        }
        if ended.is_ok() {
            assert!(
                operation > 20 && halves > 0,
                "operation {operation}, {halves} indexes were half rewritten"
            );
            break;
        }
    }
}
