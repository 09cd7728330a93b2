//! Files copied into file systems at different disk offsets must be found again by the digests of their
//! pages.
//!
//! The tables and file systems are built with the usual tools, so they also test the parsers. The searched
//! pages are those that a guest's page cache has: from the start of each file, the last one padded with
//! zeros.

mod make;

use make::{Files, Maker, Place};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use whimbrel_alignment::{FileSystem, Layout, PageAlignment, Region, RegionKind};
use whimbrel_block::{AlignedDisk, Device, ExtentKind, FileDevice, layout_of};
use whimbrel_core::{Digest, PAGE_SIZE, is_zero};

/// Digests of the pages of `files`, as in memory.
fn pages_of(files: &Files) -> Vec<Digest> {
    let pages = files.iter().flat_map(|(_, content)| content.chunks(PAGE_SIZE));
    let whole = |page: &[u8]| [page, &vec![0; PAGE_SIZE - page.len()]].concat();
    pages.map(|page| Digest::of(&whole(page))).collect()
}

/// Digests of the aligned pages of `disk` that are not zero.
fn cut_pages(disk: &Arc<FileDevice>, cuts: PageAlignment) -> HashSet<Digest> {
    let disk = AlignedDisk::new(disk.clone(), cuts).unwrap();
    let (mut found, mut at, mut buffer) = (HashSet::new(), 0, vec![0; 1 << 20]);
    while at < disk.size() {
        let window = &mut buffer[..(disk.size() - at).min(1 << 20) as usize];
        let extents = disk.extents(at, window.len() as u64).unwrap();
        if extents.iter().any(|extent| extent.kind == ExtentKind::Data) {
            disk.read_at(at, window).unwrap();
            let pages = window.chunks(PAGE_SIZE).filter(|page| !is_zero(page));
            found.extend(pages.map(Digest::of));
        }
        at += window.len() as u64;
    }
    found
}

fn share(wanted: &[Digest], found: &HashSet<Digest>) -> f64 {
    wanted.iter().filter(|digest| found.contains(digest)).count() as f64 / wanted.len() as f64
}

fn open(disk: &Path) -> (Arc<FileDevice>, Layout) {
    let device = FileDevice::open_read_only(disk).unwrap();
    let layout = layout_of(&device);
    assert!(layout.complete);
    (Arc::new(device), layout)
}

/// Region that contains the file system.
fn region<'a>(layout: &'a Layout, place: &Place, expected: FileSystem, what: &str) -> &'a Region {
    let found = layout.regions.iter().find(|region| region.start == place.start * 512);
    let region = found.unwrap_or_else(|| panic!("{what}: no region in {layout:?}"));
    assert_eq!(region.file_system, Some(expected), "{what}");
    assert_eq!(region.block, Some(4096), "{what}");
    assert_eq!(region.kind, place.kind, "{what}");
    region
}

#[test]
fn at_least_95_of_100_pages_of_a_file_are_found_in_any_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let files = make::files(dir.path());
    let wanted = pages_of(&files);
    let images: Vec<_> = make::MAKERS.iter().map(|maker| (maker, maker.make(dir.path(), &files))).collect();
    let mut cases = [0, 0];
    for place in make::PLACES {
        let disk = place.make(dir.path());
        for (maker, image) in &images {
            place.put(&disk, image);
            cases[usize::from(check(place, maker, &disk, &wanted))] += 1;
        }
        std::fs::remove_file(disk).unwrap();
    }
    assert!(cases[0] >= 10 && cases[1] >= 20, "{cases:?} cases that need no cuts, and that do");
}

/// Runs one case; returns true if its pages are at an odd offset.
fn check(place: &Place, maker: &Maker, disk: &Path, wanted: &[Digest]) -> bool {
    let what = format!("{} in {}", maker.name, place.name);
    let (device, layout) = open(disk);
    let phase = region(&layout, place, maker.file_system, &what).phase;
    let with = share(wanted, &cut_pages(&device, layout.page_alignment().unwrap()));
    let without = share(wanted, &cut_pages(&device, PageAlignment::identity(device.size()).unwrap()));
    println!("{what}: phase {phase}, found {with:.3} with cuts, {without:.3} without");
    assert!(with >= 0.95, "{what}: only {with} of the pages");
    if phase == 0 {
        assert!(without >= 0.95, "{what}: {without} without cuts, though nothing is odd about it");
    } else {
        assert!(without < 0.05, "{what}: {without} without cuts, so this case proves nothing");
    }
    phase != 0
}

#[test]
fn the_backup_of_a_real_table_says_what_the_table_said() {
    let dir = tempfile::tempdir().unwrap();
    let place = make::PLACES.iter().find(|place| place.kind == RegionKind::Gpt).unwrap();
    let path = place.make(dir.path());
    let before = open(&path).1;
    assert_eq!(before.regions[0].start, place.start * 512);
    let disk = File::options().write(true).open(&path).unwrap();
    disk.write_all_at(&[0; 512], 512).unwrap();
    assert_eq!(open(&path).1, before);
    let end = disk.metadata().unwrap().len();
    disk.write_all_at(&[0; 512], end - 512).unwrap();
    assert_eq!(open(&path).1.regions[0].kind, RegionKind::Whole);
}
