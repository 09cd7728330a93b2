//! Disks and network ports that a machine gets, or loses, while it runs.
//!
//! The record has a device from before the machine gets it until after it has lost it. A daemon that starts
//! adds what a machine lacks of its record, so a crash in between adds the device, or leaves it.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::MachineLock,
        new_disks::{count_without_media, empty_disk},
        record::Record,
    },
};
use whimbrel_api::HardwareChange;
use whimbrel_core::{ByteSize, DeviceModel, Firmware, HotplugBridge, MachineConfig, NicConfig};
use whimbrel_vm::{Failpoint, StoppedDisk};

/// Bridge of a machine that boots with this firmware. The loader of micro machines knows no bridges.
pub(crate) fn bridge_of(firmware: &Firmware) -> Option<HotplugBridge> {
    (*firmware != Firmware::Micro).then(HotplugBridge::default)
}

impl Daemon {
    /// Gives a running machine disks and network ports, or takes them away, as `wanted` has them: the record
    /// after the change, which was checked as that of a machine that is off.
    pub(crate) fn change_running_hardware(
        &self,
        turn: &mut MachineLock<'_>,
        change: &HardwareChange,
        wanted: &Record,
    ) -> Result<(), DaemonError> {
        let name = turn.record.name.clone();
        let refuse = |why: &str| Err(DaemonError::invalid(format!("{name} must be stopped for this: {why}")));
        if let Err(why) = check(&turn.record.config, change) {
            return refuse(&why);
        }
        if let Some(why) = turn.running()?.hotplug_obstacle() {
            return refuse(why);
        }
        for _ in &change.remove_nics {
            turn.running()?.remove_nic()?;
            self.record_devices(turn)?;
        }
        if change.remove_disk.is_some() {
            turn.running()?.remove_disk()?;
            self.record_devices(turn)?;
            self.remove_overlay(&turn.record, turn.record.config.disks.len());
        }
        for nic in &wanted.config.nics[turn.record.config.nics.len()..] {
            self.add_nic(turn, nic)?;
        }
        for size in &change.add_disks {
            self.add_disk(turn, size)?;
        }
        turn.record.settings = wanted.settings.clone();
        turn.record.save(&self.directories)
    }

    fn add_nic(&self, turn: &mut MachineLock<'_>, nic: &NicConfig) -> Result<(), DaemonError> {
        let filter = self.port_filter(&turn.record.name, nic);
        let (record, running) = turn.parts()?;
        let index = record.config.nics.len() as u32;
        record.config.nics.push(nic.clone());
        record.config.hotplug.get_or_insert_default().nics.push(index);
        let saved = record.save(&self.directories);
        Failpoint::Device.reached();
        let added = saved.and_then(|()| Ok(running.add_nic(nic.clone(), filter)?));
        added.or_else(|error| self.record_devices(turn).and(Err(error)))
    }

    fn add_disk(&self, turn: &mut MachineLock<'_>, size: &ByteSize) -> Result<(), DaemonError> {
        let (disk, base) = empty_disk(size)?;
        let (record, running) = turn.parts()?;
        let index = record.config.disks.len();
        let dirs = self.directories.machine_dirs(&record.name);
        StoppedDisk::create((&dirs, &self.store), (index, disk.size.0), &base)?;
        record.config.disks.push(disk.clone());
        record.config.hotplug.get_or_insert_default().disks.push(index as u32);
        record.bases.push(base.clone());
        let saved = record.save(&self.directories);
        Failpoint::Device.reached();
        let added = saved.and_then(|()| Ok(running.add_disk(disk, base)?));
        added.or_else(|error| {
            self.record_devices(turn)?;
            self.remove_overlay(&turn.record, index);
            Err(error)
        })
    }

    /// Records the devices that the machine has.
    fn record_devices(&self, turn: &mut MachineLock<'_>) -> Result<(), DaemonError> {
        let (record, running) = turn.parts()?;
        record.config = running.config().clone();
        record.bases = running.disk_bases().to_vec();
        record.save(&self.directories)
    }

    /// Removes the overlay of a disk that the machine has no more. One that stays is replaced by that of the
    /// next disk in its place.
    pub(crate) fn remove_overlay(&self, record: &Record, index: usize) {
        let place = self.directories.machine_dirs(&record.name).overlay(&format!("disk{index}"));
        if let Err(error) = place.remove() {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(machine = %record.name, index, error, "could not remove the overlay of a disk");
        }
    }
}

/// Refuses a change that no running machine takes, with the reason.
fn check(config: &MachineConfig, change: &HardwareChange) -> Result<(), String> {
    let devices = HardwareChange {
        add_disks: change.add_disks.clone(),
        remove_disk: change.remove_disk,
        add_nics: change.add_nics.clone(),
        remove_nics: change.remove_nics.clone(),
        ..HardwareChange::default()
    };
    if *change != devices {
        return Err("only disks and network ports come and go while it runs".to_owned());
    }
    if !change.add_disks.is_empty() && config.devices == DeviceModel::Emulated {
        return Err("its disks are SATA disks, which do not come and go".to_owned());
    }
    let bridge = config.hotplug.clone().unwrap_or_default();
    if let Some(index) = change.remove_disk
        && !bridge.has_disk(index as usize)
    {
        return Err(format!("disk {index} was there when it started"));
    }
    for (index, nic) in config.nics.iter().enumerate().rev().take(change.remove_nics.len()) {
        if !change.remove_nics.iter().any(|gone| nic.mac.eq_ignore_ascii_case(gone)) {
            return Err(format!("its last network port is taken away first, {}", nic.mac));
        }
        if !bridge.has_nic(index) {
            return Err(format!("the network port {} was there when it started", nic.mac));
        }
    }
    Ok(())
}

/// Takes the last disk of a machine away, which `index` must be.
pub(crate) fn remove_disk(record: &mut Record, index: u32) -> Result<(), DaemonError> {
    let config = &mut record.config;
    let is_own = whimbrel_qemu::guest_disks(config).any(|disk| disk == index as usize);
    if !is_own
        || count_without_media(config) != config.disks.len()
        || index as usize + 1 != config.disks.len()
    {
        let last = config.disks.len().saturating_sub(1);
        return Err(DaemonError::invalid(match config.cdroms.disks.is_empty() {
            true => format!(
                "only its last disk can be taken away, disk {last}, unless that is the firmware's or the TPM's"
            ),
            false => "its last disks are the media of its CD-ROM drives: add --eject".to_owned(),
        }));
    }
    config.disks.pop();
    config.hotplug.iter_mut().for_each(|bridge| bridge.disks.retain(|disk| *disk != index));
    record.bases.pop();
    Ok(())
}
