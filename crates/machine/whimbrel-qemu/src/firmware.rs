//! UEFI firmware of this host, found as QEMU says it is to be found: by the descriptors that its packages
//! install (QEMU docs/interop/firmware.json).
//!
//! The first one counts, in the order of the file names, that is for a PC and has Secure Boot with enrolled
//! keys, or none of it, as is wanted. A descriptor that cannot be read is passed over.

use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders of descriptors, of the administrator and of packages.
const FOLDERS: [&str; 2] = ["/etc/qemu/firmware", "/usr/share/qemu/firmware"];
/// Longest descriptor that is read.
const LEN_MAX: u64 = 64 << 10;
/// Features of firmware that starts only what the keys of its first variables have signed.
const SECURE: [&str; 3] = ["secure-boot", "enrolled-keys", "requires-smm"];
/// Features of firmware with Secure Boot, or whose variables do not last.
const INSECURE_LACKS: [&str; 3] = ["secure-boot", "requires-smm", "amd-sev-es"];

/// Files of a UEFI firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UefiFiles {
    /// The program, which machines read.
    pub code: PathBuf,
    /// Variables of a machine that never ran.
    pub variables: PathBuf,
}

/// No firmware was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoFirmware {
    /// None at all.
    #[error("this host has no UEFI firmware for QEMU: install the package ovmf, or edk2-ovmf")]
    Uefi,
    /// None with Secure Boot.
    #[error(
        "this host has no UEFI firmware with Secure Boot for QEMU: install the package ovmf, or leave Secure Boot out"
    )]
    SecureBoot,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Descriptor {
    interface_types: Vec<String>,
    mapping: Mapping,
    targets: Vec<Target>,
    #[serde(default)]
    features: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    executable: FlashFile,
    nvram_template: FlashFile,
}

#[derive(Deserialize)]
struct FlashFile {
    filename: PathBuf,
    format: String,
}

#[derive(Deserialize)]
struct Target {
    architecture: String,
    machines: Vec<String>,
}

impl Descriptor {
    fn is_wanted(&self, secure: bool) -> bool {
        let fits = |target: &Target| {
            target.architecture == "x86_64" && target.machines.iter().any(|m| m.starts_with("pc-q35-"))
        };
        let Mapping { device, executable, nvram_template } = &self.mapping;
        let has = |wanted: &&str| self.features.iter().any(|feature| feature == wanted);
        let raw = |file: &FlashFile| file.format == "raw" && file.filename.is_file();
        self.interface_types.iter().any(|kind| kind == "uefi")
            && device == "flash"
            && self.targets.iter().any(fits)
            && if secure { SECURE.iter().all(has) } else { !INSECURE_LACKS.iter().any(has) }
            && raw(executable)
            && raw(nvram_template)
    }
}

/// The UEFI firmware of this host, with Secure Boot or without.
pub fn uefi_files(secure: bool) -> Result<UefiFiles, NoFirmware> {
    find_in(&FOLDERS.map(Path::new), secure)
}

fn find_in(folders: &[&Path], secure: bool) -> Result<UefiFiles, NoFirmware> {
    let mut files: Vec<PathBuf> =
        folders.iter().flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path()).collect();
    files.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
    let found = files.iter().filter_map(|path| read(path)).find(|found| found.is_wanted(secure));
    let none = if secure { NoFirmware::SecureBoot } else { NoFirmware::Uefi };
    let Mapping { executable, nvram_template, .. } = found.ok_or(none)?.mapping;
    Ok(UefiFiles { code: executable.filename, variables: nvram_template.filename })
}

fn read(path: &Path) -> Option<Descriptor> {
    if fs::metadata(path).ok()?.len() > LEN_MAX {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(folder: &Path, name: &str, code: &Path, features: &str) {
        let text = format!(
            r#"{{"interface-types": ["uefi"], "features": [{features}], "tags": [],
                "mapping": {{"device": "flash",
                    "executable": {{"filename": {code:?}, "format": "raw"}},
                    "nvram-template": {{"filename": {code:?}, "format": "raw"}}}},
                "targets": [{{"architecture": "x86_64", "machines": ["pc-q35-*"]}}]}}"#
        );
        fs::write(folder.join(name), text).unwrap();
    }

    #[test]
    fn what_is_not_wanted_what_is_damaged_and_what_is_not_there_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, code) = (dir.path().join("firmware"), dir.path().join("code.fd"));
        fs::create_dir(&folder).unwrap();
        fs::write(&code, "code").unwrap();
        assert_eq!(find_in(&[Path::new("/nowhere"), &folder], false), Err(NoFirmware::Uefi));
        describe(&folder, "10-secure.json", &code, r#""secure-boot", "requires-smm""#);
        describe(&folder, "20-gone.json", Path::new("/nowhere/code.fd"), "");
        fs::write(folder.join("30-damaged.json"), "{\"mapping\":").unwrap();
        assert_eq!(find_in(&[&folder], false), Err(NoFirmware::Uefi));
        assert_eq!(find_in(&[&folder], true), Err(NoFirmware::SecureBoot), "nobody's keys are enrolled");
        describe(&folder, "60-plain.json", &code, r#""acpi-s3""#);
        assert_eq!(find_in(&[&folder], false).unwrap().code, code);
        describe(&folder, "70-keys.json", &code, r#""enrolled-keys", "secure-boot", "requires-smm""#);
        assert_eq!(find_in(&[&folder], true).unwrap().code, code);
    }
}
