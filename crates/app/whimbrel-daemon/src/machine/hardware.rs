//! Other hardware for a machine: memory, CPUs, a screen, more disks, CD-ROM drives, network ports. One that
//! runs gets and loses disks and network ports alone ([`super::hotplug`]).
//!
//! No device state of a machine that is off is lost, since there is none: the next start boots it with what
//! it has then. Disks keep their places, so that overlays and capsules go on with them; new ones come after
//! them, empty, and those that become larger have zeros at their end. Media of CD-ROM drives come last, and
//! disks are added only while there are none.

use crate::{
    core::error::DaemonError,
    daemon::{Daemon, nic_of},
    machine::{
        entry::MachineLock,
        firmware::has_display,
        hotplug,
        new_disks::{self, DISK_MAX, NewDisks, check_count, empty_disk, set_boot_order},
        record::{Phase, Record},
    },
    network::tunnel::home::mac_of,
};
use std::{collections::BTreeSet, sync::Arc};
use whimbrel_api::{BootOrder, DiskSize, HardwareChange, MachineSettings};
use whimbrel_core::{ByteSize, CdromDrives, MachineConfig};
use whimbrel_qemu::{MAX_NICS, guest_disks};
use whimbrel_vm::StoppedDisk;

const MEMORY_STEP: u64 = 1 << 20;
const CPUS_MAX: u32 = 256;

/// Sets the memory and the CPUs of a machine that is to boot, where there is a wish. Refused if no machine
/// can have so much or so little.
pub(crate) fn set_size(
    config: &mut MachineConfig,
    memory: Option<ByteSize>,
    cpus: Option<u32>,
) -> Result<(), DaemonError> {
    if let Some(ByteSize(bytes)) = memory {
        if bytes == 0 || bytes % MEMORY_STEP != 0 {
            return Err(DaemonError::invalid("guest memory is a multiple of 1 MiB"));
        }
        config.memory = ByteSize(bytes);
    }
    if let Some(cpus) = cpus {
        if !(1..=CPUS_MAX).contains(&cpus) {
            return Err(DaemonError::invalid(format!("a machine has between 1 and {CPUS_MAX} CPUs")));
        }
        config.cpus = cpus;
    }
    Ok(())
}

impl Daemon {
    /// Gives a machine other hardware, and its record these settings. Refused if it may run on another host.
    pub(crate) fn change_hardware(
        self: &Arc<Self>,
        turn: &mut MachineLock<'_>,
        change: &HardwareChange,
        settings: MachineSettings,
    ) -> Result<(), DaemonError> {
        // All is checked before anything is done.
        let runs = turn.is_here() && turn.running.is_some();
        let mut record = self.with_hardware(&turn.record, change, runs)?;
        record.settings = settings;
        if runs && !change.is_empty() {
            return self.change_running_hardware(turn, change, &record);
        }
        let before = turn.record.config.disks.len();
        let mut fewer = turn.record.clone();
        remove_disks(&mut fewer, change)?;
        let kept = fewer.config.disks.len();
        if kept < before && kept < record.config.disks.len() {
            // Other disks take the places of those that are removed.
            fewer.save(&self.directories)?;
            turn.record = fewer;
        }
        let dirs = self.directories.machine_dirs(&record.name);
        for (index, base) in record.bases.iter().enumerate().skip(kept) {
            let size = record.config.disks[index].size.0;
            StoppedDisk::create((&dirs, &self.store), (index, size), base)?;
        }
        record.save(&self.directories)?;
        turn.record = record;
        (turn.record.config.disks.len()..before).for_each(|index| self.remove_overlay(&turn.record, index));
        Ok(())
    }

