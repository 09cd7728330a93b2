//! Copies of epochs, while epochs go on.
//!
//! The fears: a copy that is of no one instant, one that lacks a page which was written long before, one that
//! lacks what a copy that came to nothing had.

use crate::room::{Copy, DISK, MEMORY};
use proptest::prelude::*;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use whimbrel_core::PAGE_SIZE;
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    codec::{BlockSize, CodecOptions, encoder::Encoder},
    epoch_snapshot::{BUFFER_BYTES_MAX, SnapshotLost},
    protocol::{EpochEnd, EpochPages, ProtectionId},
    standby::EpochReceiver,
};

const ID: ProtectionId = ProtectionId([2; 16]);

struct World {
    copy: Copy,
    receiver: EpochReceiver,
    encoder: Encoder,
    epoch: u64,
    random: StdRng,
    /// What lies in the store: the last copy that got there.
    stored: Vec<Vec<u8>>,
}

/// A copy on its way, and what it is to be.
struct Way {
    copy: u64,
    of: Vec<Vec<u8>>,
    became: Vec<Vec<u8>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let copy = Copy::new();
        let arrays = vec![MEMORY, DISK];
        let mut receiver = EpochReceiver::new(Box::new(copy.clone()), arrays, vec![], HandoverId([1; 16]));
        assert!(receiver.wants_snapshot(true, true));
        let encoder = Encoder::new(CodecOptions::fine(BlockSize::B64), 1, 1 << 20);
        let stored = copy.0.lock().unwrap().0.clone();
        let random = StdRng::seed_from_u64(seed);
        Self { copy, receiver, encoder, epoch: 0, random, stored }
    }

    fn write(&mut self, epoch: Option<u64>) -> u64 {
        let array = self.random.random_range(0..2u32);
        let len = [MEMORY, DISK][array as usize];
        let first = self.random.random_range(0..len);
        let count = self.random.random_range(1..=(len - first).min(9));
        let word: u8 = self.random.random_range(0..3);
        let page = vec![word; PAGE_SIZE];
        let pages = (first..first + count).map(|number| (number, &page[..]));
        let (payload, _) = self.encoder.encode(array, pages).unwrap();
        let piece = EpochPages { id: ID, epoch, array, block: BlockSize::B64 };
        assert!(self.receiver.store_pages(&piece, &payload).unwrap().pages.is_empty());
        count
    }

    fn seal(&mut self, pages: u64) {
        let seal = EpochEnd { id: ID, epoch: self.epoch, pages, device_bytes: None, ports: vec![] };
        self.receiver.end_epoch(seal, self.epoch.to_le_bytes().to_vec()).unwrap();
        self.epoch += 1;
    }

    /// Pages that are no epoch, then one that is.
    fn fill(&mut self) {
        self.encoder.set_seeding(true);
        for _ in 0..self.random.random_range(1..6) {
            self.write(None);
        }
        self.encoder.set_seeding(false);
        self.seal(0);
    }

    fn go_on(&mut self) {
        match self.random.random_range(0..12) {
            0 => self.fill(),
            _ => {
                let pages = self.write(Some(self.epoch));
                self.seal(pages);
            }
        }
    }

    fn begin(&mut self) -> Option<Way> {
        let kept = self.receiver.start_snapshot()?;
        assert_eq!(kept.device_state, kept.epoch.to_le_bytes());
        Some(Way { copy: kept.copy, of: self.copy.0.lock().unwrap().0.clone(), became: self.stored.clone() })
    }

    /// Some more of a copy; whether that was all.
    fn take(&mut self, way: &mut Way) -> bool {
        let next = self.receiver.snapshot_pages(way.copy).unwrap();
        assert_eq!(next.data.len(), next.pages.len() * PAGE_SIZE);
        for ((array, page), data) in next.pages.iter().zip(next.data.chunks_exact(PAGE_SIZE)) {
            way.became[*array as usize][*page as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(data);
        }
        next.last
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_copy_is_what_the_machine_was_at_the_end_of_its_epoch(seed: u64) {
        let mut world = World::new(seed);
        world.fill();
        let mut way: Option<Way> = None;
        let mut whole = 0;
        for _ in 0..300 {
            world.go_on();
            if let Some(mut now) = way.take() {
                prop_assert!(world.receiver.start_snapshot().is_none(), "one at a time");
                if world.random.random_bool(0.1) {
                    world.receiver.snapshot_done(now.copy, false);
                } else if world.take(&mut now) {
                    prop_assert!(now.became == now.of, "a copy of no one instant");
                    world.receiver.snapshot_done(now.copy, true);
                    world.stored = now.became;
                    whole += 1;
                } else {
                    way = Some(now);
                }
            } else if world.random.random_bool(0.3) {
                way = world.begin();
            }
        }
        prop_assert!(whole > 0);
    }
}

#[test]
fn a_copy_that_is_too_slow_is_lost_and_the_epochs_are_not() {
    let pages = 2 * (BUFFER_BYTES_MAX / PAGE_SIZE) as u64;
    let copy = Copy::default();
    copy.0.lock().unwrap().0 = vec![vec![0; pages as usize * PAGE_SIZE]];
    let mut receiver = EpochReceiver::new(Box::new(copy.clone()), vec![pages], vec![], HandoverId([1; 16]));
    assert!(receiver.wants_snapshot(true, false), "all of it is in no copy yet");
    let seal = |epoch, pages| EpochEnd { id: ID, epoch, pages, device_bytes: None, ports: vec![] };
    receiver.end_epoch(seal(0, 0), vec![1]).unwrap();
    let kept = receiver.start_snapshot().unwrap();
    let mut encoder = Encoder::new(CodecOptions::fine(BlockSize::Page), 1, 1 << 20);
    let page = vec![7; PAGE_SIZE];
    for (epoch, first) in (1..).zip((0..pages).step_by(1024)) {
        let (payload, _) = encoder.encode(0, (first..first + 1024).map(|page_| (page_, &page[..]))).unwrap();
        let piece = EpochPages { id: ID, epoch: Some(epoch), array: 0, block: BlockSize::Page };
        receiver.store_pages(&piece, &payload).unwrap();
        receiver.end_epoch(seal(epoch, 1024), vec![1]).unwrap();
    }
    assert_eq!(receiver.snapshot_pages(kept.copy).unwrap_err(), SnapshotLost::TooSlow);
    // The next one has all of it.
    let kept = receiver.start_snapshot().unwrap();
    let mut got = 0;
    loop {
        let next = receiver.snapshot_pages(kept.copy).unwrap();
        got += next.pages.len() as u64;
        if next.last {
            break;
        }
    }
    assert_eq!(got, pages);
    receiver.take_over().unwrap();
    assert!(receiver.start_snapshot().is_none() && receiver.snapshot_pages(kept.copy).is_err());
}
