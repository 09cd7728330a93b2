//! Frozen file systems of a guest, which are thawed whatever happens.

use super::spawn_for_guest;
use std::{
    thread,
    time::{Duration, Instant},
};
use whimbrel_qemu::{QemuGa, QemuGaError};

/// Time for the guest to write what it has in its caches.
const FREEZE: Duration = Duration::from_secs(20);
const THAW: Duration = Duration::from_secs(5);
/// Time after which a guest that does not answer is given up. Whoever starts or adopts the machine next tries
/// again.
const GIVE_UP: Duration = Duration::from_secs(120);

/// File systems of a guest that are frozen, or perhaps are after a failure. Dropping this thaws them.
#[derive(Debug)]
pub(super) struct FrozenGuest {
    ga: QemuGa,
}

impl FrozenGuest {
    /// Freezes all file systems of the guest. After a failure none is frozen, or will be thawed soon.
    pub(super) fn freeze(ga: &QemuGa) -> Result<Self, QemuGaError> {
        let mut session = ga.session(THAW)?;
        // An answer that comes too late has frozen them.
        let frozen = Self { ga: ga.clone() };
        let done = session.freeze(FREEZE);
        // A thaw waits for the port.
        drop(session);
        done.map(|_| frozen)
    }
}

impl Drop for FrozenGuest {
    fn drop(&mut self) {
        if self.ga.session(THAW).and_then(|mut session| session.thaw()).is_ok() {
            return;
        }
        let ga = self.ga.clone();
        spawn_for_guest("guest-thaw", move || {
            let deadline = Instant::now() + GIVE_UP;
            while Instant::now() < deadline {
                match ga.session(THAW).and_then(|mut session| session.thaw()) {
                    Ok(_) | Err(QemuGaError::Port(_)) => return,
                    Err(error) => tracing::warn!(%error, "a guest does not thaw its file systems yet"),
                }
                thread::sleep(Duration::from_millis(500));
            }
            tracing::error!("a guest has not thawed its file systems");
        });
    }
}
