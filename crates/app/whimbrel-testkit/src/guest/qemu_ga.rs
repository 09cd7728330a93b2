//! The small guest with qemu-ga as Debian has it: the program and its libraries, from the host, in a second
//! archive behind the first one. The kernel unpacks both.

use super::{
    GuestError, GuestFiles,
    artifact_cache::{once, run},
};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use whimbrel_container::Archive;

const QEMU_GA: &str = "/usr/sbin/qemu-ga";
/// Where the kernel looks for the next archive.
const ALIGNMENT: usize = 512;

impl GuestFiles {
    /// Files of a guest that runs qemu-ga, which the package qemu-guest-agent has on the host.
    pub fn with_qemu_ga() -> Result<Self, GuestError> {
        let plain = Self::get();
        let read = |path: &Path| fs::read(path).map_err(GuestError::file("read", path));
        let (before, program) = (read(&plain.initrd)?, read(Path::new(QEMU_GA))?);
        let key = blake3::hash(&[before.as_slice(), &program, include_bytes!("qemu_ga.rs")].concat());
        let name = format!("initrd-qemu-ga-{}", &key.to_hex()[..16]);
        let place = once("guest-files", &name, |place| {
            let mut archive = Archive::new();
            let files: Vec<PathBuf> = [PathBuf::from(QEMU_GA)].into_iter().chain(libraries()?).collect();
            let mut folders = BTreeSet::new();
            for folder in files.iter().flat_map(|file| file.ancestors().skip(1)) {
                folders.extend(folder.strip_prefix("/").ok().filter(|path| !path.as_os_str().is_empty()));
            }
            // Sorted, a folder comes before what is in it.
            folders.iter().for_each(|folder| archive.directory(&folder.display().to_string()));
            for file in &files {
                let inside = file.strip_prefix("/").unwrap_or(file).display().to_string();
                archive.file(&inside, 0o755, &read(file)?);
            }
            let mut both = before.clone();
            both.resize(both.len().next_multiple_of(ALIGNMENT), 0);
            both.extend(archive.finish());
            let path = place.join("initrd");
            fs::write(&path, both).map_err(GuestError::file("write", &path))
        })?;
        Ok(Self { kernel: plain.kernel.clone(), initrd: place.join("initrd") })
    }
}

/// Libraries of qemu-ga, by the paths at which the guest's loader looks for them.
fn libraries() -> Result<Vec<PathBuf>, GuestError> {
    let listed = run(Command::new("ldd").arg(QEMU_GA))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(listed.lines().filter_map(path).collect())
}
