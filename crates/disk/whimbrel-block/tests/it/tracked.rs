//! Copy maintained by dirty sets alone: it must equal the disk once the writers stop.

use std::sync::Arc;
use whimbrel_block::{Device, MemDevice, TrackedDevice};
use whimbrel_core::PageSet;

const PAGES: u64 = 300;

fn copy(from: &TrackedDevice, dirty: &PageSet, to: &mut [u8]) {
    for run in dirty.runs() {
        let at = run.offset() as usize;
        from.read_at(run.offset(), &mut to[at..at + run.bytes()]).unwrap();
    }
}

#[test]
fn no_write_is_lost_between_two_rounds() {
    let device = TrackedDevice::new(Arc::new(MemDevice::new(vec![0; PAGES as usize * 4096])));
    let mut replica = vec![0; PAGES as usize * 4096];
    let mut rounds = 0;
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                let device = &device;
                scope.spawn(move || {
                    for step in 0..20_000u64 {
                        let page = (step * 7 + writer * 101) % PAGES;
                        let stamp = (writer << 32 | step).to_le_bytes();
                        device.write_at(page * 4096 + writer * 8, &stamp).unwrap();
                    }
                })
            })
            .collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            let dirty = device.take_dirty();
            // Every third round fails and puts its pages back.
            match rounds % 3 {
                2 => device.put_back(&dirty),
                _ => copy(&device, &dirty, &mut replica),
            }
            rounds += 1;
        }
    });
    copy(&device, &device.take_dirty(), &mut replica);
    let mut disk = vec![0; replica.len()];
    device.read_at(0, &mut disk).unwrap();
    assert!(disk == replica);
    assert!(device.take_dirty().is_empty());
}
