//! Pseudorandom numbers that choose entries to evict: SplitMix64 over a shared counter.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sequence of random numbers, shared by threads.
#[derive(Debug)]
pub(crate) struct Random(AtomicU64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    pub(crate) fn next(&self) -> u64 {
        let mut z = self.0.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}
