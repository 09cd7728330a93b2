//! Source files are created, changed, extended, renamed and deleted.

use crate::common::{self, Fixture, count, found, image, onward};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use whimbrel_alignment::{AlignmentChange, PageAlignment};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_hashcache::{CacheError, Geometry, HashCache, Location, OnMissing, SourceKind};

#[test]
fn pages_of_a_file_are_found_and_zero_pages_and_strangers_are_not() {
    let fixture = Fixture::new(4000);
    let file = fixture.write("image", (0..700).map(|number| if number % 7 == 0 { 0 } else { number }));
    let added = fixture.add(&file).unwrap();
    assert_eq!((added.pages, added.zero, added.new, added.evicted), (600, 100, 600, 0));
    assert_eq!(count(&fixture.cache, (1..700).filter(|number| number % 7 != 0)), 600);
    assert_eq!(count(&fixture.cache, 1000..1100), 0);
    let digests: Vec<_> = (1..12).map(|number| Digest::of(&common::page(number))).collect();
    assert_eq!(digests.iter().filter_map(|digest| fixture.cache.lookup(digest)).count(), 10);
    let stats = fixture.cache.stats();
    assert_eq!((stats.hits, stats.misses, stats.used, stats.sources.len()), (600, 100, 600, 1));
    let source = &stats.sources[0];
    assert_eq!((source.pages, source.scanned, source.hits, source.complete), (600, 600, 600, true));
}

#[test]
fn a_table_outlives_its_handle() {
    let Fixture { folder, cache } = Fixture::new(1000);
    let file = folder.path().join("image");
    std::fs::write(&file, image(1..100)).unwrap();
    cache.add(&file, SourceKind::Raw, None, &onward).unwrap();
    let path = cache.path().to_owned();
    cache.flush().unwrap();
    drop(cache);
    let cache = HashCache::open(&path, OnMissing::Fail).unwrap();
    assert_eq!(count(&cache, 1..100), 99);
    assert_eq!(cache.stats().hits, 99);
}

#[test]
fn a_file_added_again_has_no_second_entries() {
    let fixture = Fixture::new(4000);
    let file = fixture.write("image", 1..200);
    fixture.add(&file).unwrap();
    let again = fixture.add(&file).unwrap();
    assert!(!again.scanned, "nothing changed");
    assert_eq!(again.pages, 199);
    // The file grew, and its content moved by a page.
    std::fs::write(&file, image((500..501).chain(1..300))).unwrap();
    let grown = fixture.add(&file).unwrap();
    assert_eq!((grown.scanned, grown.new, grown.moved), (true, 101, 199));
    assert_eq!(fixture.entries(&file), 300);
    assert_eq!(count(&fixture.cache, 1..300), 299);
    assert_eq!(fixture.cache.stats().dropped, 0, "every place is the new one");
    assert_eq!(fixture.cache.stats().sources.len(), 1);
}

#[test]
fn a_renamed_file_keeps_its_number_and_its_entries() {
    let fixture = Fixture::new(4000);
    let (old, new) = (fixture.write("old", 1..100), fixture.path("new"));
    let first = fixture.add(&old).unwrap();
    std::fs::rename(&old, &new).unwrap();
    let second = fixture.add(&new).unwrap();
    assert_eq!(first.source, second.source);
    assert_eq!(fixture.entries(&new), 99);
    assert_eq!(count(&fixture.cache, 1..100), 99);
}

#[test]
fn entries_of_a_file_that_shrank_changed_or_vanished_are_dropped_on_use() {
    let fixture = Fixture::new(4000);
    let (shrunk, changed, gone) = (
        fixture.write("shrunk", 1..101),
        fixture.write("changed", 201..301),
        fixture.write("gone", 401..501),
    );
    for path in [&shrunk, &changed, &gone] {
        fixture.add(path).unwrap();
    }
    assert_eq!(count(&fixture.cache, (1..101).chain(201..301).chain(401..501)), 300);
    File::options().write(true).open(&shrunk).unwrap().set_len(50 * 4096 + 100).unwrap();
    File::options().write(true).open(&changed).unwrap().write_all_at(&image(900..930), 0).unwrap();
    std::fs::remove_file(&gone).unwrap();
    fixture.cache.close_files();
    assert_eq!(count(&fixture.cache, 1..101), 50);
    assert_eq!(count(&fixture.cache, 201..301), 70);
    assert_eq!(count(&fixture.cache, 401..501), 0);
    let stats = fixture.cache.stats();
    assert_eq!((stats.dropped, stats.used), (50 + 30 + 100, 120));
}

