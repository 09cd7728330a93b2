//! The overlay compared with a plain vector, with kills and power failures at any point.
//!
//! A *kill* drops the device without a flush and opens it again: everything acknowledged must be there. A
//! *power failure* removes the live bitmap and makes every page of the data file that was written since the
//! last flush randomly the new or the synced one; optionally it happens inside a flush, when the durable
//! bitmap is a mix of old and new words. Then every page must read as at the last flush or as last written.

use proptest::prelude::*;
use std::{fs, path::Path, sync::Arc};
use whimbrel_block::{Cow, Device, MemDevice, OverlayDir, OverlayKey};
use whimbrel_core::Digest;

const PAGE: usize = 4096;
const PAGES: usize = 70;
const SIZE: usize = PAGES * PAGE;

#[derive(Debug, Clone)]
enum Step {
    Write(usize, usize, u8),
    Zero(usize, usize),
    Trim(usize, usize),
    Flush,
    Kill,
    PowerLoss { lots: u64, inside_flush: bool },
}

fn range() -> impl Strategy<Value = (usize, usize)> {
    let aligned = (0..PAGES, 1..9usize).prop_map(|(page, count)| (page * PAGE, count * PAGE));
    prop_oneof![(0..SIZE, 1..3 * PAGE), aligned].prop_map(|(start, len)| (start, len.min(SIZE - start)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (range(), 1..255u8).prop_map(|((start, len), fill)| Step::Write(start, len, fill)),
        2 => range().prop_map(|(start, len)| Step::Zero(start, len)),
        1 => range().prop_map(|(start, len)| Step::Trim(start, len)),
        2 => Just(Step::Flush),
        1 => Just(Step::Kill),
        2 => (any::<u64>(), any::<bool>()).prop_map(|(lots, inside_flush)| Step::PowerLoss { lots, inside_flush }),
    ]
}

/// Small random generator with a seed, so that a failing case is repeatable.
fn draw(lots: &mut u64) -> bool {
    *lots = lots.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    *lots >> 40 & 1 == 1
}

/// Takes each `unit` bytes randomly from `old` or `new`.
fn mix(old: &[u8], new: &[u8], unit: usize, lots: &mut u64) -> Vec<u8> {
    let pairs = old.chunks(unit).zip(new.chunks(unit));
    pairs.flat_map(|(old, new)| if draw(lots) { new } else { old }).copied().collect()
}

struct World {
    place: OverlayDir,
    base: Arc<dyn Device>,
    cow: Option<Cow>,
    key: Option<OverlayKey>,
    now: Vec<u8>,
    flushed: Vec<u8>,
    synced_data: Vec<u8>,
}

impl World {
    fn new(dir: &Path, key: Option<OverlayKey>) -> Self {
        let place = OverlayDir { dir: dir.join("overlay"), live_dir: dir.join("live") };
        let now: Vec<u8> = (0..SIZE).map(|i| (i / 97 % 255) as u8 + 1).collect();
        let base: Arc<dyn Device> = Arc::new(MemDevice::new(now.clone()));
        let cow = Cow::create_with_key(&place, base.clone(), Digest::of(b"base"), key.as_ref());
        Self {
            place,
            base,
            cow: Some(cow.unwrap()),
            key,
            flushed: now.clone(),
            now,
            synced_data: vec![0; SIZE],
        }
    }

    fn cow(&self) -> &Cow {
        self.cow.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        self.cow = None;
        let id = Digest::of(b"base");
        self.cow = Some(Cow::open_with_key(&self.place, self.base.clone(), id, self.key.as_ref()).unwrap());
    }

    fn content(&self) -> Vec<u8> {
        let mut out = vec![0xEE; SIZE];
        self.cow().read_at(0, &mut out).unwrap();
        out
    }

    fn flush(&mut self) {
        self.cow().flush().unwrap();
        self.flushed = self.now.clone();
        self.synced_data = fs::read(self.place.dir.join("data")).unwrap();
    }

    fn power_loss(&mut self, mut lots: u64, inside_flush: bool) {
        let (data, durable) = (self.place.dir.join("data"), self.place.dir.join("owned"));
        if inside_flush {
            let (flushed, old) = (self.flushed.clone(), fs::read(&durable).unwrap());
            self.flush();
            self.flushed = flushed;
            fs::write(&durable, mix(&old, &fs::read(&durable).unwrap(), 8, &mut lots)).unwrap();
        }
        self.cow = None;
        fs::write(&data, mix(&self.synced_data, &fs::read(&data).unwrap(), PAGE, &mut lots)).unwrap();
        fs::remove_dir_all(&self.place.live_dir).unwrap();
        self.reopen();
        let found = self.content();
        for page in 0..PAGES {
            let at = page * PAGE..(page + 1) * PAGE;
            let fine = found[at.clone()] == self.flushed[at.clone()] || found[at.clone()] == self.now[at];
            assert!(fine, "page {page} is neither as flushed nor as written last");
        }
        self.now = found;
        self.flush();
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Write(start, len, fill) => {
                let data: Vec<u8> = (0..len).map(|i| fill ^ (i / 512) as u8).collect();
                self.cow().write_at(start as u64, &data).unwrap();
                self.now[start..start + len].copy_from_slice(&data);
            }
            Step::Zero(start, len) => {
                self.cow().write_zeroes(start as u64, len as u64).unwrap();
                self.now[start..start + len].fill(0);
            }
            Step::Trim(start, len) => {
                self.cow().trim(start as u64, len as u64).unwrap();
                let whole = start.next_multiple_of(PAGE)..(start + len) / PAGE * PAGE;
                if !whole.is_empty() {
                    self.now[whole].fill(0);
                }
            }
            Step::Flush => self.flush(),
            Step::Kill => self.reopen(),
            Step::PowerLoss { lots, inside_flush } => self.power_loss(lots, inside_flush),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn nothing_acknowledged_is_lost_by_a_kill_and_nothing_flushed_by_a_loss_of_power(
        steps in prop::collection::vec(step(), 1..40), encrypted in any::<bool>()
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut world = World::new(dir.path(), encrypted.then_some(OverlayKey([3; 32])));
        for step in &steps {
            world.take(step);
            prop_assert!(world.content() == world.now, "after {:?}", step);
        }
        let owned = world.cow().allocated();
        let mut base = vec![0; SIZE];
        world.base.read_at(0, &mut base).unwrap();
        for page in (0..PAGES).filter(|p| !owned.contains(*p as u64)) {
            let at = page * PAGE..(page + 1) * PAGE;
            prop_assert!(world.now[at.clone()] == base[at], "page {} differs from the base and is not owned", page);
        }
        let extents = world.cow().extents(0, SIZE as u64).unwrap();
        prop_assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), SIZE as u64);
        prop_assert!(extents.windows(2).all(|w| w[0].kind != w[1].kind));
    }
}