    /// The record with other hardware, without overlays of new disks.
    fn with_hardware(
        self: &Arc<Self>,
        record: &Record,
        change: &HardwareChange,
        runs: bool,
    ) -> Result<Record, DaemonError> {
        let mut record = record.clone();
        if change.is_empty() {
            return Ok(record);
        }
        if !runs && !matches!(record.phase, Phase::Stopped | Phase::Crashed { .. }) {
            let (name, state) = (record.name.clone(), record.phase.name());
            return Err(DaemonError::State { name, state, needed: "stopped to change its hardware" });
        }
        let config = &mut record.config;
        set_size(config, change.memory, change.cpus)?;
        if let Some(model) = &change.cpu {
            config.cpu = self.cpu_model(model, config.accel)?;
        }
        if let Some(wanted) = change.display {
            config.display = has_display(&config.firmware, wanted)?;
        }
        config.devices = change.devices.unwrap_or(config.devices);
        change_nics(config, change)?;
        if change.memory.is_some() {
            // What the balloon had taken was of the memory before.
            (record.ballooned, record.squeezed_from) = (None, None);
        }
        change_disks(&mut record, change)?;
        Ok(record)
    }
}

fn change_disks(record: &mut Record, change: &HardwareChange) -> Result<(), DaemonError> {
    remove_disks(record, change)?;
    change.disk_sizes.iter().try_for_each(|wanted| grow_disk(record, *wanted))?;
    let old = record.config.disks.len();
    let mut new = NewDisks::of(&[], &change.add_disks)?;
    let cdroms = &mut record.config.cdroms;
    if !new.disks.is_empty() && !cdroms.disks.is_empty() {
        let reason = "the places after its disks are those of its CD-ROM drives: add --eject";
        return Err(DaemonError::invalid(reason));
    }
    let media = new.push_cdroms(&change.add_cdroms, BootOrder::Disk)?;
    cdroms.disks.extend(media.disks.iter().map(|index| index + old as u32));
    change.boot_order.map_or(Ok(()), |order| set_boot_order(cdroms, order))?;
    record.config.disks.extend(new.disks);
    record.bases.extend(new.bases);
    new_disks::check(&record.config)
}

/// Makes a disk larger. The overlay grows when it is opened next, so that the record alone decides.
fn grow_disk(record: &mut Record, wanted: DiskSize) -> Result<(), DaemonError> {
    let (index, config) = (wanted.disk as usize, &mut record.config);
    let is_own = guest_disks(config).any(|disk| disk == index) && !config.cdroms.has(index);
    let (Some(base), true) = (record.bases.get_mut(index), is_own) else {
        return Err(DaemonError::invalid(format!("it has no disk {index} that could become larger")));
    };
    let now = config.disks[index].size;
    let size = empty_disk(&wanted.size)?.0.size;
    if size < now {
        let reason =
            format!("disk {index} has {now}: it can become larger, up to {DISK_MAX}, and not smaller");
        return Err(DaemonError::invalid(reason));
    }
    if size > now {
        *base = base.clone().of_larger_disk(now.0);
        config.disks[index].size = size;
    }
    Ok(())
}

fn remove_disks(record: &mut Record, change: &HardwareChange) -> Result<(), DaemonError> {
    if change.eject {
        eject(record);
    }
    change.remove_disk.map_or(Ok(()), |index| hotplug::remove_disk(record, index))
}

/// Takes away the CD-ROM drives. Their media are the last disks.
fn eject(record: &mut Record) {
    let len = new_disks::count_without_media(&record.config);
    record.config.cdroms = CdromDrives::default();
    record.config.disks.truncate(len);
    record.bases.truncate(len);
}

