//! Files of a machine beside those of its image, in a folder of their file system: busybox, the first
//! process, the script of the program, and qemu-ga and resize2fs with their libraries.

use crate::{ContainerError, ContainerImage, Layer, image::sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tar::{EntryType, Header};

/// Folder for what is not of the image.
const FOLDER: &str = ".whimbrel";
const INIT: &str = include_str!("init.sh");
const LEASE: &str = include_str!("lease.sh");
const SHUTDOWN: &str = include_str!("shutdown.sh");
/// What busybox's acpid runs when the power button is pressed.
const POWER_BUTTON: &str = "acpi/PWRF/00000080";
const BUSYBOX: [&str; 3] = ["/bin/busybox", "/usr/bin/busybox", "/sbin/busybox"];
/// Runs commands in the machine.
const QEMU_GA: [&str; 2] = ["/usr/sbin/qemu-ga", "/usr/bin/qemu-ga"];
/// Makes the file system as large as its disk has become.
const RESIZE: [&str; 2] = ["/usr/sbin/resize2fs", "/sbin/resize2fs"];
/// Unit in which the kernel tells the size of a disk.
const SECTOR: u64 = 512;
/// Section of a program that needs libraries: the path of what loads them (elf(5), `PT_INTERP`).
const LOADER: &[u8] = b"/ld-linux";
/// Bytes at the start of a program in which that path is.
const HEAD: usize = 4096;

/// Programs of this host that go into machines.
#[derive(Debug)]
pub struct GuestPrograms {
    /// Content of a busybox that needs no libraries.
    pub(crate) busybox: Vec<u8>,
    linked: LinkedPrograms,
}

/// Programs that need libraries, as far as they are installed: each by its name, what loads them, and all of
/// their libraries.
#[derive(Debug, Default)]
struct LinkedPrograms {
    programs: BTreeMap<&'static str, Vec<u8>>,
    loader: Vec<u8>,
    libraries: BTreeMap<String, Vec<u8>>,
}

impl GuestPrograms {
    /// The programs that this host has: busybox, and qemu-ga and resize2fs where they are installed.
    pub fn of_this_host() -> Result<Self, ContainerError> {
        let missing =
            || ContainerError::Read { path: BUSYBOX[0].into(), source: io::ErrorKind::NotFound.into() };
        let path = first(&BUSYBOX).ok_or_else(missing)?;
        let busybox = read(&path)?;
        let head = &busybox[..busybox.len().min(HEAD)];
        if head.windows(LOADER.len()).any(|window| window == LOADER) {
            return Err(ContainerError::NotStatic { path });
        }
        let mut linked = LinkedPrograms::default();
        for (name, paths) in [("qemu-ga", &QEMU_GA), ("resize2fs", &RESIZE)] {
            if let Some(path) = first(paths) {
                linked.add(name, &path)?;
            }
        }
        Ok(Self { busybox, linked })
    }

    /// Whether commands can be run in machines (`whimbrel exec`).
    pub fn has_agent(&self) -> bool {
        self.linked.programs.contains_key("qemu-ga")
    }

    /// The topmost layer of a machine of `image` with a disk of `disk` bytes, in a file without a name.
    pub fn layer(&self, image: &ContainerImage, disk: u64, mut file: File) -> Result<Layer, ContainerError> {
        let archive = self.archive(&image.script()?, disk);
        let archive = archive.map_err(ContainerError::read("the programs of the host"))?;
        file.write_all(&archive).map_err(ContainerError::read("the programs of the host"))?;
        Ok(Layer { file, offset: 0, length: archive.len() as u64, diff_id: sha256(&archive) })
    }

    fn archive(&self, program: &str, disk: u64) -> io::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        folder(&mut archive, FOLDER)?;
        for below in ["lib", "acpi", "acpi/PWRF"] {
            folder(&mut archive, &format!("{FOLDER}/{below}"))?;
        }
        let text = |text: &'static str| text.as_bytes();
        let size = format!("{}\n", disk / SECTOR);
        let own = [
            ("busybox", 0o755, &*self.busybox),
            ("init", 0o755, text(INIT)),
            ("lease", 0o755, text(LEASE)),
            ("shutdown", 0o755, text(SHUTDOWN)),
            (POWER_BUTTON, 0o755, text(SHUTDOWN)),
            // The environment of an image may have secrets in it.
            ("program", 0o600, program.as_bytes()),
            // The size for which the file system was made.
            ("size", 0o644, size.as_bytes()),
        ];
        own.into_iter().try_for_each(|(name, mode, content)| entry(&mut archive, name, mode, content))?;
        self.linked.entries(&mut archive)?;
        archive.into_inner()
    }
}

