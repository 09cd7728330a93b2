//! A machine that writes to its disks faster than they are copied is held to half of that, from the second round on.
//!
//! So each round leaves at most half of what the one before it left, however hard the machine writes, and disks always
//! converge. The first round is as long as the disks are large: there it may write as it likes. Let go with the value, whether
//! the machine has gone or stays.

use crate::live::LiveDisk;
use std::time::Duration;
use whimbrel_capture::RoundStats;
use whimbrel_core::PAGE_SIZE;

/// Part of what a round copies that a machine may write meanwhile.
const SHARE: f64 = 0.5;
/// Nobody is held to less, in bytes a second: a guest that waits seconds for a write takes its disk for broken.
const SLOWEST: f64 = 1e6;
/// A shorter round says nothing about rates.
const TELLING: Duration = Duration::from_millis(20);

/// Slows a machine's disks down.
pub(super) struct DiskBrake<'a> {
    disks: &'a [LiveDisk],
    written: u64,
    limit: Option<u64>,
}

impl<'a> DiskBrake<'a> {
    /// Not yet.
    pub(super) fn new(disks: &'a [LiveDisk]) -> Self {
        Self { disks, written: written(disks), limit: None }
    }

    /// A round has ended.
    pub(super) fn ended(&mut self, round: &RoundStats) {
        let now = written(self.disks);
        let wrote = now - std::mem::replace(&mut self.written, now);
        let limit = limit(round, wrote, self.limit);
        if limit != self.limit {
            tracing::info!(?limit, wrote, "the machine writes to its disks faster than they are copied");
            self.limit = limit;
            let each = limit.map(|limit| limit / self.disks.len().max(1) as u64);
            self.disks.iter().for_each(|disk| disk.brake().set_rate(each));
        }
    }
}

impl Drop for DiskBrake<'_> {
    fn drop(&mut self) {
        self.disks.iter().for_each(|disk| disk.brake().set_rate(None));
    }
}

fn written(disks: &[LiveDisk]) -> u64 {
    disks.iter().map(|disk| disk.brake().written()).sum()
}

/// What all disks together are held to after a round in which the machine wrote so many bytes to them. What it is held to never
/// rises: it would only write more.
fn limit(round: &RoundStats, wrote: u64, limit: Option<u64>) -> Option<u64> {
    if round.took < TELLING {
        return limit;
    }
    let seconds = round.took.as_secs_f64();
    let may = (round.pages as f64 * PAGE_SIZE as f64 / seconds * SHARE).max(SLOWEST);
    let needed = (wrote as f64 / seconds > may).then_some(may as u64);
    match (limit, needed) {
        (Some(limit), Some(needed)) => Some(limit.min(needed)),
        (limit, needed) => limit.or(needed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(pages: u64, ms: u64) -> RoundStats {
        RoundStats { pages, took: Duration::from_millis(ms), ..RoundStats::default() }
    }

    #[test]
    fn only_who_writes_more_than_half_of_what_is_copied_is_held_to_that() {
        let copied = round(25_600, 1000);
        assert_eq!(limit(&copied, 50 << 20, None), None);
        assert_eq!(limit(&copied, 51 << 20, None), Some(50 << 20));
        assert_eq!(limit(&copied, 1 << 20, Some(9)), Some(9), "it is not let go before the end");
        assert_eq!(limit(&round(2560, 1000), 51 << 20, Some(50 << 20)), Some(5 << 20));
        assert_eq!(limit(&round(25, 1000), 51 << 20, None), Some(1_000_000));
        assert_eq!(limit(&round(1, 1), 1 << 30, None), None, "too short to tell");
    }

    #[test]
    fn whoever_writes_flat_out_leaves_half_as_much_after_each_round() {
        let (link, mut held, mut left) = (100e6, None, 500e6);
        for number in 0..8 {
            let seconds: f64 = left / link;
            let write = held.map_or(1e9, |limit| limit as f64);
            let wrote = write * seconds;
            let stats = round((left / PAGE_SIZE as f64) as u64, (seconds * 1e3) as u64);
            held = limit(&stats, wrote as u64, held);
            // Of a disk of 500 MB no more can be dirty.
            let next = wrote.min(500e6);
            assert!(number == 0 || next < left * 0.51 || left < 3e6, "{left} bytes left, then {next}");
            left = next;
        }
        assert!(left < 10e6, "{left} bytes left");
    }
}