fn change_nics(config: &mut MachineConfig, change: &HardwareChange) -> Result<(), DaemonError> {
    for gone in &change.remove_nics {
        let Some(index) = config.nics.iter().position(|nic| nic.mac.eq_ignore_ascii_case(gone)) else {
            let reason =
                format!("it has no network port with the address {gone}: `whimbrel inspect` lists them");
            return Err(DaemonError::invalid(reason));
        };
        config.nics.remove(index);
        config.hotplug.iter_mut().for_each(|bridge| bridge.remove_nic(index));
    }
    for nic in change.add_nics.iter().map(nic_of) {
        // A machine with another one could not be started.
        if mac_of(&nic.mac).is_none() {
            return Err(DaemonError::invalid(format!("{:?} is no hardware address", nic.mac)));
        }
        config.nics.push(nic);
    }
    check_count("network ports", config.nics.len(), MAX_NICS)?;
    let addresses: BTreeSet<_> = config.nics.iter().map(|nic| nic.mac.to_ascii_lowercase()).collect();
    match addresses.len() == config.nics.len() {
        true => Ok(()),
        false => Err(DaemonError::invalid("two network ports of a machine cannot have the same address")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_api::NicRequest;

    fn config(macs: &[&str]) -> MachineConfig {
        let nic = |mac: &&str| nic_of(&NicRequest { mac: Some((*mac).to_owned()), bridge: None });
        MachineConfig { nics: macs.iter().map(nic).collect(), ..MachineConfig::minimal(ByteSize(1 << 20)) }
    }

    #[test]
    fn ports_are_removed_by_their_addresses_and_no_two_have_one() {
        let mut both = config(&["52:54:00:00:00:01", "52:54:00:00:00:0A"]);
        let change = |remove: &str, add: Option<&str>| HardwareChange {
            remove_nics: vec![remove.to_owned()],
            add_nics: add
                .map(|mac| NicRequest { mac: Some(mac.to_owned()), bridge: None })
                .into_iter()
                .collect(),
            ..HardwareChange::default()
        };
        change_nics(&mut both, &change("52:54:00:00:00:0a", None)).unwrap();
        assert_eq!(both, config(&["52:54:00:00:00:01"]));
        assert!(change_nics(&mut both.clone(), &change("52:54:00:00:00:0a", None)).is_err());
        let added = HardwareChange { remove_nics: vec![], ..change("", Some("52:54:00:00:00:01")) };
        assert!(change_nics(&mut both.clone(), &added).is_err(), "an address that it has");
        let wrong = HardwareChange { remove_nics: vec![], ..change("", Some("52:54:00")) };
        assert!(change_nics(&mut both, &wrong).is_err(), "no address");
    }

    #[test]
    fn a_disk_of_the_guest_becomes_larger_and_nothing_else_does() {
        use crate::machine::record::DiskBase;
        use whimbrel_core::{Digest, DiskConfig};
        let disks = vec![DiskConfig { size: ByteSize(8192) }; 3];
        let cdroms = CdromDrives { disks: vec![2], first: false };
        let config = MachineConfig { disks, cdroms, tpm: Some(1), ..config(&[]) };
        let bases = vec![DiskBase::image(Digest([1; 32]), None), DiskBase::Blank, DiskBase::Blank];
        let mut record = Record::new("web".parse().unwrap(), config, bases);
        let grow =
            |record: &mut Record, disk, size| grow_disk(record, DiskSize { disk, size: ByteSize(size) });
        for (disk, size) in
            [(0, 8191 - 4096), (0, DISK_MAX.0 + 1), (0, 0), (1, 16384), (2, 16384), (3, 16384)]
        {
            assert!(grow(&mut record, disk, size).is_err(), "{disk} {size}");
        }
        grow(&mut record, 0, 8192).unwrap();
        assert!(record.bases[0].whole_image().is_some(), "it has that size already");
        grow(&mut record, 0, 12000).unwrap();
        grow(&mut record, 0, 1 << 20).unwrap();
        assert_eq!(record.config.disks[0].size, ByteSize(1 << 20));
        assert!(matches!(record.bases[0], DiskBase::Image { size: Some(8192), .. }));
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        let mut machine = config(&[]);
        set_size(&mut machine, Some(ByteSize(2 << 20)), Some(4)).unwrap();
        assert_eq!((machine.memory, machine.cpus), (ByteSize(2 << 20), 4));
        for (memory, cpus) in [(Some(0), None), (Some(4096), None), (None, Some(0)), (None, Some(257))] {
            assert!(set_size(&mut machine, memory.map(ByteSize), cpus).is_err(), "{memory:?} {cpus:?}");
        }
    }
}
