//! Disks and network ports that a machine gets, or loses, while it runs: always the last ones, so that all
//! others keep their numbers.
//!
//! A failure leaves the machine as it was. If this process dies in between, the machine lacks a device that
//! its record has, and [`RunningMachine::adopt`] adds it.

use super::{
    DiskBase, MachineSetup, NetworkPort, Overlay, PortTarget, RunningDisk, RunningError, RunningMachine,
};
use std::os::fd::AsFd;
use whimbrel_capture::DirtyLog;
use whimbrel_core::{DiskConfig, Firmware, HotplugBridge, MachineConfig, NicConfig};
use whimbrel_net::{GuestNetwork, PortFilter};
use whimbrel_qemu::Qemu;

impl RunningMachine {
    /// Hardware of the machine as it is now.
    pub fn config(&self) -> &MachineConfig {
        &self.setup.config
    }

    /// Base of each of its disks.
    pub fn disk_bases(&self) -> &[DiskBase] {
        &self.setup.bases
    }

    /// What keeps devices from coming and going now; none if they can.
    pub fn hotplug_obstacle(&self) -> Option<&'static str> {
        let MachineConfig { firmware, hotplug, .. } = &self.setup.config;
        let obstacles = [
            (*firmware == Firmware::Micro, "a micro machine has no place for more devices"),
            (hotplug.is_none(), "it was started by an earlier version of Whimbrel"),
            (self.paused, "it is paused, so that its guest takes no notice"),
            (!self.is_complete(), "pages of it are still on another host"),
            (self.away.is_some(), "its network is on another host"),
        ];
        obstacles.into_iter().find_map(|(is_so, what)| is_so.then_some(what))
    }

    /// Adds a disk after those that it has. Its overlay exists.
    pub fn add_disk(&mut self, disk: DiskConfig, base: DiskBase) -> Result<(), RunningError> {
        let MachineSetup { config, bases, .. } = &mut self.setup;
        let index = config.disks.len();
        config.hotplug.get_or_insert_default().disks.push(index as u32);
        config.disks.push(disk);
        bases.push(base);
        self.serve_added_disk(index).inspect_err(|_| self.forget_disk(index))
    }

    fn serve_added_disk(&mut self, index: usize) -> Result<(), RunningError> {
        let disk = self.open_added_disk(index, Overlay::Existing)?;
        let added = self.qemu.add_disk(&self.setup.config, index);
        added.map_err(|source| RunningError::qemu("add a disk", source))?;
        self.keep_added_disk(disk);
        Ok(())
    }

    /// Opens disk `index`, which comes after those that the machine has, and serves it.
    pub(super) fn open_added_disk(
        &mut self,
        index: usize,
        overlay: Overlay,
    ) -> Result<RunningDisk, RunningError> {
        self.runtime_dir.add_disk(self.setup.config.disks[index].size)?;
        // Nothing of a disk that is new is on another host.
        let fetcher = self.setup.fetcher.take();
        let opened = RunningDisk::open(&self.setup, &self.stall, index, overlay, &self.runtime_dir);
        self.setup.fetcher = fetcher;
        opened
    }

    pub(super) fn keep_added_disk(&mut self, disk: RunningDisk) {
        self.dirty_logs.push(DirtyLog::new(disk.pages()));
        self.disks.push(disk);
    }

    /// Removes its last disk, which was added while it ran. The overlay stays.
    pub fn remove_disk(&mut self) -> Result<(), RunningError> {
        let Some(index) = self.disks.len().checked_sub(1) else { return Ok(()) };
        let removed = self.qemu.remove_disk(index);
        removed.map_err(|source| RunningError::qemu("take a disk away", source))?;
        self.forget_disk(index);
        Ok(())
    }

    pub(super) fn forget_disk(&mut self, index: usize) {
        let MachineSetup { config, bases, .. } = &mut self.setup;
        config.disks.truncate(index);
        bases.truncate(index);
        config.hotplug.iter_mut().for_each(|bridge| bridge.disks.retain(|disk| *disk as usize != index));
        // Memory is the first array.
        self.dirty_logs.truncate(index + 1);
        self.disks.truncate(index);
        self.bases.remove(&format!("disk{index}"));
        self.runtime_dir.remove_disks_from(index);
    }

    /// Adds a network port after those that it has.
    pub fn add_nic(&mut self, nic: NicConfig, filter: PortFilter) -> Result<(), RunningError> {
        let MachineSetup { config, port_filters, .. } = &mut self.setup;
        let index = config.nics.len();
        config.hotplug.get_or_insert_default().nics.push(index as u32);
        config.nics.push(nic);
        port_filters.truncate(index);
        port_filters.push(filter);
        self.connect_added_nic(index, filter).inspect_err(|_| {
            self.qemu.forget_nic(index);
            self.forget_nic(index);
        })
    }

    /// Connects the port before the guest gets it: a bridge that does not exist is noticed then.
    fn connect_added_nic(&mut self, index: usize, filter: PortFilter) -> Result<(), RunningError> {
        add_tap(&self.qemu, index)?;
        let nic = &self.setup.config.nics[index];
        let place = (&self.runtime_dir, &self.qemu);
        let port = NetworkPort::connect(place, index, nic, PortTarget::Bridge, filter)?;
        let added = self.qemu.add_nic(&self.setup.config, index);
        added.map_err(|source| RunningError::qemu("add a network port", source))?;
        port.open();
        self.ports.push(port);
        Ok(())
    }

    /// Removes its last network port, which was added while it ran.
    pub fn remove_nic(&mut self) -> Result<(), RunningError> {
        let Some(index) = self.ports.len().checked_sub(1) else { return Ok(()) };
        let removed = self.qemu.remove_nic(index);
        removed.map_err(|source| RunningError::qemu("take a network port away", source))?;
        self.forget_nic(index);
        Ok(())
    }

    fn forget_nic(&mut self, index: usize) {
        let MachineSetup { config, port_filters, .. } = &mut self.setup;
        config.nics.truncate(index);
        port_filters.truncate(index);
        config.hotplug.iter_mut().for_each(|bridge| bridge.remove_nic(index));
        self.ports.truncate(index);
    }
}

