//! Tests of a disk with two consumers over an aligned image: the store gets aligned pages, another host the
//! disk's own.

use super::{DiskBase, disk::open_base, remote_disk::RemoteDisk};
use proptest::prelude::*;
use std::sync::Arc;
use whimbrel_alignment::{AlignmentChange, PageAlignment, SECTOR};
use whimbrel_block::{
    AlignedDisk, AlignedPageView, Cow, Device, DiskPages, MemDevice, OverlayDir, TrackedDevice,
};
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::{Digest, EXTENT_PAGES, PAGE_SIZE, PageSet};

const SIZE: u64 = 24 * PAGE_SIZE as u64;

fn cuts(borders: impl IntoIterator<Item = (u64, u64)>) -> PageAlignment {
    let border = |(start, phase)| AlignmentChange { start: start * SECTOR, phase: phase * SECTOR };
    PageAlignment::new(SIZE, borders.into_iter().map(border)).expect("cuts")
}

fn any_cuts() -> impl Strategy<Value = PageAlignment> {
    prop::collection::btree_map(1..SIZE / SECTOR, 0..8u64, 0..5).prop_map(|more| {
        let mut borders = vec![(0, 0)];
        for border in more {
            if borders.last().is_some_and(|last: &(u64, u64)| last.1 != border.1) {
                borders.push(border);
            }
        }
        cuts(borders)
    })
}

fn content(seed: u8) -> Vec<u8> {
    (0..SIZE).map(|at| (at / 97 + at * 5) as u8 ^ seed).collect()
}

fn all(device: &dyn Device) -> Vec<u8> {
    let mut out = vec![0; device.size() as usize];
    device.read_at(0, &mut out).expect("a read");
    out
}

fn cut(disk: &[u8], cuts: &PageAlignment) -> Vec<u8> {
    all(&AlignedDisk::new(Arc::new(MemDevice::new(disk.to_vec())), cuts.clone()).expect("cuts of the disk"))
}

/// The disk as a device over an image of it, and its content's id.
fn base(disk: &[u8], cuts: &PageAlignment) -> (Arc<dyn Device>, Digest) {
    let pages = cut(disk, cuts);
    let root = Digest::of(&pages);
    let base = DiskBase::image(root, Some(cuts.clone()).filter(|cuts| !cuts.is_identity()));
    let over = |asked, count: u64| -> Arc<dyn Device> {
        assert_eq!((asked, count * PAGE_SIZE as u64), (root, pages.len() as u64));
        Arc::new(MemDevice::new(pages.clone()))
    };
    open_base(over, &base, SIZE).expect("a base")
}

