//! What a protection did so far, for people and metrics.

use crate::codec::ByteCounts;
use std::{collections::VecDeque, time::Duration};

/// Epochs over which percentiles are taken: a minute at the default length.
const WINDOW: usize = 1200;

/// Figures of the last epochs and sums of all.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    recent: VecDeque<EpochStats>,
    /// Epochs that were committed.
    pub epochs: u64,
    /// All volumes together.
    pub volume: ByteCounts,
    /// Pages that were asked for again.
    pub again: u64,
    /// Bytes of device state.
    pub device_bytes: u64,
    /// Epochs that began later than they were to, because the one before was still on its way.
    pub stretched: u64,
}

/// How long a machine stood still, and for what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EpochPause {
    /// All of it.
    pub whole: Duration,
    /// Until it stood.
    pub stop: Duration,
    /// Finding out what was written.
    pub scan: Duration,
    /// Copying that aside.
    pub copy: Duration,
    /// Waiting for the device state, which is taken beside finding and copying, after those.
    pub devices: Duration,
    /// Until it went on.
    pub go_on: Duration,
}

/// One epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EpochStats {
    /// How long the machine stood still.
    pub pause: EpochPause,
    /// From the cut before to this one.
    pub length: Duration,
    /// From the cut until its output was released.
    pub delay: Duration,
    /// Pages and bytes.
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

    /// Of the last epochs, the value of `of` that the part `quantile` of them does not exceed.
    pub fn quantile(&self, quantile: f64, of: impl Fn(&EpochStats) -> Duration) -> Duration {
        let mut values: Vec<Duration> = self.recent.iter().map(of).collect();
        values.sort_unstable();
        let at = ((values.len() as f64 * quantile).ceil() as usize).clamp(1, values.len().max(1)) - 1;
        values.get(at).copied().unwrap_or_default()
    }

    /// Pages of an epoch, on average of the last ones.
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
        assert_eq!(stats.quantile(0.5, |epoch| epoch.pause.whole), Duration::ZERO);
        for ms in 1..=100 {
            let pause = EpochPause { whole: Duration::from_millis(ms), ..EpochPause::default() };
            stats.add(EpochStats { pause, ..EpochStats::default() });
        }
        assert_eq!(stats.quantile(0.5, |epoch| epoch.pause.whole), Duration::from_millis(50));
        assert_eq!(stats.quantile(0.99, |epoch| epoch.pause.whole), Duration::from_millis(99));
        assert_eq!(stats.quantile(1.0, |epoch| epoch.pause.whole), Duration::from_millis(100));
    }
}
