//! Figures of a protection so far, for people and metrics.

use crate::codec::ByteCounts;
use std::{collections::VecDeque, time::Duration};

/// Epochs over which percentiles are computed: a minute at the default length.
const WINDOW: usize = 1200;

/// Figures of the last epochs and totals of all.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    recent: VecDeque<EpochStats>,
    /// Number of committed epochs.
    pub epochs: u64,
    /// Byte counts of all epochs together.
    pub volume: ByteCounts,
    /// Pages that the standby requested again.
    pub resent_pages: u64,
    /// Bytes of device state.
    pub device_bytes: u64,
    /// Epochs that started late because the one before was still being sent.
    pub stretched: u64,
}

/// Duration of an epoch's pause and of its parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EpochPause {
    /// The whole pause.
    pub total: Duration,
    /// Until the CPUs had stopped.
    pub stop: Duration,
    /// Collecting the dirty pages.
    pub scan: Duration,
    /// Copying the dirty pages.
    pub copy: Duration,
    /// Waiting for the device state after that; it is saved while pages are collected and copied.
    pub devices: Duration,
    /// Until the CPUs ran again.
    pub unpause: Duration,
}

/// Figures of one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EpochStats {
    /// Pause at the end of the epoch.
    pub pause: EpochPause,
    /// Time since the previous capture.
    pub length: Duration,
    /// Time from the capture until its output was released.
    pub delay: Duration,
    /// Counts of pages and bytes.
    pub volume: ByteCounts,
}

impl Stats {
    /// Adds an epoch.
    pub fn add(&mut self, epoch: EpochStats) {
        self.epochs += 1;
        self.volume.add(epoch.volume);
        if self.recent.len() >= WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(epoch);
    }

    /// The value of `of` that the fraction `quantile` of the last epochs does not exceed.
    pub fn quantile(&self, quantile: f64, of: impl Fn(&EpochStats) -> Duration) -> Duration {
        let mut values: Vec<Duration> = self.recent.iter().map(of).collect();
        values.sort_unstable();
        let at = ((values.len() as f64 * quantile).ceil() as usize).clamp(1, values.len().max(1)) - 1;
        values.get(at).copied().unwrap_or_default()
    }

    /// Mean number of pages of the last epochs.
    pub fn pages(&self) -> f64 {
        let pages: u64 = self.recent.iter().map(|epoch| epoch.volume.pages).sum();
        pages as f64 / self.recent.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_there() {
        let mut stats = Stats::default();
        assert_eq!(stats.quantile(0.5, |epoch| epoch.pause.total), Duration::ZERO);
        for ms in 1..=100 {
            let pause = EpochPause { total: Duration::from_millis(ms), ..EpochPause::default() };
            stats.add(EpochStats { pause, ..EpochStats::default() });
        }
        assert_eq!(stats.quantile(0.5, |epoch| epoch.pause.total), Duration::from_millis(50));
        assert_eq!(stats.quantile(0.99, |epoch| epoch.pause.total), Duration::from_millis(99));
        assert_eq!(stats.quantile(1.0, |epoch| epoch.pause.total), Duration::from_millis(100));
    }
}
