//! Wall clock and file systems of a guest that has stood still, by qemu-ga.
//!
//! All clocks of a guest stand still while it is paused, suspended or between two hosts. Once it continues,
//! its wall clock is set forward to that of the host, unless the guest agent of Whimbrel does that; it is
//! never set back. File systems that a daemon froze and could not thaw, because it died or the machine moved,
//! are thawed. A guest without qemu-ga does not answer, and is left alone.

use super::{AgentCommands, spawn_for_guest};
use std::{
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::MachineName;
use whimbrel_qemu::{QemuGa, QemuGaError, QemuGaSession};

/// Time in which the guest answers if it has qemu-ga. It may be busy just after it has moved.
const PATIENCE: Duration = Duration::from_secs(15);
const ATTEMPT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(200);
/// Lag that is left as it is: that of the measurement.
const LAG_MAX: Duration = Duration::from_millis(10);
/// Attempts to set the clock: an answer may be late, and the clock then is.
const SETTINGS_MAX: u32 = 6;

/// Takes care of the guest of a machine that runs again, in the background.
pub(super) fn follow(ga: QemuGa, ours: AgentCommands, machine: MachineName) {
    spawn_for_guest("guest-time", move || {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match ga.session(ATTEMPT).and_then(|mut session| care(&mut session, &ours)) {
                Ok(Some(forward)) => {
                    let forward_ms = forward.as_millis() as u64;
                    return tracing::info!(%machine, forward_ms, "qemu-ga has set the guest's clock forward");
                }
                Ok(None) => return,
                // The machine has ended.
                Err(QemuGaError::Port(_)) => return,
                Err(error) => tracing::debug!(%machine, %error, "qemu-ga does not take care of the guest"),
            }
            thread::sleep(PAUSE);
        }
    });
}

/// Returns by how much the clock was set forward, if it was behind.
fn care(session: &mut QemuGaSession<'_>, ours: &AgentCommands) -> Result<Option<Duration>, QemuGaError> {
    // Not every guest can say, and the clock is set all the same.
    if session.is_frozen().unwrap_or(false) {
        let thawed = session.thaw()?;
        tracing::warn!(thawed, "file systems of a guest were still frozen");
    }
    if ours.sets_clock() {
        return Ok(None);
    }
    let (mut forward, mut by_program) = (None, false);
    for _ in 0..SETTINGS_MAX {
        let (lag, round_trip) = lag_of(session)?;
        if lag <= LAG_MAX.max(round_trip / 2) {
            break;
        }
        let wanted = since_1970() + round_trip / 2;
        let set = match by_program {
            true => session.exec(&date(wanted), &[], &[]).map(drop),
            false => session.set_time(i64::try_from(wanted.as_nanos()).unwrap_or(i64::MAX)),
        };
        match set {
            Ok(()) => {}
            // The next look tells whether only the hardware clock could not be set, or nothing.
            Err(QemuGaError::Refused { .. }) => by_program = true,
            Err(error) => return Err(error),
        }
        forward = Some(forward.unwrap_or(lag));
    }
    Ok(forward)
}

/// Command that sets the clock of a guest without a program for its hardware clock, without which qemu-ga
/// sets none.
fn date(time: Duration) -> [String; 4] {
    let time = format!("@{}.{:09}", time.as_secs(), time.subsec_nanos());
    ["date".to_owned(), "-u".to_owned(), "-s".to_owned(), time]
}

/// Lag of the guest's wall clock, and how long the question took.
fn lag_of(session: &mut QemuGaSession<'_>) -> Result<(Duration, Duration), QemuGaError> {
    let (asked, begun) = (since_1970(), Instant::now());
    let guest = session.time()?;
    let round_trip = begun.elapsed();
    let guest = Duration::from_nanos(u64::try_from(guest).unwrap_or(0));
    Ok(((asked + round_trip / 2).saturating_sub(guest), round_trip))
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
