//! Campaigns: real machines under faults at random instants, for as many minutes as asked, from one seed.
//!
//! What went wrong is a figure and not an error: it is told at once with its seed and number, and the
//! campaign goes on with a new machine. The seed repeats the faults and when they strike, not what the hosts
//! make of them.

mod capsules;
mod disturbance;
mod guest;
mod moves;
mod takeovers;

pub(super) use capsules::run as capsules;
pub(super) use guest::agent;
pub(super) use moves::run as moves;
pub(super) use takeovers::run as takeovers;

use super::Context;
use std::time::{Duration, Instant};

/// Seed and length of a campaign.
pub(super) struct Length {
    pub(super) seed: u64,
    pub(super) minutes: u64,
    begun: Instant,
}

impl Length {
    /// As the caller says, or so many minutes and a seed of the clock.
    pub(super) fn of(context: &Context, full: u64, quick: u64) -> Self {
        let minutes = context.minutes.unwrap_or(if context.quick { quick } else { full });
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seed = context.seed.unwrap_or(now.as_secs());
        eprintln!("    seed {seed}, {minutes} minutes");
        Self { seed, minutes, begun: Instant::now() }
    }

    /// Whether there is time left.
    pub(super) fn goes_on(&self) -> bool {
        self.begun.elapsed() < Duration::from_secs(self.minutes * 60)
    }
}
