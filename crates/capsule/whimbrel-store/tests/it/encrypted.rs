//! Encrypted stores: what lies on the disk, keys that do not fit, new master keys, and stores that become
//! encrypted, with power failures at every operation.

use crate::common::{commit, content, crash_disk::CrashDisk, expected, name};
use rustix::io::Errno;
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun};
use whimbrel_image::Manifest;
use whimbrel_store::{GcRoots, MasterKey, Options, Result, Store, StoreError};

const PAGES: u64 = 400;

fn key(byte: u8) -> MasterKey {
    Digest([byte; 32]).to_string().parse().unwrap()
}

fn options(key: Option<MasterKey>) -> Options {
    // One pack a collection, so that deltas and their bases are sealed by different ones.
    Options { workers: 1, cache: 1 << 20, key, seal_bytes: 1, ..Options::create() }
}

fn open(disk: &CrashDisk, key: Option<MasterKey>) -> Result<Store> {
    Store::open_on(Arc::new(disk.clone()), options(key))
}

/// Some noise, once in a page.
const CANARY: &[u8] = b"\x8f\x13\xe7\x5a\xc2\x01\xd9\x6b\x3e\xf4\x90\x2d\xb7\x48\xaa\x15";

/// A page that does not compress, with the canary in it.
fn canary_page(number: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for byte in &mut page {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8;
    }
    page[1000..1000 + CANARY.len()].copy_from_slice(CANARY);
    page
}

/// A capsule of pages with canaries, and a device state with one.
fn commit_canaries(store: &Store) -> CapsuleId {
    let writer = store.writer().unwrap();
    let mut image = writer.image(None, PAGES).unwrap();
    for number in 0..64 {
        image.put(PageRun::new(number, 1), &canary_page(number)).unwrap();
    }
    let finished = image.finish().unwrap();
    let mut manifest = crate::common::manifest(&[("memory", finished)], &[], 1);
    manifest.device = vec![writer.put_blob(&[CANARY, &canary_page(999)].concat()).unwrap()];
    manifest.labels.insert("machine".into(), "canary-in-a-manifest".into());
    writer.commit(&manifest, &[name("a")]).unwrap()
}

fn files_with(disk: &CrashDisk, needle: &[u8]) -> Vec<String> {
    let all = disk.contents();
    let with = all.iter().filter(|(_, bytes)| bytes.windows(needle.len()).any(|window| window == needle));
    with.map(|(path, _)| path.clone()).collect()
}

#[test]
fn a_thief_of_the_disk_finds_neither_content_nor_the_digests_of_known_content() {
    let (plain, sealed) = (CrashDisk::new(), CrashDisk::new());
    let id = commit_canaries(&open(&plain, None).unwrap());
    assert_eq!(commit_canaries(&open(&sealed, Some(key(1))).unwrap()), id, "ids do not depend on keys");
    let page = Digest::of(&canary_page(5));
    for needle in [CANARY, &page.0[..16], &page.0[..8]] {
        assert_ne!(files_with(&plain, needle), [] as [String; 0], "the search finds what is there");
        assert_eq!(files_with(&sealed, needle), [] as [String; 0]);
    }
    let store = open(&sealed, Some(key(1))).unwrap();
    assert_eq!(content(&store, &id).unwrap().get(&5).unwrap(), &canary_page(5));
    assert!(store.verify(|_, _| true).unwrap().is_complete());
}

#[test]
fn a_wrong_or_missing_key_is_refused_by_name_before_anything_is_written() {
    let disk = CrashDisk::new();
    commit_canaries(&open(&disk, Some(key(1))).unwrap());
    let before = disk.contents();
    let wrong = open(&disk, Some(key(2))).err().unwrap();
    assert!(matches!(wrong, StoreError::WrongKey { wanted, given }
        if wanted == key(1).id() && given == key(2).id()));
    let missing = open(&disk, None).err().unwrap();
    assert!(matches!(missing, StoreError::KeyNeeded { master } if master == key(1).id()));
    assert!(missing.to_string().contains(&key(1).id().to_string()), "{missing}");
    assert_eq!(disk.contents(), before);
    // A marker that was lost does not make it a plain store.
    disk.delete("whimbrel-store");
    assert!(matches!(open(&disk, None).err().unwrap(), StoreError::KeyNeeded { .. }));
    assert!(matches!(open(&disk, Some(key(2))).err().unwrap(), StoreError::WrongKey { .. }));
    open(&disk, Some(key(1))).unwrap();
    assert_eq!(disk.contents().get("packs"), before.get("packs"));
}

