//! Committed capsules are read back, by this handle and by another one.

use crate::common::{commit, content, expected, manifest, name, page};
use proptest::prelude::*;
use std::collections::BTreeMap;
use whimbrel_block::{Device, ExtentKind};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_store::{Expected, FinishedImage, GcRoots, Options, Store, StoreError, StoredDisk};

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::create()).unwrap();
    (dir, store)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_version_stays_readable_whatever_is_committed_after_it(
        rounds in prop::collection::vec(prop::collection::vec((0..3000u64, 0..40u64), 0..200), 1..6),
        fresh in any::<bool>(),
    ) {
        let (dir, store) = store();
        let (mut model, mut versions, mut base) = (BTreeMap::new(), Vec::new(), None);
        for (time, round) in rounds.iter().enumerate() {
            let writer = store.writer().unwrap();
            let id = commit(&writer, &store, base, 3000, round, &[name("m")], time as u64).unwrap();
            model.extend(round.iter().copied());
            versions.push((id, model.clone()));
            base = Some(id);
        }
        let reader = if fresh { Store::open(dir.path(), Options::default()).unwrap() } else { store.clone() };
        prop_assert_eq!(reader.get_ref(&name("m")).unwrap(), base);
        for (id, model) in &versions {
            prop_assert_eq!(content(&reader, id).unwrap(), expected(model));
        }
        prop_assert_eq!(reader.log(&base.unwrap()).unwrap().len(), versions.len());
    }
}

#[test]
fn a_grown_image_is_the_old_one_with_zeros_after_it_and_needs_no_page_of_its_own() {
    let (dir, store) = store();
    let pages = [(0, 1), (255, 2), (299, 3)];
    let old = commit(&store.writer().unwrap(), &store, None, 300, &pages, &[name("old")], 1).unwrap();
    let root = store.manifest(&old).unwrap().images[0].root;
    // The same height, one more level, two more.
    for (time, grown) in [(2, 300), (3, 65_536), (4, 70_000), (5, 20 << 20)] {
        let writer = store.writer().unwrap();
        let image = FinishedImage { root: writer.grow(root, 300, grown).unwrap(), pages: grown, put: 0 };
        let id = writer.commit(&manifest(&[("memory", image)], &[old], time), &[name("grown")]).unwrap();
        drop(writer);
        assert_eq!(content(&store, &id).unwrap(), expected(&pages.into_iter().collect()), "{grown}");
        let ends_in_zeros = store.image(image.root, grown).is_zero(grown - 1).unwrap();
        assert_eq!(ends_in_zeros, grown > 300, "{grown}");
        // Pages may be written behind the end of before.
        let next = [(grown - 1, 9)];
        let next = commit(&store.writer().unwrap(), &store, Some(id), grown, &next, &[], time).unwrap();
        assert!(content(&store, &next).unwrap().contains_key(&(grown - 1)));
    }
    assert_eq!(store.writer().unwrap().grow(None, 300, 70_000).unwrap(), None);
    // Without its first name the old image lives on in the new one.
    store.delete_ref(&name("old"), Expected::Anything).unwrap();
    store.gc(GcRoots::Referenced).unwrap();
    let fresh = Store::open(dir.path(), Options::default()).unwrap();
    let grown = fresh.get_ref(&name("grown")).unwrap().unwrap();
    assert_eq!(content(&fresh, &grown).unwrap(), expected(&pages.into_iter().collect()));
}