/// Updates the copy of consumer `who`. With `fails` the first round fails and is repeated.
fn catch_up(ledger: &mut DirtyLog, who: Consumer, copy: &mut [u8], fails: bool) {
    let pages = ledger.collect(who).expect("a set");
    assert_eq!(pages.len() * PAGE_SIZE as u64, copy.len() as u64);
    if fails {
        ledger.put_back(who, &pages);
        return catch_up(ledger, who, copy, false);
    }
    for run in pages.runs().flat_map(|run| run.chunks(EXTENT_PAGES as u64)) {
        ledger.read_for(who, run, &mut copy[run.offset() as usize..][..run.bytes()]).expect("a read");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn the_store_has_the_disk_in_cut_pages_and_another_host_in_its_own(
        cuts in any_cuts(), seed: u8,
        steps in prop::collection::vec((0..SIZE, 1..9000u64, any::<u8>(), 0..4u8, any::<bool>()), 1..12),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let place = OverlayDir { dir: dir.path().join("disk0"), live_dir: dir.path().join("live") };
        let (base, id) = base(&content(seed), &cuts);
        prop_assert!(all(&*base) == content(seed));
        let tracked = Arc::new(TrackedDevice::new(Arc::new(Cow::create(&place, base, id).unwrap())));
        let mut ledger = DirtyLog::new(Box::new(DiskPages { name: "disk0".into(), device: tracked.clone() }));
        let view = AlignedPageView::new("disk0".into(), tracked.clone(), cuts.clone()).unwrap();
        ledger.set_view(Consumer::Store, Some(Box::new(view)));
        // The store has the base already; the other host has nothing.
        ledger.attach_from(Consumer::Store, PageSet::empty(cuts.page_count())).unwrap();
        ledger.attach_all(Consumer::Migration).unwrap();
        let (mut stored, mut sent) = (cut(&content(seed), &cuts), vec![0; SIZE as usize]);
        for (offset, len, byte, who, fails) in steps {
            let len = len.min(SIZE - offset);
            match byte {
                0..40 => tracked.write_zeroes(offset, len).unwrap(),
                40..60 => tracked.trim(offset, len).unwrap(),
                _ => tracked.write_at(offset, &vec![byte; len as usize]).unwrap(),
            }
            let disk = all(&*tracked);
            if who & 1 == 1 {
                catch_up(&mut ledger, Consumer::Store, &mut stored, fails);
                prop_assert!(stored == cut(&disk, &cuts));
            }
            if who & 2 == 2 {
                catch_up(&mut ledger, Consumer::Migration, &mut sent, fails);
                prop_assert!(sent == disk);
            }
        }
        catch_up(&mut ledger, Consumer::Store, &mut stored, true);
        prop_assert!(stored == cut(&all(&*tracked), &cuts));
    }
}

#[test]
fn an_overlay_is_not_taken_for_one_over_the_same_pages_cut_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let place = OverlayDir { dir: dir.path().join("disk0"), live_dir: dir.path().join("live") };
    let (one, other) = (cuts([(0, 0), (63, 7)]), cuts([(0, 0), (62, 7)]));
    let (disk, id) = base(&content(1), &one);
    drop(Cow::create(&place, disk.clone(), id).unwrap());
    let root = Digest::of(&cut(&content(1), &one));
    let over =
        |_, count: u64| -> Arc<dyn Device> { Arc::new(MemDevice::new(vec![0; count as usize * PAGE_SIZE])) };
    for cuts in [None, Some(other)] {
        let base = DiskBase::image(root, cuts);
        let (wrong, wrong_id) = open_base(over, &base, SIZE).unwrap();
        assert!(Cow::open(&place, wrong, wrong_id).is_err());
    }
    assert!(Cow::open(&place, disk, id).is_ok());
}

#[test]
fn cuts_of_a_disk_of_another_size_are_refused() {
    let never = |_, _| -> Arc<dyn Device> { panic!("nothing is to be read") };
    let base = DiskBase::image(Digest([7; 32]), Some(cuts([(0, 0), (63, 7)])));
    assert!(open_base(never, &base, SIZE + PAGE_SIZE as u64).is_err());
}

#[test]
fn pages_that_are_read_from_afar_are_noted_as_the_pages_of_the_image() {
    let cuts = cuts([(0, 0), (63, 7)]);
    let pages = cut(&content(3), &cuts);
    let mut patient = None;
    let over = |_, _| -> Arc<dyn Device> {
        let stored = Arc::new(MemDevice::new(pages.clone()));
        patient.insert(Arc::new(RemoteDisk::new(stored, Arc::default()))).clone()
    };
    let base = DiskBase::image(Digest([7; 32]), Some(cuts.clone()));
    let (disk, _) = open_base(over, &base, SIZE).unwrap();
    let file_page = 63 * SECTOR..63 * SECTOR + PAGE_SIZE as u64;
    let mut out = [0; PAGE_SIZE];
    disk.read_at(file_page.start, &mut out).unwrap();
    let touched = patient.unwrap().touched();
    assert_eq!(touched.len(), cuts.page_count());
    assert_eq!(touched.runs().collect::<Vec<_>>(), [cuts.pages_of(file_page)]);
    assert_eq!(touched.count(), 1, "a page of a file is one page");
}
