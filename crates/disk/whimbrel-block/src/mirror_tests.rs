//! Tests of the mirror with threads that write, copy and send at once: is the copy equal to the device, and
//! what does a failure of the sender leave?

use super::*;
use crate::{Device, MemDevice, MirrorLayer, TrackedDevice};
use proptest::prelude::*;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};
use whimbrel_core::PAGE_SIZE;

const PAGES: u64 = 48;
const SIZE: usize = PAGES as usize * PAGE_SIZE;

/// Pseudorandom numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// Device, its tracking layer, and its copy.
struct Pair {
    tracked: Arc<TrackedDevice>,
    disk: MirrorLayer,
    mirror: Arc<Mirror>,
    copy: MemDevice,
    /// Versions in flight, by page: at most one.
    under_way: Vec<AtomicU64>,
    broken: AtomicBool,
}

impl Pair {
    fn new() -> Self {
        let tracked = Arc::new(TrackedDevice::new(Arc::new(MemDevice::new(vec![0; SIZE]))));
        Self {
            disk: MirrorLayer::new(tracked.clone()),
            tracked,
            mirror: Arc::new(Mirror::new(PAGES)),
            copy: MemDevice::new(vec![0; SIZE]),
            under_way: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
            broken: AtomicBool::new(false),
        }
    }

    /// Sends pages to the copy.
    fn travel(&self, run: PageRun, data: &[u8]) {
        for page in run.pages() {
            assert_eq!(self.under_way[page as usize].fetch_add(1, SeqCst), 0, "two versions of page {page}");
        }
        std::thread::yield_now();
        self.copy.write_at(run.offset(), data).unwrap();
        for page in run.pages() {
            self.under_way[page as usize].fetch_sub(1, SeqCst);
        }
        self.mirror.arrived(&[run]);
    }

    /// Writes anywhere, a little or a lot, until `stop`. Failures are ignored.
    fn write(&self, seed: u64, stop: &AtomicBool) {
        let mut dice = Dice(seed);
        while !stop.load(SeqCst) {
            let at = dice.below(SIZE as u64 - 1);
            let len = (1 + dice.below(3 * PAGE_SIZE as u64)).min(SIZE as u64 - at);
            match dice.below(16) {
                0 => self.disk.write_zeroes(at, len).unwrap(),
                1 => self.disk.trim(at, len).unwrap(),
                _ => self.disk.write_at(at, &vec![dice.below(255) as u8 + 1; len as usize]).unwrap(),
            }
        }
    }

    /// Sends writes until the mirror ends, or `most` were sent.
    fn carry(&self, most: u64) {
        for _ in 0..most {
            match self.mirror.take(16, true) {
                NextWrites::Writes(pieces) => pieces.iter().for_each(|(run, data)| {
                    self.travel(*run, data);
                    self.mirror.delivered(data.len() as u64);
                }),
                NextWrites::Nothing => unreachable!("it was to wait"),
                NextWrites::Ended => return,
            }
        }
        self.broken.store(true, SeqCst);
        self.mirror.end();
    }

    fn found(&self) -> PageSet {
        let mut left = self.tracked.take_dirty();
        self.mirror.collected(&mut left);
        left
    }

    fn round(&self, left: &PageSet) {
        for run in left.runs().flat_map(|run| run.chunks(4)) {
            self.mirror.about_to_read(run);
            let mut data = vec![0; run.bytes()];
            self.tracked.read_at(run.offset(), &mut data).unwrap();
            self.travel(run, &data);
        }
    }

    fn content(device: &dyn Device) -> Vec<u8> {
        let mut content = vec![0; SIZE];
        device.read_at(0, &mut content).unwrap();
        content
    }
}

/// Copies a device in rounds while two threads write to it; the mirror is armed after the first round. The
/// sender of writes fails after `most` messages. Returns whether the mirror lived, and the number of pages in
/// the last pause.
fn copied(seed: u64, bound: u64, most: u64) -> (bool, u64) {
    let (pair, stop) = (Pair::new(), AtomicBool::new(false));
    let mut left_at_last = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| pair.carry(most));
        let (shared, stops) = (&pair, &stop);
        let write = |number| scope.spawn(move || shared.write(seed ^ number, stops));
        let writers = [0, 1].map(write);
        pair.round(&pair.found());
        let mut left = pair.found();
        pair.disk.set(Some(pair.mirror.clone()));
        pair.mirror.arm(bound);
        for _ in 0..6 {
            pair.round(&left);
            left = pair.found();
        }
        stop.store(true, SeqCst);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        left.union(&pair.found());
        left_at_last = left.count();
        pair.round(&left);
        pair.mirror.wait_until_drained();
        pair.mirror.end();
    });
    pair.disk.set(None);
    let lives = !pair.broken.load(SeqCst);
    if lives {
        assert!(
            Pair::content(&pair.copy) == Pair::content(&*pair.tracked),
            "seed {seed}: the copy is another"
        );
    }
    (lives, left_at_last)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_meets_whatever_the_copy_is_the_device(seed: u64, bound in 1..100_000u64) {
        prop_assert!(copied(seed, bound, u64::MAX).0);
    }

    #[test]
    fn a_carrier_that_fails_fails_no_write_and_holds_nobody(seed: u64, most in 0..40u64) {
        copied(seed, 20_000, most);
    }
}

#[test]
fn once_a_round_has_had_a_page_only_writes_that_met_it_bring_it_back() {
    let pair = Pair::new();
    let write =
        |page: u64, byte: u8| pair.disk.write_at(page * PAGE_SIZE as u64, &[byte; PAGE_SIZE]).unwrap();
    (0..PAGES).for_each(|page| write(page, 1));
    pair.round(&pair.found());
    (0..8).for_each(|page| write(page, 2));
    pair.disk.set(Some(pair.mirror.clone()));
    pair.mirror.arm(1 << 20);
    write(8, 2);
    let left = pair.found();
    assert_eq!(left.count(), 9, "what was written before the mirror, and before it carries");
    // A page that the round has yet to read is not sent; all others are.
    write(3, 3);
    write(20, 3);
    assert!(
        matches!(pair.mirror.take(16, false), NextWrites::Writes(pieces) if pieces[0].0 == PageRun::new(20, 1))
    );
    pair.mirror.arrived(&[PageRun::new(20, 1)]);
    pair.mirror.delivered(PAGE_SIZE as u64);
    pair.round(&left);
    assert!(pair.found().is_empty(), "page 3 was read after it was written");
    (0..PAGES).for_each(|page| {
        write(page, 4);
        assert!(matches!(pair.mirror.take(16, false), NextWrites::Writes(_)));
        pair.mirror.arrived(&[PageRun::new(page, 1)]);
        pair.mirror.delivered(PAGE_SIZE as u64);
    });
    assert!(pair.found().is_empty(), "all of it was carried");
    pair.disk.write_zeroes(0, 2 * PAGE_SIZE as u64).unwrap();
    assert_eq!(pair.found().count(), 2, "what is zeroed comes with the next round");
    let cost = pair.mirror.cost();
    assert_eq!((cost.writes, cost.bytes), (PAGES + 1, (PAGES + 1) * PAGE_SIZE as u64));
}
