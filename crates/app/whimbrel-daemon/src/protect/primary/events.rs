//! Events of a protected machine's QEMU: which of them end its epochs, and how.

use std::{
    sync::mpsc::{Receiver, TryRecvError},
    time::{Duration, Instant},
};
use whimbrel_qemu::{MachineEvent, ShutdownCause};

/// How long disk errors may repeat. A pause between two of them that is as long starts anew.
const DISK_PATIENCE: Duration = Duration::from_secs(2);

/// What the events of a QEMU come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QemuVerdict {
    /// The guest has switched itself off.
    SwitchedOff,
    /// QEMU has ended, or something on this host has ended it: the guest did not want that.
    Gone,
    /// A disk fails again and again, and the machine cannot go on here.
    DiskFails,
}

/// Reader of the events of one QEMU.
pub(super) struct QemuEvents {
    events: Receiver<MachineEvent>,
    /// First and last disk error of a series.
    errors: Option<(Instant, Instant)>,
}

impl QemuEvents {
    pub(super) fn new(events: Receiver<MachineEvent>) -> Self {
        Self { events, errors: None }
    }

    /// Reads the events until `now`.
    pub(super) fn poll(&mut self, now: Instant) -> Option<QemuVerdict> {
        loop {
            match self.events.try_recv() {
                Ok(MachineEvent::Shutdown(ShutdownCause::Guest(_))) => return Some(QemuVerdict::SwitchedOff),
                Ok(MachineEvent::Shutdown(ShutdownCause::Host(_)) | MachineEvent::Disconnected)
                | Err(TryRecvError::Disconnected) => return Some(QemuVerdict::Gone),
                Ok(MachineEvent::BlockIoError { action, .. }) if action == "stop" => {
                    let series = self.errors.filter(|(_, last)| now.duration_since(*last) < DISK_PATIENCE);
                    let first = series.map_or(now, |(first, _)| first);
                    self.errors = Some((first, now));
                    if now.duration_since(first) >= DISK_PATIENCE {
                        return Some(QemuVerdict::DiskFails);
                    }
                }
                Ok(_) => {}
                Err(TryRecvError::Empty) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn verdict(event: MachineEvent) -> Option<QemuVerdict> {
        let (sender, events) = mpsc::channel();
        sender.send(event).unwrap();
        QemuEvents::new(events).poll(Instant::now())
    }

    #[test]
    fn only_a_guest_switches_its_machine_off() {
        let guest = ShutdownCause::Guest("guest-shutdown".into());
        assert_eq!(verdict(MachineEvent::Shutdown(guest)), Some(QemuVerdict::SwitchedOff));
        for reason in ["host-signal", "host-qmp-quit"] {
            let host = ShutdownCause::Host(reason.into());
            assert_eq!(verdict(MachineEvent::Shutdown(host)), Some(QemuVerdict::Gone), "{reason}");
        }
        assert_eq!(verdict(MachineEvent::Disconnected), Some(QemuVerdict::Gone));
    }

    #[test]
    fn a_disk_that_keeps_failing_is_given_up_and_one_that_failed_now_and_then_is_not() {
        let (sender, events) = mpsc::channel();
        let (mut events, begun) = (QemuEvents::new(events), Instant::now());
        let mut fails = |at_ms: u64, action: &str| {
            let [device, operation, reason] = ["disk0", "write", "no space"].map(str::to_owned);
            let action = action.to_owned();
            sender.send(MachineEvent::BlockIoError { device, operation, action, reason }).unwrap();
            events.poll(begun + Duration::from_millis(at_ms))
        };
        assert_eq!([0, 1900, 4000, 5900].map(|at| fails(at, "stop")), [None; 4], "it went on in between");
        assert_eq!(fails(5950, "report"), None, "the guest was told");
        assert_eq!(fails(6000, "stop"), Some(QemuVerdict::DiskFails));
    }
}
