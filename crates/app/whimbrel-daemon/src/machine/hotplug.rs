//! Disks and network ports that a machine gets, or loses, while it runs, and media of its CD-ROM drives.
//!
//! The record has a device from before the machine gets it until after it has lost it. A daemon that starts
//! adds what a machine lacks of its record, so a crash in between adds the device, or leaves it. Media are
//! changed again then.

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
use whimbrel_vm::{Failpoint, Medium, RunningMachine, StoppedDisk};

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
        if change.eject {
            self.change_media(turn, wanted)?;
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

    /// Puts the media that `wanted` has into the CD-ROM drives.
    fn change_media(&self, turn: &mut MachineLock<'_>, wanted: &Record) -> Result<(), DaemonError> {
        let (record, running) = turn.parts()?;
        (record.config.disks, record.bases) = (wanted.config.disks.clone(), wanted.bases.clone());
        record.changes_media = true;
        let saved = record.save(&self.directories);
        Failpoint::Device.reached();
        let changed = saved.and_then(|()| Ok(running.change_media(media_of(record), false)?));
        record.changes_media = false;
        self.record_devices(turn).and(changed)
    }

    /// Makes the overlays of media that an earlier daemon was putting into drives when it died.
    pub(super) fn prepare_media(&self, record: &Record) {
        let dirs = self.directories.machine_dirs(&record.name);
        let first = count_without_media(&record.config);
        let made = media_of(record).into_iter().enumerate().try_for_each(|(drive, (disk, base))| {
            StoppedDisk::create((&dirs, &self.store), (first + drive, disk.size.0), &base)
        });
        made.unwrap_or_else(|error| not_changed(record, &error));
    }

    /// Changes the media again that an earlier daemon was changing when it died.
    pub(super) fn finish_media(&self, record: &mut Record, running: Option<&mut RunningMachine>) {
        record.changes_media = false;
        let changed = running.map_or(Ok(()), |running| {
            let changed = running.change_media(media_of(record), true);
            (record.config, record.bases) = (running.config().clone(), running.disk_bases().to_vec());
            changed
        });
        let saved = record.save(&self.directories);
        let done = changed.map_err(DaemonError::from).and(saved);
        done.unwrap_or_else(|error| not_changed(record, &error));
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

fn not_changed(record: &Record, error: &(dyn std::error::Error + 'static)) {
    tracing::error!(machine = %record.name, error, "could not finish a change of its CD-ROMs");
}

fn media_of(record: &Record) -> Vec<Medium> {
    let first = count_without_media(&record.config);
    let disks = record.config.disks.iter().cloned();
    disks.zip(record.bases.iter().cloned()).skip(first).collect()
}

/// Refuses a change that no running machine takes, with the reason.
fn check(config: &MachineConfig, change: &HardwareChange) -> Result<(), String> {
    let devices = HardwareChange {
        add_disks: change.add_disks.clone(),
        remove_disk: change.remove_disk,
        add_nics: change.add_nics.clone(),
        remove_nics: change.remove_nics.clone(),
        eject: change.eject,
        add_cdroms: change.add_cdroms.clone(),
        ..HardwareChange::default()
    };
    if *change != devices {
        return Err(
            "only disks, network ports and media of CD-ROM drives come and go while it runs".to_owned()
        );
    }
    check_media(config, change)?;
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

/// Refuses media unless each drive gets another one.
fn check_media(config: &MachineConfig, change: &HardwareChange) -> Result<(), String> {
    let (drives, media) = (config.cdroms.disks.len(), change.add_cdroms.len());
    match (change.eject, drives == media) {
        (false, _) if media == 0 => Ok(()),
        (false, _) if drives > 0 => Err("its drives have media: add --eject to take those out".to_owned()),
        (false, _) => Err("it has no CD-ROM drive".to_owned()),
        (true, true) if change.add_disks.is_empty() && change.remove_disk.is_none() => Ok(()),
        (true, true) => Err("its last disks are the media of its CD-ROM drives".to_owned()),
        (true, false) => Err(format!(
            "its drives stay while it runs, and each gets another medium: it has {drives}, and {media} of --cdrom"
        )),
    }
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
