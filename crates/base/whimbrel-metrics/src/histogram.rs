//! Histogram: counts of observations, without a lock.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Most upper bounds of a histogram.
const BOUNDS_MAX: usize = 16;

/// Upper bounds of histograms.
pub mod bounds {
    /// Seconds for which a guest stands still, or its output waits: 0.5 ms to 2 s.
    pub const PAUSE: &[f64] =
        &[0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0];
    /// Seconds of calls: 1 ms to a minute.
    pub const CALL: &[f64] = &[0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];
    /// Bytes: 4 KiB to 1 GiB.
    pub const BYTES: &[f64] =
        &[4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0, 1073741824.0];
}

/// Counts of observations up to each of its bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// Observations by bound, the last for what is above all of them.
    counts: [AtomicU64; BOUNDS_MAX + 1],
    /// Sum of the observations, as the bits of an `f64`.
    sum: AtomicU64,
}

impl Histogram {
    /// Makes an empty histogram with these upper bounds, 16 at most, in rising order.
    pub const fn new(bounds: &'static [f64]) -> Self {
        assert!(bounds.len() <= BOUNDS_MAX, "too many bounds");
        Self { bounds, counts: [const { AtomicU64::new(0) }; BOUNDS_MAX + 1], sum: AtomicU64::new(0) }
    }

    /// Counts a duration, in seconds.
    pub fn observe_time(&self, took: Duration) {
        self.observe(took.as_secs_f64());
    }

    /// Counts a value.
    pub fn observe(&self, value: f64) {
        let at = self.bounds.iter().position(|bound| value <= *bound).unwrap_or(self.bounds.len());
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        // Never fails, since `add` always has a value.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Each bound with the number of observations up to it, the last one infinite, and their sum.
    pub(crate) fn read(&self) -> (Vec<(f64, u64)>, f64) {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let mut total = 0;
        let buckets = bounds.zip(&self.counts).map(|(bound, count)| {
            total += count.load(Ordering::Relaxed);
            (bound, total)
        });
        (buckets.collect(), f64::from_bits(self.sum.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_on_a_bound_counts_below_it_and_one_above_all_is_not_lost() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 99.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.read(), (vec![(1.0, 2), (2.0, 3), (f64::INFINITY, 4)], 102.0));
    }
}