#[test]
fn a_deleted_image_is_let_go_while_the_cache_is_open() {
    let fixture = Fixture::new(1000);
    let file = fixture.write("image", 1..10);
    fixture.add(&file).unwrap();
    assert!(found(&fixture.cache, 1));
    std::fs::remove_file(&file).unwrap();
    let _ = count(&fixture.cache, 1..10);
    let open =
        std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fd.path().read_link().ok());
    let name = file.to_str().unwrap();
    assert!(!open.into_iter().any(|target| target.to_string_lossy().starts_with(name)));
}

#[test]
fn a_page_in_two_files_is_found_when_one_of_them_goes() {
    let fixture = Fixture::new(4000);
    let (one, two, three) =
        (fixture.write("one", 1..100), fixture.write("two", 1..100), fixture.write("three", 1..100));
    for path in [&one, &two, &three] {
        fixture.add(path).unwrap();
    }
    assert_eq!(fixture.cache.stats().used, 2 * 99, "two places a page are enough");
    std::fs::remove_file(&one).unwrap();
    fixture.cache.close_files();
    assert_eq!(count(&fixture.cache, 1..100), 99);
}

#[test]
fn forgotten_files_leave_nothing_and_their_number_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let geometry = Geometry::for_pages(4000).with_sources(4);
    let cache = HashCache::open(&folder.path().join("table"), OnMissing::Create(geometry)).unwrap();
    let paths: Vec<_> = (0..6u64)
        .map(|number| {
            let path = folder.path().join(number.to_string());
            std::fs::write(&path, image(number * 10 + 1..number * 10 + 6)).unwrap();
            path
        })
        .collect();
    let add = |number: usize| cache.add(&paths[number], SourceKind::Raw, None, &onward);
    let first: Vec<_> = (0..4).map(|number| add(number).unwrap().source).collect();
    assert!(matches!(add(4), Err(CacheError::SourcesFull { limit: 4 })));
    assert_eq!(cache.remove(&paths[1]).unwrap(), 5);
    assert!(matches!(cache.remove(&paths[1]), Err(CacheError::Unknown { .. })));
    assert_eq!(add(4).unwrap().source, first[1]);
    // The record of a deleted file is reused.
    std::fs::remove_file(&paths[2]).unwrap();
    assert_eq!(add(5).unwrap().source, first[2]);
    assert_eq!(count(&cache, 1..60), 4 * 5);
    assert_eq!(cache.stats().dropped, 0, "nothing of the former files was left");
}

#[test]
fn what_is_no_file_is_refused_before_it_is_opened() {
    let fixture = Fixture::new(100);
    let pipe = fixture.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let refused = |path: &std::path::Path| matches!(fixture.add(path), Err(CacheError::NotAFile { .. }));
    assert!(refused(&pipe) && refused(fixture.folder.path()) && refused("/dev/null".as_ref()));
    assert!(matches!(fixture.add(&fixture.path("absent")), Err(CacheError::Io { action: "open", .. })));
    let mut long = fixture.folder.path().to_owned();
    for _ in 0..5 {
        long.push("d".repeat(200));
    }
    std::fs::create_dir_all(&long).unwrap();
    std::fs::write(long.join("image"), [1]).unwrap();
    assert!(matches!(fixture.add(&long.join("image")), Err(CacheError::PathTooLong { .. })));
    assert!(fixture.cache.stats().sources.is_empty());
}