#[test]
fn a_damaged_key_file_is_healed_from_its_copy_and_two_are_refused_untouched() {
    let disk = CrashDisk::new();
    let id = commit_canaries(&open(&disk, Some(key(1))).unwrap());
    let good = disk.contents()["keys"].clone();
    for (file, at) in [("keys", 30), ("keys.copy", 90), ("keys", good.len() - 3)] {
        disk.flip(file, at, 1);
        let store = open(&disk, Some(key(1))).unwrap();
        assert_eq!(content(&store, &id).unwrap().len(), 64);
        assert_eq!((&disk.contents()["keys"], &disk.contents()["keys.copy"]), (&good, &good));
    }
    disk.flip("keys", 30, 1);
    disk.flip("keys.copy", 30, 1);
    let before = disk.contents();
    for given in [None, Some(key(1)), Some(key(2))] {
        assert!(matches!(open(&disk, given).err().unwrap(), StoreError::Keys { .. }));
    }
    assert_eq!(disk.contents(), before, "somebody may have a copy of the keys elsewhere");
}

#[test]
fn the_keys_of_another_store_are_refused_under_the_right_master_key() {
    let (disk, other) = (CrashDisk::new(), CrashDisk::new());
    let id = commit_canaries(&open(&disk, Some(key(1))).unwrap());
    open(&other, Some(key(1))).unwrap();
    let ours = disk.contents()["keys"].clone();
    disk.put("keys", &other.contents()["keys"]);
    // The copy has the right ones.
    assert_eq!(content(&open(&disk, Some(key(1))).unwrap(), &id).unwrap().len(), 64);
    disk.put("keys.copy", &other.contents()["keys"]);
    assert!(matches!(open(&disk, Some(key(1))).err().unwrap(), StoreError::Keys { .. }));
    disk.put("keys", &ours);
    assert_eq!(content(&open(&disk, Some(key(1))).unwrap(), &id).unwrap().len(), 64);
}

#[test]
fn frames_that_were_exchanged_are_refused() {
    let disk = CrashDisk::new();
    let store = open(&disk, Some(key(1))).unwrap();
    let blobs = [1, 2].map(|number| {
        let writer = store.writer().unwrap();
        let blob = writer.put_blob(&canary_page(number)).unwrap();
        let manifest = Manifest { device: vec![blob], ..crate::common::manifest(&[], &[], number) };
        writer.commit(&manifest, &[name(&format!("r{number}"))]).unwrap();
        blob
    });
    let packs = disk.paths("packs");
    let [(one, _), (two, _)] = &packs[..] else { panic!("{packs:?}") };
    let (a, b) = (disk.contents()[one].clone(), disk.contents()[two].clone());
    // The first frames have the same place and length.
    let end = 24 + 20 + 28 + 4 + PAGE_SIZE + 16;
    disk.put(one, &[&a[..24], &b[24..end], &a[end..]].concat());
    disk.put(two, &[&b[..24], &a[24..end], &b[end..]].concat());
    let store = open(&disk, Some(key(1))).unwrap();
    for blob in blobs {
        let refused = store.blob(&blob).unwrap_err();
        let source = std::error::Error::source(&refused).unwrap().to_string();
        assert!(source.contains("was not sealed"), "{source}");
    }
}

#[test]
fn power_may_fail_at_every_operation_of_a_change_of_the_master_key() {
    let disk = CrashDisk::new();
    let id = commit_canaries(&open(&disk, Some(key(1))).unwrap());
    let change =
        |disk: &CrashDisk| open(disk, Some(key(1))).and_then(|store| store.change_master_key(&key(2)));
    let whole = disk.after_kill();
    change(&whole).unwrap();
    let (mut old, mut new) = (0, 0);
    for at in 1..=whole.operations() + 1 {
        let broken = disk.after_kill();
        broken.power_off_at(at);
        let changed = change(&broken).is_ok();
        for variant in 0..8 {
            let left = match variant {
                0 => broken.after_kill(),
                seed => broken.after_power_failure(seed),
            };
            let opens = [key(1), key(2)].map(|key| open(&left, Some(key)).is_ok());
            assert!(opens[0] != opens[1] && (!changed || opens[1]), "operation {at}: {opens:?}");
            old += u64::from(opens[0]);
            new += u64::from(opens[1]);
            let store = open(&left, Some(if opens[0] { key(1) } else { key(2) })).unwrap();
            assert_eq!(content(&store, &id).unwrap().len(), 64, "operation {at}");
            assert_eq!(left.contents()["keys"], left.contents()["keys.copy"], "operation {at}");
        }
    }
    assert!(old > 0 && new > 0);
    let store = open(&whole, Some(key(2))).unwrap();
    assert_eq!(store.encryption().unwrap().unwrap().master, key(2).id());
    assert_eq!(whole.paths("packs"), disk.paths("packs"), "no pack is rewritten");
}

