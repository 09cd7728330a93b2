//! Power failures, kills and failed writes at every operation: acknowledged changes are complete, others do
//! not exist.

use crate::common::{self, commit, content, crash_disk::CrashDisk, expected, name};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_core::CapsuleId;
use whimbrel_store::{Expected, GcRoots, Options, Result, Store, StoreError};

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
    let report = store.verify(|_, _| {}).unwrap();
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
    let report = store.verify(|_, _| {}).unwrap();
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
        let (mut model, _) = run(&disk, seed, 10);
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
        // The interrupted step has been decided by now, either way.
        model.under_way = model.under_way.take();
        check(&disk, &model, &format!("seed {seed}"));
    }
}

#[test]
fn a_failed_write_latches_the_handle_and_loses_nothing_committed() {
    let total = operations(3, 8);
    let mut latched = 0;
    for at in 1..=total {
        let disk = CrashDisk::new();
        disk.fail_at(at);
        let (mut model, mut random) = (Model::default(), StdRng::seed_from_u64(3));
        let Ok(store) = open(&disk) else { continue };
        let failed = (0..8).find_map(|time| one_step(&store, &mut model, &mut random, time).err());
        if failed.is_some() && matches!(store.writer().err(), Some(StoreError::Latched { .. })) {
            latched += 1;
            assert!(common::is_latched(&store.gc(GcRoots::Referenced).unwrap_err()), "operation {at}");
            assert!(common::is_latched(&store.delete_ref(&name("r0"), Expected::Anything).unwrap_err()));
        }
        drop(store);
        check(&disk, &model, &format!("failed operation {at} of {total}"));
    }
    assert!(latched * 3 > total, "{latched} of {total}");
}
