//! Counts of events that leave no other trace: pauses, epochs, takeovers.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use whimbrel_metrics::{Histogram, bounds};
use whimbrel_protect::stats::EpochStats;

/// Counts since the daemon started, for metrics.
#[derive(Debug)]
pub(crate) struct EventCounts {
    pub(crate) checkpoint_pause: Histogram,
    pub(crate) migration_downtime: Histogram,
    migration_bytes: AtomicU64,
    takeovers: AtomicU64,
    pub(crate) epochs: EpochCounts,
}

/// Histograms of the epochs of all protected machines together.
#[derive(Debug)]
pub(crate) struct EpochCounts {
    pub(crate) pause: Histogram,
    pub(crate) length: Histogram,
    pub(crate) output_delay: Histogram,
    pub(crate) sent_bytes: Histogram,
}

impl Default for EventCounts {
    fn default() -> Self {
        let seconds = || Histogram::new(bounds::PAUSE);
        Self {
            checkpoint_pause: seconds(),
            migration_downtime: seconds(),
            migration_bytes: AtomicU64::new(0),
            takeovers: AtomicU64::new(0),
            epochs: EpochCounts {
                pause: seconds(),
                length: seconds(),
                output_delay: seconds(),
                sent_bytes: Histogram::new(bounds::BYTES),
            },
        }
    }
}

impl EventCounts {
    /// Counts a machine that has moved away: its downtime, and the bytes on the wire.
    pub(crate) fn migrated(&self, downtime_ms: f64, bytes: u64) {
        self.migration_downtime.observe(downtime_ms / 1e3);
        self.migration_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn migration_bytes(&self) -> u64 {
        self.migration_bytes.load(Ordering::Relaxed)
    }

    /// Counts a pause for a checkpoint.
    pub(crate) fn checkpointed(&self, pause: Duration) {
        self.checkpoint_pause.observe_time(pause);
    }

    /// Counts an epoch that the standby has.
    pub(crate) fn epoch(&self, epoch: &EpochStats) {
        self.epochs.pause.observe_time(epoch.pause.total);
        self.epochs.length.observe_time(epoch.length);
        self.epochs.output_delay.observe_time(epoch.delay);
        self.epochs.sent_bytes.observe(epoch.volume.sent as f64);
    }

    /// Counts a machine that was taken over from another host.
    pub(crate) fn took_over(&self) {
        self.takeovers.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn takeovers(&self) -> u64 {
        self.takeovers.load(Ordering::Relaxed)
    }
}
