//! File device: bounds, holes, and behaviour after a failure.

use std::{fs, fs::File, path::Path, sync::Arc};
use whimbrel_block::{
    BlockError, Device, DiskPages, Extent, ExtentKind, FaultInjector, FaultPlan, FileDevice, TrackedDevice,
};
use whimbrel_core::PageRun;
use whimbrel_machine::PageArray;

#[test]
fn bytes_past_an_odd_end_read_as_zeros_and_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![7; 4096 + 512]).unwrap();
    let device = FileDevice::open(&path).unwrap();
    assert_eq!(device.size(), 8192);
    let mut out = vec![1; 8192];
    device.read_at(0, &mut out).unwrap();
    assert!(out[..4608].iter().all(|b| *b == 7) && out[4608..].iter().all(|b| *b == 0));
    device.write_at(8000, &[9; 192]).unwrap();
    assert!(matches!(device.write_at(8000, &[9; 193]), Err(BlockError::OutOfRange { .. })));
    device.read_at(8000, &mut out[..192]).unwrap();
    assert_eq!(out[..192], [9; 192]);
}

#[test]
fn zeroing_and_trimming_read_as_zeros_and_leave_the_neighbours() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    let device = FileDevice::open(&path).unwrap();
    device.write_zeroes(4097, 100_000).unwrap();
    device.trim(500_000, 100_001).unwrap();
    device.flush().unwrap();
    let content = fs::read(&path).unwrap();
    for (at, byte) in content.iter().enumerate() {
        let zeroed = (4097..104_097).contains(&at) || (500_000..600_001).contains(&at);
        assert_eq!(*byte == 0, zeroed, "byte {at}");
    }
    let extents = device.extents(520_192, 8192).unwrap();
    assert_eq!(extents, [Extent { len: 8192, kind: ExtentKind::Hole }]);
    assert!(matches!(
        FileDevice::open_read_only(&path).unwrap().write_at(0, &[1]),
        Err(BlockError::ReadOnly)
    ));
}

#[test]
fn after_a_failed_write_nothing_is_accepted_but_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![7; 4096]).unwrap();
    // A read-only descriptor: the kernel rejects writes that the device tries.
    let device = FileDevice::new(File::open(&path).unwrap(), false).unwrap();
    assert!(matches!(device.write_at(0, &[1]), Err(BlockError::Io { action: "write", .. })));
    assert!(matches!(device.write_at(0, &[1]), Err(BlockError::Latched { action: "write" })));
    assert!(matches!(device.flush(), Err(BlockError::Latched { .. })));
    assert!(matches!(device.trim(0, 4096), Err(BlockError::Latched { .. })));
    device.read_at(0, &mut [0; 512]).unwrap();
}

#[test]
fn after_a_failed_sync_the_next_one_does_not_pretend() {
    // The kernel cannot sync this one and returns an error.
    let device =
        FileDevice::new(File::options().read(true).write(true).open("/dev/null").unwrap(), false).unwrap();
    assert!(matches!(device.flush(), Err(BlockError::Io { action: "sync", .. })));
    assert!(matches!(device.flush(), Err(BlockError::Latched { action: "sync" })));
}

#[test]
fn a_torn_write_is_marked_as_dirty() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![7; 16384]).unwrap();
    let plan = FaultPlan { write: Some(2), torn_at: 4096, flush: Some(1) };
    let device =
        TrackedDevice::new(Arc::new(FaultInjector::new(Arc::new(FileDevice::open(&path).unwrap()), plan)));
    device.write_at(0, &[1; 4096]).unwrap();
    assert_eq!(device.take_dirty().iter().collect::<Vec<_>>(), [0]);
    assert!(device.write_at(4096, &[2; 8192]).is_err());
    assert_eq!(device.take_dirty().iter().collect::<Vec<_>>(), [1, 2]);
    assert!(device.flush().is_err());
    device.flush().unwrap();
    let content = fs::read(&path).unwrap();
    assert_eq!((content[4096], content[8191], content[8192]), (2, 2, 7));
}

fn sparse(path: &Path, len: u64) -> FileDevice {
    File::create(path).unwrap().set_len(len).unwrap();
    FileDevice::open(path).unwrap()
}

#[test]
fn a_disk_is_a_page_array_that_knows_where_its_data_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = sparse(&dir.path().join("image"), (3 << 30) + 4096);
    file.write_at(5 << 20, &[1; 8192]).unwrap();
    file.write_at((3 << 30) + 1, &[1]).unwrap();
    let device = Arc::new(TrackedDevice::new(Arc::new(file)));
    let mut pages = DiskPages { name: "disk0".to_owned(), device: device.clone() };
    assert_eq!(pages.page_count(), (3 << 18) + 1);
    let populated = pages.populated().unwrap();
    assert!(populated.contains(1280) && populated.contains(1281) && populated.contains(3 << 18));
    assert!(populated.count() < 100, "holes are not data: {populated:?}");
    device.write_at(4095, &[5, 5]).unwrap();
    let dirty = pages.take_dirty().unwrap();
    assert_eq!(dirty.iter().collect::<Vec<_>>(), [0, 1]);
    let mut out = vec![0; 8192];
    pages.read(PageRun::new(0, 2), &mut out).unwrap();
    assert_eq!((out[4094], out[4095], out[4096], out[4097]), (0, 5, 5, 0));
    pages.put_back(&dirty);
    assert_eq!(pages.take_dirty().unwrap(), dirty);
}
