//! Load generator: dirties memory at a chosen rate.

use crate::random::Noise;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    /// Size of the region in MiB.
    pub(crate) region_mib: usize,
    /// Pages written each second; 0 is as fast as possible.
    pub(crate) pages_per_second: u64,
    /// Bytes changed in each page, up to 4096.
    pub(crate) bytes_per_page: usize,
}

/// Load that runs until this is dropped.
pub(crate) struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Load {
    /// Parses three numbers; none if one is missing or out of range.
    pub(crate) fn from_words<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut number = || words.next()?.parse::<u64>().ok();
        let load = Self {
            region_mib: number()? as usize,
            pages_per_second: number()?,
            bytes_per_page: number()? as usize,
        };
        let sensible = (1..=1 << 20).contains(&load.region_mib) && (8..=4096).contains(&load.bytes_per_page);
        sensible.then_some(load)
    }

    /// Parses the kernel option `dirty:MIB:PAGES_PER_SECOND:BYTES_PER_PAGE`.
    pub(crate) fn from_kernel_option(text: &str) -> Option<Self> {
        Self::from_words(text.strip_prefix("dirty:")?.split(':'))
    }

    pub(crate) fn start(self) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        thread::spawn(move || self.run(&seen));
        Running(stop)
    }

    fn run(self, stop: &AtomicBool) {
        let mut noise = Noise::new(self.region_mib as u64);
        // Content that does not compress, as on a machine with warm caches.
        let mut region: Vec<u64> = (0..self.region_mib << 17).map(|_| noise.next()).collect();
        let (pages, words) = (region.len() as u64 / 512, self.bytes_per_page / 8);
        let (begin, mut done) = (Instant::now(), 0u64);
        while !stop.load(Ordering::Relaxed) {
            // Reading the clock for every page would dominate the load; fifty pages are a fine enough step.
            for _ in 0..50 {
                let random = noise.next();
                let page = (random >> 8) % pages;
                let first = ((random & 63) as usize * 8).min(512 - words);
                let start = page as usize * 512 + first;
                for (at, word) in region[start..start + words].iter_mut().enumerate() {
                    *word = random.wrapping_add(at as u64);
                }
            }
            done += 50;
            if let Some(due) = (done * 1_000_000).checked_div(self.pages_per_second) {
                thread::sleep(Duration::from_micros(due).saturating_sub(begin.elapsed()));
            }
        }
        std::hint::black_box(&region);
    }
}
