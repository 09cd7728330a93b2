//! Firmware of new machines: what a profile of hardware needs of this host.
//!
//! The variables of UEFI lie in flash memory, which is a disk to all but the guest: its base is a copy of the
//! firmware's own template in the machine's folder, and it goes wherever the machine's disks go. QEMU reads
//! it once, at its start; a machine that is loaded brings its flash memory with it, and QEMU writes all of it
//! to the disk when it runs. The state of a TPM is a disk for the same reasons (`tpm_disk` of `whimbrel-vm`).

use crate::{
    core::{error::DaemonError, state::Core},
    machine::record::{DiskBase, Record},
};
use std::{fs, path::Path};
use whimbrel_api::Profile;
use whimbrel_core::{Boot, ByteSize, DiskConfig, Firmware, PAGE_SIZE, Uefi};
use whimbrel_qemu::{Tpm, UefiFiles};
use whimbrel_vm::TPM_DISK;
use whimbrel_wire::atomic_file;

/// Name of the file with the first variables in the machine's folder.
const FILE: &str = "variables.fd";

/// Firmware of a machine, and the disk of its variables if that is a new one.
pub(crate) type NewFirmware = (Firmware, Option<(DiskConfig, DiskBase)>);

impl Core {
    /// The firmware of a new machine with `disks` disks and a folder of its own.
    pub(crate) fn firmware_of(
        &self,
        profile: Profile,
        boot: Option<&Boot>,
        (disks, folder): (usize, &Path),
    ) -> Result<NewFirmware, DaemonError> {
        match profile {
            Profile::Default => Ok((Firmware::Bios, None)),
            Profile::Micro if boot.is_none() => Err(DaemonError::invalid(
                "the profile micro starts a kernel and knows no disk to boot: add --kernel FILE, or choose another profile",
            )),
            Profile::Micro => Ok((Firmware::Micro, None)),
            Profile::Uefi | Profile::Desktop => {
                let UefiFiles { code, variables } = found()?;
                let read = |source| DaemonError::io("read", &variables, source);
                let size = fs::metadata(&variables).map_err(read)?.len();
                if size == 0 || !size.is_multiple_of(PAGE_SIZE as u64) {
                    let path = variables.display();
                    return Err(DaemonError::invalid(format!(
                        "{path} is not as long as flash memory can be"
                    )));
                }
                let code = self.store_boot_file(&code)?;
                let base = DiskBase::File { path: folder.join(FILE) };
                let firmware = Firmware::Uefi(Uefi { code, variables: disks as u32 });
                Ok((firmware, Some((DiskConfig { size: ByteSize(size) }, base))))
            }
        }
    }
}

/// Adds the disk for the state of a new TPM to those of a machine; returns its index. Refused if this host
/// has no program that could be the TPM.
pub(crate) fn add_tpm(
    firmware: &Firmware,
    disks: &mut Vec<DiskConfig>,
    bases: &mut Vec<DiskBase>,
) -> Result<u32, DaemonError> {
    if *firmware == Firmware::Micro {
        return Err(DaemonError::invalid(
            "a micro machine has no TPM: choose another profile, or leave out --tpm",
        ));
    }
    Tpm::find().map_err(|error| DaemonError::invalid(error.to_string()))?;
    disks.push(DiskConfig { size: TPM_DISK });
    bases.push(DiskBase::Blank);
    Ok(disks.len() as u32 - 1)
}

/// Whether a machine with this firmware gets the screen that is asked for. Refused if it cannot have one.
pub(crate) fn has_display(firmware: &Firmware, is_asked: bool) -> Result<bool, DaemonError> {
    if is_asked && *firmware == Firmware::Micro {
        return Err(DaemonError::invalid(
            "a micro machine has no screen: choose another profile, or leave out --display",
        ));
    }
    Ok(is_asked)
}

/// Writes the first variables of a new machine into its folder, durably, if its firmware has any there.
pub(crate) fn write(folder: &Path, record: &Record) -> Result<(), DaemonError> {
    let path = folder.join(FILE);
    let disk = record.config.firmware.uefi().and_then(|uefi| record.bases.get(uefi.variables as usize));
    if disk != Some(&DiskBase::File { path: path.clone() }) {
        return Ok(());
    }
    let failed = |source| DaemonError::io("write", &path, source);
    fs::copy(found()?.variables, &path).and_then(|_| fs::File::open(&path)?.sync_all()).map_err(failed)?;
    atomic_file::sync_dir(folder).map_err(failed)
}

fn found() -> Result<UefiFiles, DaemonError> {
    whimbrel_qemu::uefi_files().map_err(|error| DaemonError::invalid(error.to_string()))
}
