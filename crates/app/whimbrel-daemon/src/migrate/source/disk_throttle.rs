//! Disk throttle: limits a machine that writes to its disks faster than they are copied, and mirrors its
//! writes.
//!
//! Its writes are mirrored to the target from then on, and throttled to half of the copy rate, so that rounds
//! have the other half of the link. After the first round that starts so, a disk is equal on both hosts
//! except for writes in flight, and stays so however fast the machine writes: disks always converge. The
//! first round, as long as the disks are large, has no limit. Dropping the value ends both, whether the
//! machine has moved or stays.

use std::{sync::Arc, time::Duration};
use whimbrel_api::MirroredWrites;
use whimbrel_block::Mirror;
use whimbrel_capture::RoundStats;
use whimbrel_core::PAGE_SIZE;
use whimbrel_vm::RunningDisk;

/// Share of a round's copy rate at which the machine may write.
const WRITE_SHARE: f64 = 0.5;
/// Lowest limit in bytes a second: a guest that waits seconds for a write considers its disk broken.
const LIMIT_MIN: f64 = 1e6;
/// Rates of a shorter round are not meaningful.
const ROUND_MIN: Duration = Duration::from_millis(20);
/// Mirrored bytes in flight lengthen the downtime, so they are limited to what the link carries in this time,
/// within bounds.
const MIRROR_WINDOW: Duration = Duration::from_millis(5);
const MIRROR_BYTES_MIN: f64 = 256e3;
const MIRROR_BYTES_MAX: f64 = 4e6;

/// Throttles a machine's disks so that their copy converges.
pub(super) struct DiskThrottle<'a> {
    disks: &'a [RunningDisk],
    mirrors: Vec<Arc<Mirror>>,
    written: u64,
    limited: bool,
}

impl<'a> DiskThrottle<'a> {
    /// A throttle without a limit.
    pub(super) fn new(disks: &'a [RunningDisk]) -> Self {
        let pages =
            |disk: &RunningDisk| whimbrel_block::Device::size(&**disk.device()).div_ceil(PAGE_SIZE as u64);
        let mirrors = disks.iter().map(|disk| Arc::new(Mirror::new(pages(disk)))).collect();
        Self { disks, mirrors, written: written(disks), limited: false }
    }

    /// The mirrors and the arrays of their disks; array 0 is memory.
    pub(super) fn mirrors(&self) -> Vec<(usize, Arc<Mirror>)> {
        (1..).zip(self.mirrors.iter().cloned()).collect()
    }

    /// Handles the end of a round: sets the limit if the machine writes too fast.
    pub(super) fn round_ended(&mut self, round: &RoundStats) {
        let now = written(self.disks);
        let wrote = now - std::mem::replace(&mut self.written, now);
        let Some(limit) = limit(round, wrote).filter(|_| !self.limited) else { return };
        self.limited = true;
        tracing::info!(limit, wrote, "the machine writes to its disks faster than they are copied");
        let each = limit / self.disks.len().max(1) as u64;
        let bound = ((limit as f64 / WRITE_SHARE) * MIRROR_WINDOW.as_secs_f64())
            .clamp(MIRROR_BYTES_MIN, MIRROR_BYTES_MAX) as u64;
        for (disk, mirror) in self.disks.iter().zip(&self.mirrors) {
            disk.throttle().set_rate(Some(each));
            disk.mirrored().set(Some(mirror.clone()));
            mirror.arm(bound);
        }
    }

    /// Removes the limit. Returns the mirrored writes, if there was one.
    pub(super) fn release(self) -> Option<MirroredWrites> {
        let costs: Vec<_> = self.mirrors.iter().map(|mirror| mirror.cost()).collect();
        let writes: u64 = costs.iter().map(|cost| cost.writes).sum();
        let waited: Duration = costs.iter().map(|cost| cost.waited).sum();
        self.limited.then(|| MirroredWrites {
            writes,
            bytes: costs.iter().map(|cost| cost.bytes).sum(),
            waited_us: waited.as_micros() as u64 / writes.max(1),
            longest_us: costs.iter().map(|cost| cost.longest.as_micros() as u64).max().unwrap_or(0),
        })
    }
}

impl Drop for DiskThrottle<'_> {
    fn drop(&mut self) {
        for (disk, mirror) in self.disks.iter().zip(&self.mirrors) {
            disk.throttle().set_rate(None);
            // Before the mirrors are removed, so that no write waits for one.
            mirror.end();
            disk.mirrored().set(None);
        }
    }
}

fn written(disks: &[RunningDisk]) -> u64 {
    disks.iter().map(|disk| disk.throttle().written()).sum()
}

/// The limit of all disks together after a round in which the machine wrote this many bytes; none if that is
/// at most half of what the round copied.
fn limit(round: &RoundStats, wrote: u64) -> Option<u64> {
    if round.duration < ROUND_MIN {
        return None;
    }
    let seconds = round.duration.as_secs_f64();
    let may = (round.pages as f64 * PAGE_SIZE as f64 / seconds * WRITE_SHARE).max(LIMIT_MIN);
    (wrote as f64 / seconds > may).then_some(may as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(pages: u64, ms: u64) -> RoundStats {
        RoundStats { pages, duration: Duration::from_millis(ms), ..RoundStats::default() }
    }

    #[test]
    fn only_who_writes_more_than_half_of_what_is_copied_is_held_to_that() {
        let copied = round(25_600, 1000);
        assert_eq!(limit(&copied, 50 << 20), None);
        assert_eq!(limit(&copied, 51 << 20), Some(50 << 20));
        assert_eq!(limit(&round(2560, 1000), 51 << 20), Some(5 << 20));
        assert_eq!(limit(&round(25, 1000), 51 << 20), Some(1_000_000));
        assert_eq!(limit(&round(1, 1), 1 << 30), None, "too short to tell");
    }
}
