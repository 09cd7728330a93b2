//! Firmware of new machines: what a profile of hardware needs of this host.
//!
//! The variables of UEFI lie in flash memory, which is a disk to all but the guest: its base is a copy of the
//! firmware's own template in the machine's folder, and it goes wherever the machine's disks go. QEMU reads
//! it once, at its start; a machine that is loaded brings its flash memory with it, and QEMU writes all of it
//! to the disk when it runs. The state of a TPM is a disk for the same reasons (`tpm_disk` of `whimbrel-vm`).

use crate::{
    core::{error::DaemonError, state::Core},
    machine::{
        new_disks::NewDisks,
        record::{DiskBase, Record},
    },
};
use std::{fs, path::Path};
use whimbrel_api::Profile;
use whimbrel_core::{Boot, ByteSize, DiskConfig, Firmware, PAGE_SIZE, Uefi};
use whimbrel_qemu::{Tpm, UefiFiles};
use whimbrel_vm::TPM_DISK;
use whimbrel_wire::atomic_file;

/// Name of the file with the first variables in the machine's folder.
const FILE: &str = "variables.fd";

impl Core {
    /// The firmware of a new machine, whose variables are one more of its disks.
    pub(crate) fn add_firmware(
        &self,
        (profile, secure): (Profile, Option<bool>),
        boot: Option<&Boot>,
        disks: &mut NewDisks,
        folder: &Path,
    ) -> Result<Firmware, DaemonError> {
        if secure == Some(true) && !profile.is_uefi() {
            return Err(DaemonError::invalid(
                "Secure Boot needs UEFI: add --profile uefi, or --profile desktop",
            ));
        }
        if secure == Some(true) && boot.is_some() {
            return Err(DaemonError::invalid(
                "Secure Boot does not check a kernel that is loaded directly: leave out --kernel or --secure-boot",
            ));
        }
        match profile {
            Profile::Default | Profile::Foreign => Ok(Firmware::Bios),
            Profile::Micro if boot.is_none() => Err(DaemonError::invalid(
                "the profile micro starts a kernel and knows no disk to boot: add --kernel FILE, or choose another profile",
            )),
            Profile::Micro => Ok(Firmware::Micro),
            Profile::Uefi | Profile::Desktop => {
                let secure = secure.unwrap_or(profile.is_secure() && boot.is_none());
                let UefiFiles { code, variables } = found(secure)?;
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
                let variables = disks.push((DiskConfig { size: ByteSize(size) }, base));
                Ok(Firmware::Uefi(Uefi { code, variables, secure }))
            }
        }
    }
}

/// Adds the disk for the state of a new TPM to those of a machine; returns its index. Refused if this host
/// has no program that could be the TPM.
pub(crate) fn add_tpm(firmware: &Firmware, disks: &mut NewDisks) -> Result<u32, DaemonError> {
    if *firmware == Firmware::Micro {
        return Err(DaemonError::invalid(
            "a micro machine has no TPM: choose another profile, or leave out --tpm",
        ));
    }
    Tpm::find().map_err(|error| DaemonError::invalid(error.to_string()))?;
    Ok(disks.push((DiskConfig { size: TPM_DISK }, DiskBase::Blank)))
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
    let Some(uefi) = record.config.firmware.uefi() else { return Ok(()) };
    if record.bases.get(uefi.variables as usize) != Some(&DiskBase::File { path: path.clone() }) {
        return Ok(());
    }
    let variables = found(uefi.secure)?.variables;
    let failed = |source| DaemonError::io("write", &path, source);
    fs::copy(variables, &path).and_then(|_| fs::File::open(&path)?.sync_all()).map_err(failed)?;
    atomic_file::sync_dir(folder).map_err(failed)
}

fn found(secure: bool) -> Result<UefiFiles, DaemonError> {
    whimbrel_qemu::uefi_files(secure).map_err(|error| DaemonError::invalid(error.to_string()))
}
