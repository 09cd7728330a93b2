//! Stall watch of the primary: yields a machine whose QEMU or disk hangs.
//!
//! The protection thread waits for QEMU and for the disks, and may wait for ever. This thread asks neither:
//! when the capture of an epoch takes too long it yields the machine, which closes its gates and ends
//! heartbeats and renewals. The standby takes over when it is told, or by the witness if a disk that hangs
//! prevents the record that must come first. The QEMU here is killed only then, so that the protection thread
//! goes on.

use super::{handle::ProtectionHandle, heartbeat::Heartbeat};
use crate::{
    daemon::Daemon,
    protect::takeover::ownership::{self, Ownership},
};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use whimbrel_protect::clock::BootTime;
use whimbrel_qemu::{ProcessIdentity, QemuProcess};

/// Interval at which the progress is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A watch over one QEMU; dropping it ends the watch.
pub(super) struct StallWatch(Arc<AtomicBool>);

impl StallWatch {
    /// Watches `process`, whose output is in the file `log`.
    pub(super) fn start(
        host: &Arc<Daemon>,
        guard: &Arc<ProtectionHandle>,
        beats: &Arc<Heartbeat>,
        (process, log): (ProcessIdentity, PathBuf),
    ) -> std::io::Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let (watch, host, guard, beats) = (Self(over.clone()), host.clone(), guard.clone(), beats.clone());
        let work = move || {
            while !beats.is_stalled(BootTime::now()) {
                if over.load(Ordering::Acquire) || !host.sleep_unless_closing(POLL_INTERVAL) {
                    return;
                }
            }
            tracing::error!(machine = %guard.name, to = %beats.standby.to(), "QEMU or a disk does not answer: yielding the machine to its standby");
            if ownership::yield_to_standby(&host, &guard, &beats, None) == Ownership::Gone {
                QemuProcess::adopt(process, &log).into_iter().for_each(|qemu| qemu.kill());
            }
        };
        std::thread::Builder::new().name("stall-watch".into()).spawn(work)?;
        Ok(watch)
    }
}

impl Drop for StallWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
