//! Standard clients against the server: nbdinfo, nbdcopy, qemu-io, fio.

use crate::export::Export;
use std::fs::{self, File};
use std::sync::Arc;
use whimbrel_block::{Cow, Device, FileDevice, MemDevice, OverlayDir};
use whimbrel_core::Digest;

const MIB: usize = 1 << 20;

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e3779b97f4a7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
}

fn content(device: &dyn Device) -> Vec<u8> {
    let mut out = vec![0; device.size() as usize];
    device.read_at(0, &mut out).unwrap();
    out
}

/// An overlay over noise with zeros in the middle, in `dir`.
fn overlay(dir: &tempfile::TempDir, size: usize) -> Arc<Cow> {
    let mut base = noise(size);
    base[size / 4..size / 2].fill(0);
    let place = OverlayDir { dir: dir.path().join("overlay"), live_dir: dir.path().join("live") };
    Arc::new(Cow::create(&place, Arc::new(MemDevice::new(base)), Digest::of(b"base")).unwrap())
}

#[test]
fn nbdinfo_sees_size_flags_and_the_map_of_a_sparse_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    File::create(&path).unwrap().set_len(8 * MIB as u64).unwrap();
    let device = Arc::new(FileDevice::open(&path).unwrap());
    device.write_at(MIB as u64, &[1; MIB]).unwrap();
    let export = Export::new(device);
    let info = export.tool("nbdinfo", &[&export.uri()]);
    for line in [
        "export-size: 8388608",
        "is_read_only: false",
        "can_multi_conn: true",
        "can_flush: true",
        "can_fua: true",
        "can_trim: true",
        "can_zero: true",
        "can_df: true",
        "block_size_preferred: 4096",
        "base:allocation",
    ] {
        assert!(info.contains(line), "{line} is not in\n{info}");
    }
    let map = export.tool("nbdinfo", &["--map", &export.uri()]);
    let rows: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(rows, [["0", "1048576", "3"], ["1048576", "1048576", "0"], ["2097152", "6291456", "3"]]);
}

#[test]
fn a_read_only_device_is_announced_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, noise(MIB)).unwrap();
    let export = Export::new(Arc::new(FileDevice::open_read_only(&path).unwrap()));
    assert!(export.tool("nbdinfo", &[&export.uri()]).contains("is_read_only: true"));
}

#[test]
fn nbdcopy_brings_the_same_bytes_out_and_in() {
    let dir = tempfile::tempdir().unwrap();
    let device = overlay(&dir, 40 * MIB);
    let export = Export::new(device.clone());
    let (copy, source) = (dir.path().join("copy"), dir.path().join("source"));
    export.tool("nbdcopy", &[&export.uri(), copy.to_str().unwrap()]);
    assert!(fs::read(&copy).unwrap() == content(&*device), "what came out differs");
    let mut other: Vec<u8> = noise(40 * MIB).iter().map(|b| b ^ 0xff).collect();
    other[20 * MIB..30 * MIB].fill(0);
    fs::write(&source, &other).unwrap();
    export.tool("nbdcopy", &["--flush", source.to_str().unwrap(), &export.uri()]);
    assert!(content(&*device) == other, "what went in differs");
}

#[test]
fn qemu_io_verifies_patterns_at_odd_offsets_and_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let device = overlay(&dir, 64 * MIB);
    let export = Export::new(device.clone());
    let commands = [
        "write -P 0x11 512 1024",
        "write -P 0x22 4608 70144",
        "write -f -P 0x33 1048064 1048576",
        "read -P 0x11 512 1024",
        "write -z 8192 8192",
        "write -z -u 1049600 524800",
        "write -P 0x44 33554432 20000256",
        "read -P 0x22 4608 3584",
        "read -P 0 8192 8192",
        "read -P 0x22 16384 58368",
        "read -P 0x33 1048064 1536",
        "read -P 0 1049600 524800",
        "read -P 0x44 33554432 20000256",
        "discard 33554432 1048576",
        "read -P 0 33554432 1048576",
        "read -P 0x44 34603008 18951680",
        "flush",
    ];
    let uri = export.uri();
    let mut args = vec!["-f", "raw", "-d", "unmap"];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    args.push(&uri);
    let printed = export.tool("qemu-io", &args);
    assert!(!printed.contains("failed") && !printed.contains("error"), "{printed}");
    let bytes = content(&*device);
    assert_eq!((bytes[511] == 0x11, bytes[512], bytes[1535]), (false, 0x11, 0x11));
}

#[test]
fn fio_finds_every_block_as_it_wrote_it() {
    let dir = tempfile::tempdir().unwrap();
    let export = Export::new(overlay(&dir, 48 * MIB));
    let uri = format!("--uri={}", export.uri());
    let mut args = vec!["--name=job", "--ioengine=nbd", "--size=48M", "--rw=randrw", "--verify=crc32c"];
    args.extend(["--bsrange=512-128k", "--bs_unaligned", "--iodepth=16", "--fsync=50", "--randseed=7", &uri]);
    // State files and the like go to the test's directory.
    let aux = format!("--aux-path={}", dir.path().display());
    args.push(&aux);
    let printed = export.tool("fio", &args);
    assert!(printed.contains("err= 0") && !printed.contains("verify:"), "{printed}");
}
