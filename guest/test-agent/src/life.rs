//! State that only an uninterrupted guest retains: the nonce, the counter, the buffer of known content.

use crate::random::{Checksum, Noise, unpredictable};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Milliseconds between two steps of the counter, unless the guest is told otherwise. A guest that wakes a
/// thousand times a second takes a tenth of a processor under QEMU's translator; with twenty times it is a
/// fiftieth, and a hundred idle guests take two processors.
pub(crate) const TICK: u64 = 50;

/// Life of the guest, from the start of the test agent on.
pub(crate) struct Life {
    /// Random number that is only in memory.
    pub(crate) nonce: u64,
    counter: Arc<Counter>,
    buffer: Vec<u64>,
}

#[derive(Default)]
struct Counter {
    value: AtomicU64,
    went_back: AtomicBool,
}

pub(crate) struct CheckResult {
    pub(crate) sum: u64,
    /// Whether the content is as expected.
    pub(crate) good: bool,
}

impl Life {
    /// Starts a life with a buffer of `buffer_mib` MiB, whose counter steps every `tick` ms.
    pub(crate) fn start(buffer_mib: usize, tick: u64) -> Self {
        let nonce = unpredictable();
        let mut noise = Noise::new(nonce);
        let buffer = (0..buffer_mib << 17).map(|_| noise.next()).collect();
        let counter = Arc::new(Counter::default());
        let ticking = Arc::clone(&counter);
        thread::spawn(move || ticking.run(tick));
        Self { nonce, counter, buffer }
    }

    /// Value of the counter: approximate milliseconds lived.
    pub(crate) fn counter(&self) -> u64 {
        self.counter.value.load(Ordering::SeqCst)
    }

    /// Whether the counter has always grown by one tick.
    pub(crate) fn counter_is_steady(&self) -> bool {
        !self.counter.went_back.load(Ordering::SeqCst)
    }

    /// Reads the complete buffer and compares it with its initial content.
    pub(crate) fn check_buffer(&self) -> CheckResult {
        let (mut noise, mut sum, mut good) = (Noise::new(self.nonce), Checksum::default(), true);
        for word in &self.buffer {
            sum.add(*word);
            good &= *word == noise.next();
        }
        CheckResult { sum: sum.value(), good }
    }
}

impl Counter {
    /// Counts for ever. The thread's own copy is on its stack, the shared one on the heap: two pages, so a
    /// single stale page makes them differ.
    fn run(&self, tick: u64) {
        let mut own = 0;
        loop {
            thread::sleep(Duration::from_millis(tick));
            if self.value.swap(own + tick, Ordering::SeqCst) != own {
                self.went_back.store(true, Ordering::SeqCst);
            }
            own += tick;
        }
    }
}
