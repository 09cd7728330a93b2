//! Disks of a machine that is about to be made, or gets more of them. Their order is: those of its user, the
//! variables of UEFI, the state of a TPM, the seed of cloud-init, and media of CD-ROM drives, which come last
//! so that they can be taken out.

use crate::{capsule::disk_image::check_raw, core::error::DaemonError, machine::record::DiskBase};
use std::{fs, path::PathBuf};
use whimbrel_api::{BootOrder, DiskSource};
use whimbrel_core::{ByteSize, CdromDrives, DiskConfig, Firmware, MachineConfig, PAGE_SIZE};
use whimbrel_qemu::{MAX_DISKS, MAX_SATA, sata_disks};

/// Largest disk: far above what a store holds, and far below what overflows.
pub(crate) const DISK_MAX: ByteSize = ByteSize(64 << 40);

/// A disk, and what lies beneath it.
pub(crate) type NewDisk = (DiskConfig, DiskBase);

/// Disks, and what lies beneath each.
#[derive(Default)]
pub(crate) struct NewDisks {
    pub(crate) disks: Vec<DiskConfig>,
    pub(crate) bases: Vec<DiskBase>,
}

impl NewDisks {
    /// Disks of the user: files, then empty ones.
    pub(crate) fn of(files: &[DiskSource], empty: &[ByteSize]) -> Result<Self, DaemonError> {
        let mut disks = Self::default();
        for disk in files.iter().map(disk_of).chain(empty.iter().map(empty_disk)) {
            disks.push(disk?);
        }
        Ok(disks)
    }

    /// Adds a disk; returns its index.
    pub(crate) fn push(&mut self, (disk, base): NewDisk) -> u32 {
        self.disks.push(disk);
        self.bases.push(base);
        self.disks.len() as u32 - 1
    }

    /// Adds media of CD-ROM drives.
    pub(crate) fn push_cdroms(
        &mut self,
        media: &[PathBuf],
        order: BootOrder,
    ) -> Result<CdromDrives, DaemonError> {
        let mut drives = CdromDrives::default();
        for path in media {
            let source = DiskSource { path: path.clone(), size: None };
            drives.disks.push(self.push(disk_of(&source)?));
        }
        set_boot_order(&mut drives, order)?;
        Ok(drives)
    }
}

/// Number of the disks of a machine before the media of its CD-ROM drives.
pub(crate) fn count_without_media(config: &MachineConfig) -> usize {
    let media = (0..config.disks.len()).rev().take_while(|index| config.cdroms.has(*index));
    config.disks.len() - media.count()
}

/// Sets the order in which a machine with these drives tries what it can boot from.
pub(crate) fn set_boot_order(drives: &mut CdromDrives, order: BootOrder) -> Result<(), DaemonError> {
    drives.first = order == BootOrder::Cdrom;
    match drives.first && drives.disks.is_empty() {
        true => Err(DaemonError::invalid("it has no CD-ROM drive to boot from: add --cdrom FILE")),
        false => Ok(()),
    }
}

/// Refuses a machine with more disks than its controllers have room for, or with drives that its firmware
/// does not know.
pub(crate) fn check(config: &MachineConfig) -> Result<(), DaemonError> {
    check_count("disks", config.disks.len(), MAX_DISKS)?;
    let sata = sata_disks(config).count();
    check_count("CD-ROM drives and SATA disks", sata, MAX_SATA)?;
    match sata > 0 && config.firmware == Firmware::Micro {
        true => Err(DaemonError::invalid(
            "a micro machine has neither CD-ROM drives nor SATA disks: choose another profile",
        )),
        false => Ok(()),
    }
}

/// Refuses more parts than a machine has room for.
pub(crate) fn check_count(what: &str, count: usize, max: usize) -> Result<(), DaemonError> {
    match count <= max {
        true => Ok(()),
        false => Err(DaemonError::invalid(format!("a machine has up to {max} {what}"))),
    }
}

