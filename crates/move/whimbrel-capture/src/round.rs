//! Statistics of one round, and the counter that makes them.

use crate::{Phase, Progress};
use std::time::{Duration, Instant};

/// Statistics of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoundStats {
    /// Number of pages delivered.
    pub pages: u64,
    /// Encoded bytes of these pages.
    pub bytes: u64,
    /// Start of the round, since the start of the capture.
    pub start: Duration,
    /// Duration of the round.
    pub duration: Duration,
    /// Rate limit in bytes a second, if there was one.
    pub limit: Option<u64>,
    /// Pages that were written again before they were read, and wait for a later round.
    pub skipped: u64,
    /// Pages written during the round, those skipped included: all that remains.
    pub left: u64,
    /// Predicted downtime for what remains, once it can be predicted.
    pub downtime: Option<Duration>,
}

impl RoundStats {
    /// Average rate in bytes a second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.duration.as_secs_f64().max(1e-6)
    }

    /// Encoded bytes per page; none if there was no page.
    pub fn bytes_a_page(&self) -> Option<f64> {
        (self.pages > 0).then(|| self.bytes as f64 / self.pages as f64)
    }
}

pub(crate) struct Tally {
    phase: Phase,
    stats: RoundStats,
    total: u64,
    bytes_before: u64,
    started: Instant,
}

impl Tally {
    pub(crate) fn start(phase: Phase, total: u64, bytes_before: u64, since: Instant) -> Self {
        let stats = RoundStats { start: since.elapsed(), ..RoundStats::default() };
        Self { phase, stats, total, bytes_before, started: Instant::now() }
    }

    pub(crate) fn with_limit(mut self, limit: Option<u64>) -> Self {
        self.stats.limit = limit;
        self
    }

    pub(crate) fn add(&mut self, delivered: u64, skipped: u64, bytes_out: u64) -> Progress {
        self.stats.pages += delivered;
        self.stats.skipped += skipped;
        let done = self.stats.pages + self.stats.skipped;
        Progress { phase: self.phase, done, total: self.total, bytes_out, ended: None }
    }

    pub(crate) fn end(self, bytes_out: u64) -> RoundStats {
        RoundStats { bytes: bytes_out - self.bytes_before, duration: self.started.elapsed(), ..self.stats }
    }
}
