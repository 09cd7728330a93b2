//! Alignment round trip: a disk has the same bytes before and after, with any alignment, and no write is
//! lost.

use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use whimbrel_alignment::{AlignmentChange, PageAlignment, SECTOR};
use whimbrel_block::{
    AlignedDisk, AlignedPages, AlignmentMismatch, BlockError, Device, Extent, ExtentKind, MemDevice, RawDisk,
    TrackedDevice, ZeroDevice,
};
use whimbrel_core::PAGE_SIZE;
use whimbrel_machine::PageArray as _;

const SIZE: u64 = 40_000;

/// Alignments of [`SIZE`] bytes with segments at any sectors.
fn any_cuts() -> impl Strategy<Value = PageAlignment> {
    prop::collection::btree_map(1..SIZE / SECTOR, 0..8u64, 0..6).prop_map(|more| {
        let mut borders = vec![AlignmentChange { start: 0, phase: 0 }];
        for (start, phase) in more {
            if borders.last().is_some_and(|last| last.phase != phase * SECTOR) {
                borders.push(AlignmentChange { start: start * SECTOR, phase: phase * SECTOR });
            }
        }
        PageAlignment::new(SIZE, borders).unwrap()
    })
}

fn content() -> Vec<u8> {
    (0..SIZE).map(|at| ((at / 251 + at * 7) % 255 + 1) as u8).collect()
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..SIZE).prop_flat_map(|offset| (Just(offset), 0..=SIZE - offset))
}

fn read(device: &dyn Device, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0xee; len as usize];
    device.read_at(offset, &mut out).unwrap();
    out
}

proptest! {
    #[test]
    fn a_disk_that_is_cut_and_put_together_is_the_same_disk(cuts in any_cuts(), ranges in prop::collection::vec(range(), 8)) {
        let disk = content();
        let recut = Arc::new(AlignedDisk::new(Arc::new(MemDevice::new(disk.clone())), cuts.clone()).unwrap());
        let all = read(&*recut, 0, recut.size());
        prop_assert!(disk.iter().enumerate().all(|(at, byte)| all[cuts.aligned_offset(at as u64).unwrap() as usize] == *byte));
        // No byte of the content is zero, so all others are padding.
        prop_assert_eq!(all.iter().filter(|byte| **byte != 0).count() as u64, SIZE);
        let uncut = RawDisk::new(recut.clone(), cuts.clone()).unwrap();
        prop_assert_eq!(uncut.size(), SIZE);
        for (offset, len) in ranges {
            prop_assert!(read(&uncut, offset, len) == disk[offset as usize..(offset + len) as usize]);
            prop_assert!(read(&*recut, offset, len) == all[offset as usize..(offset + len) as usize]);
            let mut out = vec![0; len as usize];
            prop_assert!(uncut.try_read_at(offset, &mut out).unwrap());
            prop_assert!(out == disk[offset as usize..(offset + len) as usize]);
            for device in [&uncut as &dyn Device, &*recut] {
                let extents = device.extents(offset, len).unwrap();
                prop_assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), len);
                prop_assert!(extents.windows(2).all(|pair| pair[0].kind != pair[1].kind));
            }
        }
        prop_assert!(uncut.is_read_only() && uncut.write_at(0, &[1]).is_err());
    }

    #[test]
    fn writes_through_the_cuts_are_writes_to_the_disk(cuts in any_cuts(), ranges in prop::collection::vec(range(), 8)) {
        let pages = Arc::new(MemDevice::new(vec![0; cuts.page_count() as usize * PAGE_SIZE]));
        let uncut = RawDisk::new(pages.clone(), cuts.clone()).unwrap();
        let mut disk = content();
        uncut.write_at(0, &disk).unwrap();
        for (number, (offset, len)) in ranges.into_iter().enumerate() {
            let part = &mut disk[offset as usize..(offset + len) as usize];
            part.fill([0, number as u8 | 0x80][number % 2]);
            match number % 4 {
                0 => uncut.write_zeroes(offset, len).unwrap(),
                2 => uncut.trim(offset, len).unwrap(),
                _ => uncut.write_at(offset, part).unwrap(),
            }
        }
        prop_assert!(read(&uncut, 0, SIZE) == disk);
        let expected = AlignedDisk::new(Arc::new(MemDevice::new(disk)), cuts).unwrap();
        prop_assert!(read(&*pages, 0, pages.size()) == read(&expected, 0, expected.size()), "padding stays zero");
    }

    #[test]
    fn a_copy_kept_by_dirty_cut_pages_is_the_disk(cuts in any_cuts(), ranges in prop::collection::vec(range(), 9)) {
        let device = Arc::new(TrackedDevice::new(Arc::new(MemDevice::new(content()))));
        let mut array = AlignedPages::new("disk0".into(), device.clone(), cuts.clone()).unwrap();
        let mut copy = vec![0; array.page_count() as usize * PAGE_SIZE];
        let mut pages = array.populated().unwrap();
        for (number, (offset, len)) in ranges.into_iter().enumerate() {
            for run in pages.runs() {
                array.read(run, &mut copy[run.offset() as usize..][..run.bytes()]).unwrap();
            }
            let expected = AlignedDisk::new(device.clone(), cuts.clone()).unwrap();
            prop_assert!(copy == read(&expected, 0, expected.size()));
            device.write_at(offset, &vec![number as u8; len as usize]).unwrap();
            pages = array.take_dirty().unwrap();
            // A round that failed.
            if number % 2 == 0 {
                array.put_back(&pages);
                let mut lost = pages;
                pages = array.take_dirty().unwrap();
                lost.subtract(&pages);
                prop_assert!(lost.is_empty());
            }
            prop_assert!(array.take_dirty().unwrap().is_empty());
        }
    }
}