#[test]
fn images_blobs_and_disks_read_back_and_equal_content_is_stored_once() {
    let (dir, store) = store();
    let writer = store.writer().unwrap();
    let device = writer.put_blob(b"device state").unwrap();
    let data: Vec<u8> = (1..=1000).flat_map(page).collect();
    let write = || {
        let mut image = writer.image(None, 100_000).unwrap();
        image.put(PageRun::new(70_000, 1000), &data).unwrap();
        image.put(PageRun::new(5, 1), &page(7)).unwrap();
        image.put(PageRun::new(5, 1), &page(8)).unwrap();
        image.put(PageRun::new(70_003, 2), &[0; 2 * PAGE_SIZE]).unwrap();
        image.finish().unwrap()
    };
    let (memory, disk) = (write(), write());
    assert_eq!(memory, disk);
    let mut capsule = manifest(&[("memory", memory), ("disk0", disk)], &[], 1);
    capsule.device = vec![device];
    let id = writer.commit(&capsule, &[]).unwrap();
    drop(writer);
    let packed: u64 = std::fs::read_dir(dir.path().join("packs"))
        .unwrap()
        .map(|f| f.unwrap().metadata().unwrap().len())
        .sum();
    assert!(packed < 1000 * 4096 * 8 / 10, "{packed}");

    let store = Store::open(dir.path(), Options::default()).unwrap();
    assert_eq!(store.manifest(&id).unwrap(), capsule);
    assert_eq!(store.blob(&device).unwrap(), b"device state");
    let image = store.image(memory.root, memory.pages);
    assert_eq!(image.present().unwrap().count(), 999);
    assert!(image.is_zero(70_003).unwrap() && !image.is_zero(70_005).unwrap());
    let mut out = vec![1; 6 * PAGE_SIZE];
    image.read(PageRun::new(70_000, 6), &mut out).unwrap();
    let wanted = [page(1), page(2), page(3), page(0), page(0), page(6)].concat();
    assert!(out == wanted);
    assert!(image.preferred_run(70_100).unwrap().len >= 15);

    let disk = StoredDisk::new(image);
    let mut out = vec![0; 3 * PAGE_SIZE];
    disk.read_at(70_001 * 4096 + 100, &mut out).unwrap();
    assert!(out == wanted[PAGE_SIZE + 100..][..3 * PAGE_SIZE]);
    let extents = disk.extents(0, disk.size()).unwrap();
    let kinds: Vec<_> = extents.iter().map(|e| (e.kind == ExtentKind::Data, e.len / 4096)).collect();
    let wanted =
        [(false, 5), (true, 1), (false, 69_994), (true, 3), (false, 2), (true, 995), (false, 29_000)];
    assert_eq!(kinds, wanted);
    assert!(disk.write_at(0, &[0]).is_err());
}

#[test]
fn refs_change_only_from_what_was_expected_and_names_resolve() {
    let (_dir, store) = store();
    let writer = store.writer().unwrap();
    let first = commit(&writer, &store, None, 300, &[(1, 1)], &[name("m")], 1).unwrap();
    let second = commit(&writer, &store, Some(first), 300, &[(1, 2), (9, 9)], &[], 2).unwrap();
    let set = |expected| store.set_ref(&name("m"), &second, expected);
    assert!(
        matches!(set(Expected::Absent), Err(StoreError::RefChanged { found: Some(f), .. }) if f == first)
    );
    assert!(set(Expected::Capsule(second)).is_err());
    set(Expected::Capsule(first)).unwrap();
    assert_eq!(store.resolve("m").unwrap(), second);
    assert_eq!(store.resolve(&first.to_string()[..10]).unwrap(), first);
    assert!(matches!(store.resolve("nothing"), Err(StoreError::Unknown { .. })));
    assert_eq!(store.children(&first).unwrap(), [second]);
    let changes = store.diff(&first, &second).unwrap();
    assert_eq!((changes[0].pages, changes[0].new_contents), (2, 2));
    let capsules = store.capsules().unwrap();
    assert_eq!(
        capsules.iter().map(|c| (c.id, c.reachable)).collect::<Vec<_>>(),
        [(second, true), (first, true)]
    );
    store.delete_ref(&name("m"), Expected::Anything).unwrap();
    assert!(store.delete_ref(&name("m"), Expected::Anything).is_err());
    assert!(store.capsules().unwrap().iter().all(|c| !c.reachable));
}

#[test]
fn a_capsule_that_names_what_is_not_here_is_refused() {
    let (_dir, store) = store();
    let writer = store.writer().unwrap();
    let mut capsule = manifest(&[], &[], 1);
    capsule.device = vec![whimbrel_core::Digest::of(b"nowhere")];
    assert!(matches!(writer.commit(&capsule, &[name("m")]), Err(StoreError::Incomplete { .. })));
    assert_eq!(store.get_ref(&name("m")).unwrap(), None);
    assert!(writer.image(Some(whimbrel_core::Digest::of(b"no root")), 5).is_err());
}

#[test]
fn small_changes_are_stored_as_deltas_and_read_through_bounded_chains() {
    let (dir, store) = store();
    let size = || -> u64 {
        std::fs::read_dir(dir.path().join("packs"))
            .unwrap()
            .map(|f| f.unwrap().metadata().unwrap().len())
            .sum()
    };
    let mut data: Vec<u8> = (1..=512).flat_map(page).collect();
    let (mut root, mut versions) = (None, Vec::new());
    for round in 0..8u64 {
        let writer = store.writer().unwrap();
        let before = size();
        let mut image = writer.image(root, 512).unwrap();
        for number in (0..512u64).step_by(if round == 0 { 1 } else { 8 }) {
            let at = number as usize * PAGE_SIZE;
            data[at..at + 8].copy_from_slice(&round.to_le_bytes());
            image.put(PageRun::new(number, 1), &data[at..at + PAGE_SIZE]).unwrap();
        }
        let finished = image.finish().unwrap();
        writer.commit(&manifest(&[("memory", finished)], &[], round), &[]).unwrap();
        if (1..=2).contains(&round) {
            assert!(size() - before < 16 << 10, "{} bytes for 64 pages of 8 new bytes", size() - before);
        }
        root = finished.root;
        versions.push((root, data.clone()));
    }
    let store = Store::open(dir.path(), Options::default()).unwrap();
    for (root, data) in versions {
        let mut out = vec![0; data.len()];
        store.image(root, 512).read(PageRun::new(0, 512), &mut out).unwrap();
        assert!(out == data);
    }
}

