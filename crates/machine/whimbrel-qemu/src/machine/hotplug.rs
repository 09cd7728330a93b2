//! Disks and network ports that come and go while the machine runs, on its bridge for that
//! ([`whimbrel_core::HotplugBridge`]).
//!
//! Devices are added in the words of the command line, so that a QEMU that starts with them later has the
//! same machine. Each step is done anew if it was interrupted: what is left of an earlier attempt is removed
//! first.

use super::Qemu;
use crate::{
    launch::devices,
    qmp::{MachineEvent, QmpError},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    os::fd::BorrowedFd,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};
use whimbrel_core::MachineConfig;

/// Time for a guest to let go of a device.
pub(super) const RELEASE: Duration = Duration::from_secs(20);
/// All devices that have an id.
const DEVICES: &str = "/machine/peripheral";

/// Cause of a device that could not be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum HotplugError {
    /// QEMU did not carry out a command.
    #[error("qemu does not do it")]
    Qmp(#[from] QmpError),
    /// QEMU did not make the device.
    #[error("qemu does not add it: {words}")]
    NotAdded {
        /// Words of QEMU.
        words: String,
    },
    /// The guest still uses the device.
    #[error("the guest does not let go of it: is it in use there, or is no system running?")]
    Held,
}

impl Qemu {
    /// Adds disk `index` of the machine, whose NBD server is there already.
    pub fn add_disk(&self, config: &MachineConfig, index: usize) -> Result<(), HotplugError> {
        let added = self.add_nodes(index, false);
        let added = added.and_then(|()| self.add_device(&devices::disk(config, index)));
        added.inspect_err(|_| self.forget_disk(index))
    }

    /// Adds what QEMU reads disk `index` through, in place of what is left of an earlier attempt.
    pub(super) fn add_nodes(&self, index: usize, read_only: bool) -> Result<(), HotplugError> {
        self.forget_disk(index);
        let (disk, nbd) = (format!("disk{index}"), format!("disk{index}-nbd"));
        let server = json!({"type": "unix", "path": self.dir.seen_by_qemu(&disk)});
        let cache = json!({"direct": true});
        let node = |name: &str, driver: &str| {
            json!({
                "node-name": name,
                "driver": driver,
                "cache": cache,
                "discard": "unmap",
                "read-only": read_only,
            })
        };
        let mut outer = node(&nbd, "nbd");
        outer["server"] = server;
        outer["export"] = json!("");
        outer["reconnect-delay"] = json!(devices::RECONNECT_DELAY);
        let mut raw = node(&disk, "raw");
        raw["file"] = json!(nbd);
        [outer, raw].into_iter().try_for_each(|node| {
            self.qmp.execute("blockdev-add", node)?;
            Ok(())
        })
    }

    /// Removes disk `index` from the guest, which lets go of it first.
    ///
    /// # Errors
    /// If the guest does not. It may do so later, and then a second attempt succeeds.
    pub fn remove_disk(&self, index: usize) -> Result<(), HotplugError> {
        self.remove_device(&format!("disk{index}"))?;
        self.forget_disk(index);
        Ok(())
    }

    /// Gives it the tap device of network port `index`, which the machine does not have yet.
    pub fn add_tap(&self, index: usize, tap: BorrowedFd<'_>) -> Result<(), HotplugError> {
        let name = format!("net{index}");
        self.qmp.pass_descriptor(&name, tap)?;
        // The kernel's own server of virtio (vhost) would read guest memory past QEMU.
        let netdev = json!({"type": "tap", "id": name, "fd": name, "vhost": false});
        let added = self.qmp.execute("netdev_add", netdev).map(drop);
        Ok(added.inspect_err(|_| {
            // QEMU has closed it if it took it.
            let _ = self.qmp.execute("closefd", json!({"fdname": name}));
        })?)
    }

    /// Adds network port `index` of the machine, whose tap device is there already.
    pub fn add_nic(&self, config: &MachineConfig, index: usize) -> Result<(), HotplugError> {
        self.add_device(&devices::nic(config, index))
    }