/// Counts calls, answers with zeros.
#[derive(Default)]
struct Counted(AtomicUsize);

impl whimbrel_block::ReadOnlyDevice for Counted {
    fn size(&self) -> u64 {
        1 << 30
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), BlockError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn a_long_read_is_one_call_a_segment() {
    let borders = [(0, 0), (63 * 512, 3584), (8 << 20, 0)];
    let cuts =
        PageAlignment::new(1 << 30, borders.map(|(start, phase)| AlignmentChange { start, phase })).unwrap();
    let disk = Arc::new(Counted::default());
    let recut = AlignedDisk::new(disk.clone(), cuts).unwrap();
    let mut out = vec![0; 16 << 20];
    recut.read_at(0, &mut out).unwrap();
    assert_eq!(disk.0.swap(0, Ordering::Relaxed), 3);
    recut.read_at(1 << 20, &mut out[..4 << 20]).unwrap();
    assert_eq!(disk.0.load(Ordering::Relaxed), 1);
    assert!(recut.read_at(recut.size() - 1, &mut out[..2]).is_err());
    assert!(recut.read_at(u64::MAX, &mut out[..2]).is_err());
}

#[test]
fn cuts_of_another_disk_are_refused_and_holes_stay_holes() {
    let cuts = PageAlignment::new(8192, [AlignmentChange { start: 0, phase: 512 }]).unwrap();
    let fits = |size| AlignedDisk::new(Arc::new(ZeroDevice { size }), cuts.clone()).map(drop);
    assert_eq!(fits(4096), Err(AlignmentMismatch { expected: 8192, found: 4096 }));
    assert_eq!(fits(8192), Ok(()));
    let uncut = |size| RawDisk::new(Arc::new(ZeroDevice { size }), cuts.clone());
    assert_eq!(uncut(8192).map(drop).unwrap_err(), AlignmentMismatch { expected: 12_288, found: 8192 });
    let hole = Extent { len: 8192, kind: ExtentKind::Hole };
    assert_eq!(uncut(12_288).unwrap().extents(0, 8192).unwrap(), [hole]);
}
