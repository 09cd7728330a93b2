//! Parts of a downtime, in the order in which they occur.
//!
//! Measured on the source. The times that the target reports are subtracted from the time that the source
//! waited for it; the rest is the link's. Nothing is decided by these figures.

use crate::protocol::Prepared;
use std::time::{Duration, Instant};
use whimbrel_capture::PauseParts;

/// Parts up to the commit point; [`DowntimeParts::runs`] completes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DowntimeParts {
    /// Until the CPUs were paused.
    pub stop: Duration,
    /// Until the pages left were known.
    pub scan: Duration,
    /// Saving the device state, while pages are sent.
    pub devices: Duration,
    /// Sending the last pages, without that.
    pub pages: Duration,
    /// Target: loading the device state, making disks durable.
    pub load: Duration,
    /// Link: device state and reply on the wire.
    pub link: Duration,
    /// Recording the handover.
    pub commit: Duration,
    /// From the commit until the CPUs ran on the target.
    pub start: Duration,
}

impl DowntimeParts {
    /// Starts with the parts of the finished capture.
    pub(crate) fn copied(parts: &PauseParts) -> Self {
        let PauseParts { stop, scan, devices, pages } = *parts;
        Self { stop, scan, devices, pages, ..Self::default() }
    }

    /// Adds the parts of the target's preparation, at its reply.
    pub(crate) fn prepared(&mut self, paused_at: Instant, prepared: Prepared) {
        let waited = paused_at.elapsed().saturating_sub(self.sum());
        self.load = Duration::from_micros(prepared.took).min(waited);
        self.link = waited - self.load;
    }

    /// Adds the time of recording the handover.
    pub(crate) fn committed(&mut self, paused_at: Instant) {
        self.commit = paused_at.elapsed().saturating_sub(self.sum());
    }

    /// Completes the parts, with the instant since which the machine runs on the target.
    pub fn runs(self, paused_at: Instant, since: Instant) -> Self {
        let start = since.saturating_duration_since(paused_at).saturating_sub(self.sum());
        Self { start, ..self }
    }

    /// Sum of all parts.
    pub fn sum(&self) -> Duration {
        let Self { stop, scan, devices, pages, load, link, commit, start } = *self;
        stop + scan + devices + pages + load + link + commit + start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_all_of_the_pause_and_nothing_else() {
        let ms = Duration::from_millis;
        let paused_at = Instant::now() - ms(100);
        let parts = PauseParts { stop: ms(1), scan: ms(2), devices: ms(3), pages: ms(4) };
        let mut pause = DowntimeParts::copied(&parts);
        pause.prepared(paused_at, Prepared { took: 5_000 });
        assert_eq!(pause.load, ms(5));
        assert!(pause.link >= ms(85), "{pause:?}");
        pause.committed(paused_at);
        let since = Instant::now();
        let whole = pause.runs(paused_at, since);
        assert_eq!(whole.sum(), since - paused_at);
    }

    #[test]
    fn a_target_that_says_nonsense_makes_no_part_negative() {
        let paused_at = Instant::now();
        let mut pause =
            DowntimeParts::copied(&PauseParts { stop: Duration::from_secs(9), ..PauseParts::default() });
        pause.prepared(paused_at, Prepared { took: u64::MAX });
        pause.committed(paused_at);
        assert_eq!(pause.runs(paused_at, paused_at).sum(), Duration::from_secs(9));
    }
}