    /// Removes network port `index` from the guest, which lets go of it first.
    ///
    /// # Errors
    /// As those of [`Qemu::remove_disk`].
    pub fn remove_nic(&self, index: usize) -> Result<(), HotplugError> {
        self.remove_device(&format!("nic{index}"))?;
        self.forget_nic(index);
        Ok(())
    }

    /// Ids of the devices that it has: `disk0`, `nic0`, …
    pub fn devices(&self) -> Result<BTreeSet<String>, QmpError> {
        let answer = self.qmp.execute("qom-list", json!({"path": DEVICES}))?;
        let malformed = || QmpError::Malformed { command: "qom-list".into() };
        let is_device = |item: &&Value| item["type"].as_str().is_some_and(|kind| kind.starts_with("child<"));
        let children = answer.as_array().ok_or_else(malformed)?.iter().filter(is_device);
        Ok(children.filter_map(|item| Some(item["name"].as_str()?.to_owned())).collect())
    }

    /// The monitor for people takes the words of the command line; that for programs asks for types of
    /// values, which differ from version to version.
    fn add_device(&self, device: &str) -> Result<(), HotplugError> {
        let answer = self.monitor(&format!("device_add {device}"))?;
        match answer.trim() {
            "" => Ok(()),
            words => Err(HotplugError::NotAdded { words: words.chars().take(200).collect() }),
        }
    }

    fn remove_device(&self, id: &str) -> Result<(), HotplugError> {
        let events = self.events();
        // One that the guest has let go of after an earlier attempt had ended.
        if !self.devices()?.contains(id) {
            return Ok(());
        }
        match self.qmp.execute("device_del", json!({"id": id})) {
            // The earlier attempt is under way still.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if wait_removed(&events, id, Instant::now() + RELEASE) || !self.devices()?.contains(id) {
            return Ok(());
        }
        Err(HotplugError::Held)
    }

    /// Removes what QEMU reads a disk through. There is nothing else to do about a failure: a part that is in
    /// use stays.
    pub(super) fn forget_disk(&self, index: usize) {
        for node in [format!("disk{index}"), format!("disk{index}-nbd")] {
            let _ = self.qmp.execute("blockdev-del", json!({"node-name": node}));
        }
    }

    /// Closes the tap device of network port `index`, which the machine does not have.
    pub fn forget_nic(&self, index: usize) {
        let _ = self.qmp.execute("netdev_del", json!({"id": format!("net{index}")}));
    }
}

/// Whether the guest lets go of device `id` until then.
fn wait_removed(events: &Receiver<MachineEvent>, id: &str, deadline: Instant) -> bool {
    let is_of = |data: &Value| data["device"] == id;
    loop {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(MachineEvent::Other { name, data }) if is_of(&data) && name == "DEVICE_DELETED" => {
                return true;
            }
            Ok(MachineEvent::Other { name, data }) if is_of(&data) && name == "DEVICE_UNPLUG_GUEST_ERROR" => {
                return false;
            }
            Ok(MachineEvent::Disconnected)
            | Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => {
                return false;
            }
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn only_the_end_of_the_device_itself_is_its_end() {
        let (sender, events) = channel();
        let told = |name: &str, data| {
            sender.send(MachineEvent::Other { name: name.into(), data }).expect("a receiver");
        };
        let wait = || wait_removed(&events, "disk1", Instant::now() + Duration::from_millis(20));
        told("DEVICE_DELETED", json!({"path": "/machine/peripheral/disk1/virtio-backend"}));
        told("DEVICE_DELETED", json!({"device": "disk10"}));
        assert!(!wait());
        told("DEVICE_DELETED", json!({"device": "disk1"}));
        assert!(wait());
        told("DEVICE_UNPLUG_GUEST_ERROR", json!({"device": "disk1"}));
        told("DEVICE_DELETED", json!({"device": "disk1"}));
        assert!(!wait());
    }
}