impl LinkedPrograms {
    /// Adds a program of this host, with its libraries.
    fn add(&mut self, name: &'static str, path: &Path) -> Result<(), ContainerError> {
        let (loaders, others): (Vec<_>, Vec<_>) =
            libraries(path)?.into_iter().partition(|path| path.to_string_lossy().contains("/ld-linux"));
        let loader = loaders
            .first()
            .ok_or_else(|| ContainerError::invalid(path.display().to_string(), "nothing loads it"))?;
        self.loader = read(loader)?;
        for path in others {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            self.libraries.insert(name, read(&path)?);
        }
        self.programs.insert(name, read(path)?);
        Ok(())
    }

    fn entries(&self, archive: &mut tar::Builder<Vec<u8>>) -> io::Result<()> {
        if self.programs.is_empty() {
            return Ok(());
        }
        for (name, program) in &self.programs {
            entry(archive, name, 0o755, program)?;
        }
        entry(archive, "lib/loader", 0o755, &self.loader)?;
        self.libraries
            .iter()
            .try_for_each(|(name, content)| entry(archive, &format!("lib/{name}"), 0o644, content))
    }
}

/// Libraries of a program of this host, as ldd(1) lists them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, ContainerError> {
    let listed = Command::new("ldd").arg(program).stdin(Stdio::null()).output();
    let listed = listed.map_err(ContainerError::read("ldd"))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(String::from_utf8_lossy(&listed.stdout).lines().filter_map(path).collect())
}

fn first(paths: &[&str]) -> Option<PathBuf> {
    paths.iter().map(PathBuf::from).find(|path| path.is_file())
}

fn read(path: &Path) -> Result<Vec<u8>, ContainerError> {
    fs::read(path).map_err(ContainerError::read(path))
}

fn folder(archive: &mut tar::Builder<Vec<u8>>, name: &str) -> io::Result<()> {
    let mut header = header(0o755, 0);
    header.set_entry_type(EntryType::Directory);
    archive.append_data(&mut header, name, io::empty())
}

fn entry(archive: &mut tar::Builder<Vec<u8>>, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    archive.append_data(&mut header(mode, content.len()), format!("{FOLDER}/{name}"), content)
}

/// Header of something of root, as old as Unix, so that the layer is the same each time.
fn header(mode: u32, size: usize) -> Header {
    let mut header = Header::new_ustar();
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size as u64);
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerLimits, apply_layer};
    use std::io::Seek;

    #[test]
    fn the_programs_of_this_host_are_a_layer_like_others() {
        let programs = GuestPrograms::of_this_host().expect("busybox-static");
        assert!(programs.has_agent(), "qemu-guest-agent");
        let config = br#"{"os": "linux", "architecture": "amd64", "config": {"Cmd": ["/serve"]}, "rootfs": {"diff_ids": []}}"#;
        let image = ContainerImage::of_parts(config, Vec::new()).unwrap();
        let mut layer = programs.layer(&image, 1 << 30, tempfile::tempfile().unwrap()).unwrap();
        layer.file.rewind().unwrap();
        let place = tempfile::tempdir().unwrap();
        let limits = LayerLimits { length: layer.length, bytes: 1 << 30, diff_id: layer.diff_id };
        let applied = apply_layer(place.path(), layer.file, &limits).unwrap();
        let tree = place.path().join("tree").join(FOLDER);
        assert_eq!(fs::read(tree.join("busybox")).unwrap(), programs.busybox);
        assert!(fs::read_to_string(tree.join("program")).unwrap().ends_with("set -- '/serve'\n"));
        assert!(applied.files > 8 && applied.left_out == 0, "{applied:?}");
        // Scripts that the shell of the machine reads without an error.
        for script in ["init", "lease", "shutdown", "program"] {
            let checked =
                Command::new(BUSYBOX[0]).args(["sh", "-n"]).arg(tree.join(script)).output().unwrap();
            assert!(checked.status.success(), "{script}: {checked:?}");
        }
        assert_eq!(fs::read_to_string(tree.join("size")).unwrap(), "2097152\n");
        // Both start with the libraries beside them, and no others.
        for (program, library) in [("qemu-ga", "libglib"), ("resize2fs", "libext2fs")] {
            let script =
                format!("chmod +x loader ../{program}; ./loader --library-path . --list ../{program}");
            let started = Command::new("sh").args(["-c", &script]).current_dir(tree.join("lib")).output();
            let listed = String::from_utf8(started.unwrap().stdout).unwrap();
            assert!(listed.contains(library) && !listed.contains("=> /"), "{listed}");
        }
    }
}