#[test]
fn an_open_store_goes_on_after_its_master_key_was_changed() {
    let disk = CrashDisk::new();
    let (store, other) = (open(&disk, Some(key(1))).unwrap(), open(&disk, Some(key(1))).unwrap());
    other.change_master_key(&key(2)).unwrap();
    let id = commit_canaries(&store);
    store.change_master_key(&key(3)).unwrap();
    assert!(open(&disk, Some(key(2))).is_err());
    assert_eq!(content(&open(&disk, Some(key(3))).unwrap(), &id).unwrap().len(), 64);
    let plain = open(&CrashDisk::new(), None).unwrap();
    assert!(matches!(plain.change_master_key(&key(1)).unwrap_err(), StoreError::NotEncrypted));
}

/// A plain store with two lines of capsules, and what they should have.
fn plain_store() -> (CrashDisk, BTreeMap<CapsuleId, BTreeMap<u64, u64>>) {
    let disk = CrashDisk::new();
    let store = open(&disk, None).unwrap();
    let (mut wanted, mut base, mut model) = (BTreeMap::new(), None, BTreeMap::new());
    for time in 0..3u64 {
        let pages: Vec<(u64, u64)> = (0..24).map(|n| ((n * 7 + time * 13) % PAGES, n + 100 * time)).collect();
        model.extend(pages.iter().copied());
        let refs = [name(&format!("r{time}"))];
        let id = commit(&store.writer().unwrap(), &store, base, PAGES, &pages, &refs, time).unwrap();
        wanted.insert(id, model.clone());
        base = Some(id);
    }
    (disk, wanted)
}

fn check(store: &Store, wanted: &BTreeMap<CapsuleId, BTreeMap<u64, u64>>, what: &str) {
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete(), "{what}: {report:?}");
    for (id, pages) in wanted {
        assert_eq!(content(store, id).unwrap(), expected(pages), "{what}");
    }
}

fn plain_packs(disk: &CrashDisk) -> usize {
    let packs = disk.paths("packs");
    packs
        .iter()
        .filter(|(path, _)| path.split_once('-').is_some_and(|(_, seq)| !seq.starts_with('8')))
        .count()
}

#[test]
fn power_may_fail_at_every_operation_while_a_store_becomes_encrypted() {
    let (disk, wanted) = plain_store();
    let migrate = |disk: &CrashDisk| {
        open(disk, Some(key(1))).and_then(|store| store.seal_rest(GcRoots::Referenced, &[], |_, _| true))
    };
    let whole = disk.after_kill();
    migrate(&whole).unwrap();
    let total = whole.operations();
    let (mut plain, mut half) = (0, 0);
    for at in 1..=total {
        let broken = disk.after_kill();
        broken.power_off_at(at);
        let _ = migrate(&broken);
        for left in [broken.after_kill(), broken.after_power_failure(at)] {
            let what = format!("operation {at} of {total}");
            if let Ok(store) = open(&left, None) {
                plain += 1;
                check(&store, &wanted, &what);
            }
            let store = open(&left, Some(key(1))).unwrap();
            half += u64::from(plain_packs(&left) > 0);
            check(&store, &wanted, &what);
            let report = store.seal_rest(GcRoots::Referenced, &[], |_, _| true).unwrap();
            assert_eq!((report.left.0, plain_packs(&left)), (0, 0), "{what}");
            check(&store, &wanted, &what);
            assert!(store.verify(|_, _| true).unwrap().orphans.is_empty(), "{what}");
        }
    }
    assert!(plain > 0 && half > plain, "{plain} {half}");
}