#[test]
fn an_image_comes_back_whole_with_holes_repeated_pages_and_deltas_in_it() {
    let (dir, store) = store();
    let writer = store.writer().unwrap();
    let mut data: Vec<u8> = (0..1200).flat_map(|n| page(if n % 5 == 0 { 0 } else { n % 400 })).collect();
    let mut image = writer.image(None, 1200).unwrap();
    image.put(PageRun::new(0, 1200), &data).unwrap();
    let first = image.finish().unwrap();
    let mut image = writer.image(first.root, 1200).unwrap();
    for number in (0..1200usize).step_by(3) {
        data[number * PAGE_SIZE..][..8].copy_from_slice(&number.to_le_bytes());
        image.put(PageRun::new(number as u64, 1), &data[number * PAGE_SIZE..][..PAGE_SIZE]).unwrap();
    }
    let second = image.finish().unwrap();
    writer.commit(&manifest(&[("memory", second)], &[], 1), &[]).unwrap();
    let store = Store::open(dir.path(), Options::default()).unwrap();
    let back = std::sync::Mutex::new(vec![0; data.len()]);
    let restored = store.image(second.root, 1200).restore(3, |run, pages| {
        back.lock().unwrap()[run.offset() as usize..][..pages.len()].copy_from_slice(pages);
        Ok::<_, std::io::Error>(())
    });
    restored.unwrap();
    assert!(back.into_inner().unwrap() == data);
}

#[test]
fn pages_found_in_an_image_that_was_given_up_are_stored_all_the_same() {
    let (dir, store) = store();
    let base = commit(&store.writer().unwrap(), &store, None, 600, &[(1, 1)], &[], 1).unwrap();
    let root = store.manifest(&base).unwrap().image("memory").unwrap().root;
    let writer = store.writer().unwrap();
    let data: Vec<u8> = (1..=600).flat_map(page).collect();
    let mut given_up = writer.image(root, 600).unwrap();
    given_up.put(PageRun::new(0, 600), &data).unwrap();
    drop(given_up);
    let mut image = writer.image(None, 600).unwrap();
    image.put(PageRun::new(0, 600), &data).unwrap();
    let image = image.finish().unwrap();
    writer.commit(&manifest(&[("memory", image)], &[], 2), &[name("m")]).unwrap();
    drop(writer);
    let store = Store::open(dir.path(), Options::default()).unwrap();
    assert!(store.verify(|_, _| true).unwrap().is_complete());
    let mut out = vec![0; data.len()];
    store.image(image.root, 600).read(PageRun::new(0, 600), &mut out).unwrap();
    assert!(out == data);
}

#[test]
fn of_a_page_put_again_only_the_last_version_is_stored_but_what_others_found_stays() {
    let (dir, store) = store();
    let base = commit(&store.writer().unwrap(), &store, None, 600, &[(1, 1)], &[], 1).unwrap();
    let root = store.manifest(&base).unwrap().image("memory").unwrap().root;
    let writer = store.writer().unwrap();
    let mut image = writer.image(root, 600).unwrap();
    for round in 0..5 {
        let data: Vec<u8> = (0..256).flat_map(|n| page(10_000 + round * 1000 + n)).collect();
        image.put(PageRun::new(0, 256), &data).unwrap();
        if round == 0 {
            image.put(PageRun::new(599, 1), &data[..PAGE_SIZE]).unwrap();
        }
    }
    let image = image.finish().unwrap();
    writer.commit(&manifest(&[("memory", image)], &[], 2), &[name("m")]).unwrap();
    drop(writer);
    let store = Store::open(dir.path(), Options::default()).unwrap();
    let mut out = vec![0; 600 * PAGE_SIZE];
    store.image(image.root, 600).read(PageRun::new(0, 600), &mut out).unwrap();
    assert!(out[..PAGE_SIZE] == page(14_000) && out[599 * PAGE_SIZE..] == page(10_000));
    let report = store.verify(|_, _| true).unwrap();
    assert!(report.is_complete());
    assert!((257..300).contains(&report.objects), "{} objects for 258 pages", report.objects);
}
