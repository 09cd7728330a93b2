//! Wall clock: set forward after the machine stood still.
//!
//! All clocks of a guest stand still while it is paused, suspended or between two hosts. The monotonic ones
//! are right so. The wall clock is set to the host's if it is behind: each move of a machine adds to that,
//! and none is noticed by the guest's own time synchronisation before its next look. It is never set back,
//! for programs bear that badly.

use rustix::time::{ClockId, Timespec, clock_settime};
use std::{
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Difference that is left as it is: what the host's word was on its way for.
const BEHIND_MIN: Duration = Duration::from_millis(10);

/// Sets the clock to `host`, a time since 1970, if it is behind. Returns by how much it was set forward.
pub(crate) fn set_forward(host: Duration) -> io::Result<Duration> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let forward = behind(now, host);
    if !forward.is_zero() {
        let tv_sec = i64::try_from(host.as_secs()).map_err(io::Error::other)?;
        let time = Timespec { tv_sec, tv_nsec: host.subsec_nanos().into() };
        clock_settime(ClockId::Realtime, time)?;
    }
    Ok(forward)
}

fn behind(now: Duration, host: Duration) -> Duration {
    host.checked_sub(now).filter(|behind| *behind > BEHIND_MIN).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_set_forward_only_and_not_for_what_a_word_takes() {
        let ms = Duration::from_millis;
        assert_eq!(behind(ms(5000), ms(90_000)), ms(85_000));
        for (now, host) in [(5000, 5000), (5000, 5010), (90_000, 5000), (0, 0)] {
            assert_eq!(behind(ms(now), ms(host)), Duration::ZERO, "{now} {host}");
        }
    }
}