/// An empty disk of at least this size.
pub(crate) fn empty_disk(size: &ByteSize) -> Result<NewDisk, DaemonError> {
    match size.0.checked_next_multiple_of(PAGE_SIZE as u64) {
        Some(bytes) if bytes > 0 && bytes <= DISK_MAX.0 => {
            Ok((DiskConfig { size: ByteSize(bytes) }, DiskBase::Blank))
        }
        _ => Err(DaemonError::invalid(format!("a disk has up to {DISK_MAX}, and not {size}"))),
    }
}

fn disk_of(source: &DiskSource) -> Result<NewDisk, DaemonError> {
    let meta = fs::metadata(&source.path).map_err(|error| DaemonError::io("open", &source.path, error))?;
    if !meta.is_file() {
        return Err(DaemonError::invalid(format!("{} is not a file", source.path.display())));
    }
    check_raw(&source.path)?;
    let size = source.size.map_or(meta.len(), |size| size.0.max(meta.len()));
    let size = ByteSize(size.next_multiple_of(PAGE_SIZE as u64));
    if size.0 == 0 {
        return Err(DaemonError::invalid(format!(
            "{} is empty; specify the size of the disk",
            source.path.display()
        )));
    }
    Ok((DiskConfig { size }, DiskBase::File { path: source.path.clone() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::DeviceModel;

    #[test]
    fn media_come_after_disks_and_are_booted_first_only_where_there_are_any() {
        let folder = tempfile::tempdir().unwrap();
        let medium = folder.path().join("install.iso");
        fs::write(&medium, vec![1; 2048]).unwrap();
        let mut disks = NewDisks::of(&[], &[ByteSize(5000)]).unwrap();
        let drives = disks.push_cdroms(&[medium], BootOrder::Cdrom).unwrap();
        assert_eq!(drives, CdromDrives { disks: vec![1], first: true });
        assert_eq!(disks.disks.iter().map(|disk| disk.size.0).collect::<Vec<_>>(), [8192, 4096]);
        assert!(disks.push_cdroms(&[], BootOrder::Cdrom).is_err());
        assert!(disks.push_cdroms(&[], BootOrder::Disk).unwrap().disks.is_empty());
    }

    #[test]
    fn only_the_last_disks_are_taken_for_media() {
        let machine = |disks, media: &[u32]| MachineConfig {
            disks: vec![DiskConfig { size: ByteSize(4096) }; disks],
            cdroms: CdromDrives { disks: media.to_vec(), first: false },
            ..MachineConfig::minimal(ByteSize(1 << 20))
        };
        for (disks, media, rest) in
            [(3, &[1, 2][..], 1), (3, &[], 3), (1, &[0], 0), (3, &[0], 3), (1, &[0, 7], 0)]
        {
            assert_eq!(count_without_media(&machine(disks, media)), rest, "{disks} {media:?}");
        }
    }

    #[test]
    fn sizes_and_numbers_that_no_machine_has_are_refused() {
        for size in [0, DISK_MAX.0 + 1, u64::MAX] {
            assert!(empty_disk(&ByteSize(size)).is_err(), "{size}");
        }
        let machine = |disks, firmware, devices| MachineConfig {
            disks: vec![DiskConfig { size: ByteSize(4096) }; disks],
            firmware,
            devices,
            ..MachineConfig::minimal(ByteSize(1 << 20))
        };
        let is_good = |disks, firmware, devices| check(&machine(disks, firmware, devices)).is_ok();
        assert!(is_good(14, Firmware::Bios, DeviceModel::Virtio));
        assert!(!is_good(15, Firmware::Bios, DeviceModel::Virtio));
        assert!(is_good(6, Firmware::Bios, DeviceModel::Emulated));
        assert!(!is_good(7, Firmware::Bios, DeviceModel::Emulated));
        assert!(is_good(1, Firmware::Micro, DeviceModel::Virtio));
        assert!(!is_good(1, Firmware::Micro, DeviceModel::Emulated));
    }
}
