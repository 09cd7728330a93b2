//! What one round did, and counting it.

use crate::{Phase, Progress};
use std::time::{Duration, Instant};

/// What one round did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoundStats {
    /// Pages delivered.
    pub pages: u64,
    /// Encoded bytes they cost.
    pub bytes: u64,
    /// When it began, since the capture began.
    pub begun: Duration,
    /// How long the round took.
    pub took: Duration,
    /// Bytes a second it was held to; none if it went as fast as it could.
    pub limit: Option<u64>,
    /// Pages that were written again before their turn came, and wait for a later round.
    pub skipped: u64,
    /// Pages that were written while it ran, those skipped included: all that remains.
    pub left: u64,
    /// How long the machine would stand still for what remains, once that can be said.
    pub downtime: Option<Duration>,
}

impl RoundStats {
    /// Bytes a second that went out.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64().max(1e-6)
    }

    /// Bytes that a page came to; none if there was no page.
    pub fn bytes_a_page(&self) -> Option<f64> {
        (self.pages > 0).then(|| self.bytes as f64 / self.pages as f64)
    }
}

/// Counts one round while it runs.
pub(crate) struct Tally {
    phase: Phase,
    stats: RoundStats,
    total: u64,
    bytes_before: u64,
    begun: Instant,
}

impl Tally {
    pub(crate) fn start(phase: Phase, total: u64, bytes_before: u64, since: Instant) -> Self {
        let stats = RoundStats { begun: since.elapsed(), ..RoundStats::default() };
        Self { phase, stats, total, bytes_before, begun: Instant::now() }
    }

    /// The round is held to `limit`.
    pub(crate) fn held_to(mut self, limit: Option<u64>) -> Self {
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
        RoundStats { bytes: bytes_out - self.bytes_before, took: self.begun.elapsed(), ..self.stats }
    }
}