#[test]
fn a_migrated_store_has_nothing_plain_left_and_says_how_far_it_is() {
    let disk = CrashDisk::new();
    let id = commit_canaries(&open(&disk, None).unwrap());
    let digest = Digest::of(&canary_page(5)).0;
    let store = open(&disk, Some(key(1))).unwrap();
    assert!(store.encryption().unwrap().unwrap().plain.0 > 64 * 4096);
    assert_ne!(files_with(&disk, CANARY), [] as [String; 0], "encrypting rewrites nothing by itself");
    let mut steps = Vec::new();
    let report = store
        .seal_rest(GcRoots::Referenced, &[], |done, total| {
            steps.push((done, total));
            true
        })
        .unwrap();
    assert!(report.left.0 == 0 && report.removed.0 > 64 * 4096, "{report:?}");
    assert!(steps.first().unwrap().0 == 0 && steps.last().unwrap().0 == steps.last().unwrap().1);
    for needle in [CANARY, b"canary-in-a-manifest", &digest[..16]] {
        assert_eq!(files_with(&disk, needle), [] as [String; 0]);
    }
    assert_eq!(content(&store, &id).unwrap().len(), 64);
    assert_eq!(store.encryption().unwrap().unwrap().plain.0, 0);
}

#[test]
fn plain_copies_do_not_count_for_a_writer_of_an_encrypted_store() {
    let disk = CrashDisk::new();
    let id = commit_canaries(&open(&disk, None).unwrap());
    let store = open(&disk, Some(key(1))).unwrap();
    assert_eq!(commit_canaries(&store), id);
    let sealed: usize =
        disk.paths("packs").iter().filter(|(path, _)| path.contains("-8")).map(|(_, len)| len).sum();
    assert!(sealed > 64 * 4096, "{sealed}");
    assert_eq!(commit_canaries(&store), id);
    let again: usize =
        disk.paths("packs").iter().filter(|(path, _)| path.contains("-8")).map(|(_, len)| len).sum();
    assert_eq!(again, sealed, "sealed copies count");
}

#[test]
fn a_handle_from_before_the_store_was_encrypted_writes_and_collects_nothing() {
    let (disk, wanted) = plain_store();
    let old = open(&disk, None).unwrap();
    let writer = old.writer().unwrap();
    assert!(matches!(open(&disk, Some(key(1))).err().unwrap(), StoreError::InUse));
    drop(writer);
    let store = open(&disk, Some(key(1))).unwrap();
    commit_canaries(&store);
    assert!(matches!(old.writer().err().unwrap(), StoreError::LayoutChanged));
    assert!(matches!(old.gc(GcRoots::Referenced).unwrap_err(), StoreError::LayoutChanged));
    old.reindex().unwrap();
    check(&store, &wanted, "after the old handle looked around");
}

#[test]
fn lost_indexes_are_made_again_from_sealed_packs_and_packs_of_another_key_are_left_alone() {
    let (disk, other) = (CrashDisk::new(), CrashDisk::new());
    let id = commit_canaries(&open(&disk, Some(key(1))).unwrap());
    commit_canaries(&open(&other, Some(key(1))).unwrap());
    let (stray, _) = other.paths("packs").remove(0);
    disk.put(&stray, &other.contents()[&stray]);
    disk.paths("index").iter().for_each(|(path, _)| disk.delete(path));
    let store = open(&disk, Some(key(1))).unwrap();
    assert!(store.manifest(&id).is_err());
    store.gc(GcRoots::Referenced).unwrap();
    assert_eq!(content(&store, &id).unwrap().len(), 64);
    assert!(store.verify(|_, _| true).unwrap().is_complete());
    assert_eq!(disk.contents()[&stray], other.contents()[&stray], "somebody may have its key");
}

#[test]
fn a_full_disk_stops_a_migration_and_loses_nothing() {
    let (disk, wanted) = plain_store();
    let store = open(&disk, Some(key(1))).unwrap();
    disk.limit(Some(2000));
    let _ = store.seal_rest(GcRoots::Referenced, &[], |_, _| true);
    check(&store, &wanted, "on a full disk");
    disk.limit(None);
    let report = store.seal_rest(GcRoots::Referenced, &[], |_, _| true).unwrap();
    assert_eq!(report.left.0, 0);
    check(&store, &wanted, "with room again");
    disk.fail_at(disk.operations() + 3, Errno::IO);
    assert!(store.change_master_key(&key(2)).is_err());
    store.reopen().unwrap();
    check(&store, &wanted, "after a failed change of the key");
}