#[test]
fn a_cancelled_scan_keeps_what_it_found_and_is_no_complete_one() {
    let fixture = Fixture::new(4000);
    let file = fixture.write("image", 1..2000);
    let calls = AtomicU64::new(0);
    let cancel = |progress: whimbrel_hashcache::Progress| {
        assert_eq!(progress.total, 1999 * PAGE_SIZE as u64);
        if calls.fetch_add(1, Relaxed) == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let result = fixture.cache.add(&file, SourceKind::Raw, None, &cancel);
    assert!(matches!(result, Err(CacheError::Cancelled)));
    let source = &fixture.cache.stats().sources[0];
    assert!(!source.complete && source.pages >= 3 * 256);
    assert!(fixture.add(&file).unwrap().scanned, "the next one begins again");
    assert!(fixture.cache.stats().sources[0].complete);
}

#[test]
fn a_partition_at_an_odd_sector_is_cut_where_its_pages_begin() {
    let fixture = Fixture::new(4000);
    let (file, start) = (fixture.path("disk"), 63 * 512);
    let mut disk = vec![0x55; start];
    disk.extend(image(1..400));
    std::fs::write(&file, &disk).unwrap();
    let borders = [
        AlignmentChange { start: 0, phase: 0 },
        AlignmentChange { start: start as u64, phase: start as u64 % 4096 },
    ];
    let cuts = PageAlignment::new(disk.len() as u64, borders).unwrap();
    fixture.add(&file).unwrap();
    assert_eq!(count(&fixture.cache, 1..400), 0, "the grid of the disk is another");
    let added = fixture.cache.add(&file, SourceKind::Raw, Some(&cuts), &onward).unwrap();
    assert!(added.scanned, "other cuts, though the file is the same");
    assert_eq!(count(&fixture.cache, 1..400), 399);
}

#[test]
fn pages_behind_a_hit_are_found_by_reading_ahead_though_the_table_lost_them() {
    let fixture = Fixture::new(4000);
    let file = fixture.write("image", 1..201);
    let source = fixture.cache.register(&file, SourceKind::Raw).unwrap();
    for number in (1..201).step_by(2) {
        let offset = (number - 1) * PAGE_SIZE as u64;
        fixture.cache.record_page(&Digest::of(&common::page(number)), Location { source, offset });
    }
    let all = count(&fixture.cache, 1..201);
    assert!(all > 190, "{all}");
    let stats = fixture.cache.stats();
    assert!(stats.read_ahead > 90 && stats.used == all as u64, "noted again: {stats:?}");
    assert!(!fixture.cache.reader().get(&Digest::of(&[9]), &mut [0; PAGE_SIZE]));
}

#[test]
fn memory_of_a_machine_gives_way_to_a_disk_and_is_found_by_its_descriptor() {
    let fixture = Fixture::new(4000);
    let ram = tempfile::tempfile_in("/dev/shm").unwrap();
    ram.write_all_at(&image(1..100), 0).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), ram.as_raw_fd());
    let added = fixture.cache.add(path.as_ref(), SourceKind::Memory, None, &onward).unwrap();
    assert_eq!(added.new, 99);
    assert_eq!(count(&fixture.cache, 1..100), 99);
    let again = fixture.cache.add(path.as_ref(), SourceKind::Memory, None, &onward).unwrap();
    assert!(again.scanned, "memory is never taken for unchanged");
    let (one, two) = (fixture.write("one", 1..100), fixture.write("two", 1..100));
    fixture.add(&one).unwrap();
    fixture.add(&two).unwrap();
    assert_eq!(fixture.entries(path.as_ref()), 0, "two places that stay are better");
    drop(ram);
    assert_eq!(count(&fixture.cache, 1..100), 99);
    assert_eq!(fixture.cache.stats().dropped, 0);
}

#[test]
fn another_file_behind_the_same_descriptor_number_is_not_read() {
    let fixture = Fixture::new(4000);
    let link = fixture.path("fd");
    let (old, new) = (fixture.write("a", 1..10), fixture.write("b", 1..10));
    std::os::unix::fs::symlink(&old, &link).unwrap();
    fixture.cache.add(&link, SourceKind::Memory, None, &onward).unwrap();
    assert!(found(&fixture.cache, 1));
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&new, &link).unwrap();
    assert!(!found(&fixture.cache, 1));
    assert_eq!(fixture.cache.stats().dropped, 1);
}