/// Adds the devices of the record that a QEMU lacks: the process that was adding them has died.
pub(super) fn add_missing(config: &MachineConfig, qemu: &Qemu) -> Result<(), RunningError> {
    let Some(HotplugBridge { disks, nics }) = &config.hotplug else { return Ok(()) };
    if disks.is_empty() && nics.is_empty() {
        return Ok(());
    }
    let present = qemu.devices().map_err(|source| RunningError::qemu("list its devices", source))?;
    for index in disks.iter().filter(|index| !present.contains(&format!("disk{index}"))) {
        let added = qemu.add_disk(config, *index as usize);
        added.map_err(|source| RunningError::qemu("add a disk", source))?;
    }
    for index in nics.iter().filter(|index| !present.contains(&format!("nic{index}"))) {
        add_tap(qemu, *index as usize)?;
        let added = qemu.add_nic(config, *index as usize);
        added.map_err(|source| RunningError::qemu("add a network port", source))?;
    }
    Ok(())
}

/// Gives a QEMU one more tap device, in the network that it is in.
fn add_tap(qemu: &Qemu, index: usize) -> Result<(), RunningError> {
    let failed = |source| RunningError::Port { port: format!("net{index}"), source: Box::new(source) };
    qemu.forget_nic(index);
    let network = qemu.network().map_err(|source| RunningError::qemu("find its network", source))?;
    let tap = GuestNetwork::add_tap(network.as_fd(), index).map_err(failed)?;
    let added = qemu.add_tap(index, tap.as_fd());
    added.map_err(|source| RunningError::qemu("add a network port", source))
}
