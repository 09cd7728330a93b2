//! Content of the base that arrives late: it fills only pages that were not written.

use proptest::prelude::*;
use std::sync::Arc;
use whimbrel_block::{Cow, Device, MemDevice, OverlayDir};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};

const PAGES: usize = 24;

fn base() -> Vec<u8> {
    (0..PAGES).flat_map(|page| vec![0x80 | page as u8; PAGE_SIZE]).collect()
}

fn place(dir: &tempfile::TempDir) -> OverlayDir {
    OverlayDir { dir: dir.path().join("overlay"), live_dir: dir.path().join("live") }
}

fn device() -> Arc<dyn Device> {
    Arc::new(MemDevice::new(base()))
}

fn content(cow: &Cow) -> Vec<u8> {
    let mut out = vec![0; PAGES * PAGE_SIZE];
    cow.read_at(0, &mut out).unwrap();
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn fills_and_writes_in_any_order_leave_the_writes_over_the_base(
        steps in prop::collection::vec((any::<bool>(), 0..PAGES as u64, 1..6u64), 0..20),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (place, id) = (place(&dir), Digest([1; 32]));
        let (base, mut model) = (base(), base());
        let cow = Cow::create(&place, device(), id).unwrap();
        for (n, (fill, start, len)) in steps.iter().enumerate() {
            let run = PageRun::new(*start, (*len).min(PAGES as u64 - start));
            let (from, bytes) = (run.offset() as usize, run.bytes());
            if *fill {
                cow.fill(run, &base[from..from + bytes]).unwrap();
                prop_assert!(run.pages().all(|page| cow.allocated().contains(page)));
            } else {
                // Not complete pages: the rest is from the base.
                let data = vec![n as u8; bytes - 100];
                cow.write_at(from as u64 + 50, &data).unwrap();
                model[from + 50..from + bytes - 50].copy_from_slice(&data);
            }
            prop_assert!(content(&cow) == model);
        }
        cow.flush().unwrap();
        drop(cow);
        std::fs::remove_dir_all(&place.live_dir).unwrap();
        prop_assert!(content(&Cow::open(&place, device(), id).unwrap()) == model, "after a loss of power");
    }
}

#[test]
fn a_page_given_back_to_the_base_is_the_bases_also_after_a_loss_of_power() {
    let dir = tempfile::tempdir().unwrap();
    let (place, id) = (place(&dir), Digest([1; 32]));
    let cow = Cow::create(&place, device(), id).unwrap();
    cow.write_at(0, &[1; 8 * PAGE_SIZE]).unwrap();
    cow.flush().unwrap();
    cow.deallocate(PageRun::new(2, 3)).unwrap();
    let mut model = base();
    model[..2 * PAGE_SIZE].fill(1);
    model[5 * PAGE_SIZE..8 * PAGE_SIZE].fill(1);
    assert!(content(&cow) == model);
    cow.flush().unwrap();
    drop(cow);
    std::fs::remove_dir_all(&place.live_dir).unwrap();
    let cow = Cow::open(&place, device(), id).unwrap();
    assert!(content(&cow) == model);
    assert!(cow.deallocate(PageRun::new(PAGES as u64, 1)).is_err(), "past the end");
    assert!(cow.fill(PageRun::new(0, 2), &[0; PAGE_SIZE]).is_err(), "too little content");
}
