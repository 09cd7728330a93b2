//! Images made by `qemu-img`, and hostile images.

use crate::common::{Fixture, count, image, onward, page};
use std::path::{Path, PathBuf};
use std::process::Command;
use whimbrel_alignment::{AlignmentChange, PageAlignment};
use whimbrel_hashcache::qcow2::{Map, Qcow2Error};
use whimbrel_hashcache::{CacheError, SourceKind};

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().expect("qemu-img is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A raw disk of 64 MiB with data in three places.
fn raw(fixture: &Fixture) -> PathBuf {
    let path = fixture.path("raw");
    let mut disk = vec![0; 64 << 20];
    for (at, numbers) in [(0, 1..100), (10 << 20, 1000..1700), ((64 << 20) - 50 * 4096, 3000..3050)] {
        let data = image(numbers);
        disk[at..at + data.len()].copy_from_slice(&data);
    }
    std::fs::write(&path, disk).unwrap();
    path
}

fn all() -> impl Iterator<Item = u64> {
    (1..100).chain(1000..1700).chain(3000..3050)
}

fn convert(fixture: &Fixture, raw: &Path, name: &str, options: &str, extra: &[&str]) -> PathBuf {
    let path = fixture.path(name);
    let mut args = vec!["convert", "-O", "qcow2", "-o", options];
    args.extend(extra);
    args.extend([raw.to_str().unwrap(), path.to_str().unwrap()]);
    qemu_img(&args);
    path
}

#[test]
fn every_page_of_an_image_by_qemu_img_is_found_in_every_version_and_cluster_size() {
    for options in [
        "compat=0.10",
        "compat=1.1",
        "compat=1.1,cluster_size=512",
        "compat=1.1,cluster_size=2k",
        "cluster_size=2M",
    ] {
        let fixture = Fixture::new(4000);
        let raw = raw(&fixture);
        let path = convert(&fixture, &raw, "image.qcow2", options, &[]);
        std::fs::remove_file(raw).unwrap();
        assert_eq!(SourceKind::guess(&path).unwrap(), SourceKind::Qcow2);
        let added = fixture.cache.add(&path, SourceKind::Qcow2, None, &onward).unwrap();
        assert_eq!((added.pages, added.evicted), (849, 0), "{options}");
        assert_eq!(count(&fixture.cache, all()), 849, "{options}");
    }
}

#[test]
fn file_pages_at_an_odd_sector_are_found_across_clusters() {
    let fixture = Fixture::new(4000);
    let (raw, start) = (fixture.path("raw"), 63 * 512_u64);
    let data = [vec![0; start as usize], image(1..600)].concat();
    std::fs::write(&raw, &data).unwrap();
    let path = convert(&fixture, &raw, "image.qcow2", "cluster_size=4k", &[]);
    let borders = [AlignmentChange { start: 0, phase: 0 }, AlignmentChange { start, phase: start % 4096 }];
    let cuts = PageAlignment::new(data.len() as u64, borders).unwrap();
    fixture.cache.add(&path, SourceKind::Qcow2, Some(&cuts), &onward).unwrap();
    // The first and the last cluster are shared with zeros; all between are contiguous.
    assert!(count(&fixture.cache, 1..600) >= 595);
}

#[test]
fn compressed_clusters_are_left_out_and_zero_clusters_too() {
    let fixture = Fixture::new(4000);
    let raw = fixture.path("raw");
    let disk: Vec<u8> = (1..200u8).flat_map(|number| [number; 4096]).collect();
    std::fs::write(&raw, disk).unwrap();
    let path = convert(&fixture, &raw, "small.qcow2", "compat=1.1", &["-c"]);
    let added = fixture.cache.add(&path, SourceKind::Qcow2, None, &onward).unwrap();
    assert_eq!(added.pages, 0);
    let empty = fixture.path("empty.qcow2");
    qemu_img(&["create", "-f", "qcow2", empty.to_str().unwrap(), "1T"]);
    assert_eq!(fixture.cache.add(&empty, SourceKind::Qcow2, None, &onward).unwrap().pages, 0);
}

#[test]
fn an_image_over_a_backing_file_gives_its_own_clusters() {
    let fixture = Fixture::new(4000);
    let raw = raw(&fixture);
    let base = convert(&fixture, &raw, "base.qcow2", "compat=1.1", &[]);
    let top = fixture.path("top.qcow2");
    qemu_img(&["create", "-f", "qcow2", "-F", "qcow2", "-b", base.to_str().unwrap(), top.to_str().unwrap()]);
    assert_eq!(fixture.cache.add(&top, SourceKind::Qcow2, None, &onward).unwrap().pages, 0);
    let script = "write -P 0x5a 1M 256k";
    let output = Command::new("qemu-io").args(["-f", "qcow2", "-c", script]).arg(&top).output().unwrap();
    assert!(output.status.success());
    assert_eq!(fixture.cache.add(&top, SourceKind::Qcow2, None, &onward).unwrap().pages, 64);
}

#[test]
fn what_would_be_misread_is_refused() {
    let fixture = Fixture::new(100);
    let extended = fixture.path("extended.qcow2");
    qemu_img(&["create", "-f", "qcow2", "-o", "extended_l2=on", extended.to_str().unwrap(), "16M"]);
    let split = fixture.path("split.qcow2");
    let option = format!("data_file={},data_file_raw=on", fixture.path("data").display());
    qemu_img(&["create", "-f", "qcow2", "-o", &option, split.to_str().unwrap(), "16M"]);
    for path in [extended, split] {
        let result = fixture.cache.add(&path, SourceKind::Qcow2, None, &onward);
        assert!(
            matches!(result, Err(CacheError::Qcow2 { source: Qcow2Error::Feature { .. }, .. })),
            "{result:?}"
        );
    }
    let raw = fixture.write("raw", 1..10);
    let result = fixture.cache.add(&raw, SourceKind::Qcow2, None, &onward);
    assert!(matches!(result, Err(CacheError::Qcow2 { source: Qcow2Error::Magic, .. })));
    assert!(fixture.cache.stats().sources.is_empty(), "nothing refused takes a number");
}

/// An image of 4 KiB clusters: header, first-level table, one second-level table, clusters of data.
fn small(l1: &[u64], l2: &[u64], data: usize) -> Vec<u8> {
    let mut bytes = vec![0; 3 * 4096];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes[4..8].copy_from_slice(&2_u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&12_u32.to_be_bytes());
    bytes[24..32].copy_from_slice(&((l1.len() as u64) * 512 * 4096).to_be_bytes());
    bytes[36..40].copy_from_slice(&(l1.len() as u32).to_be_bytes());
    bytes[40..48].copy_from_slice(&4096_u64.to_be_bytes());
    let mut put = |at: usize, table: &[u64]| {
        for (i, entry) in table.iter().enumerate() {
            bytes[at + i * 8..at + i * 8 + 8].copy_from_slice(&entry.to_be_bytes());
        }
    };
    put(4096, l1);
    put(8192, l2);
    bytes.extend((0..data as u64).flat_map(|number| page(number + 1)));
    bytes
}

fn walk(bytes: &[u8]) -> Result<Vec<(u64, u64, u64)>, Qcow2Error> {
    let extents = Map::open(bytes)?.extents();
    extents.map(|extent| extent.map(|e| (e.guest, e.host, e.length))).collect()
}

#[test]
fn tables_that_lie_cost_no_more_than_the_file_is_long() {
    let flag = 1 << 63;
    let good = small(&[flag | 8192], &[flag | 12288, flag | 16384, 0, flag | 12288], 2);
    assert_eq!(walk(&good).unwrap(), [(0, 12288, 8192), (3 * 4096, 12288, 4096)]);
    // Every table is the same one, which is its own data as well.
    let bomb = small(&[flag | 8192; 512], &[flag | 8192; 512], 2);
    assert!(matches!(walk(&bomb), Err(Qcow2Error::Overlap)));
    // Unaligned, outside, compressed, reserved bits: skipped one by one.
    let odd =
        [flag | 12800, flag | (1 << 40), (1 << 62) | 12288, 1, 12288 | 1, (0x7f << 56) & !(1 << 62) | 12288];
    assert_eq!(walk(&small(&[flag | 8192], &odd, 1)).unwrap(), [(5 * 4096, 12288, 4096)]);
    assert_eq!(walk(&small(&[flag | 8704, flag | (1 << 50)], &[], 0)).unwrap(), []);
}

#[test]
fn headers_that_lie_are_refused_before_anything_is_allocated() {
    let with = |at: usize, value: &[u8]| {
        let mut bytes = small(&[0], &[], 0);
        bytes[at..at + value.len()].copy_from_slice(value);
        walk(&bytes)
    };
    assert!(matches!(with(4, &4_u32.to_be_bytes()), Err(Qcow2Error::Version { version: 4 })));
    for (at, value) in [(20, 8_u32), (20, 22), (36, u32::MAX), (36, 0), (36, 5000), (24, u32::MAX), (40, 1)] {
        let result = with(at, &value.to_be_bytes());
        assert!(matches!(result, Err(Qcow2Error::Field { .. })), "{value} at {at}: {result:?}");
    }
    assert!(matches!(with(32, &1_u32.to_be_bytes()), Err(Qcow2Error::Feature { feature: "encryption" })));
    assert!(matches!(walk(&small(&[0], &[], 0)[..50]), Err(Qcow2Error::Read { .. })));
}
