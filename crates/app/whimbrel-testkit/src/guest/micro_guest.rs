//! The smallest Linux that a machine without a BIOS boots: its kernel is built from Debian's source with
//! little more than a serial port, and its only program echoes.
//!
//! Needs `apt-get update`, a C compiler, `make`, `flex`, `bison`, `bc` and `libelf-dev`. Takes minutes to
//! build, once.

use super::{
    GuestError,
    artifact_cache::{once, run},
    package,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use whimbrel_container::Archive;

const SOURCE: &str = "linux-source-6.1";
/// What the kernel has beyond `make tinyconfig`.
const CONFIG: &str = include_str!("micro.config");
const BUSYBOX: &str = "/bin/busybox";
/// The first thing that the guest says.
pub const BOOTED: &[u8] = b"BOOTED";
const INIT: &str = "#!/bin/busybox sh\necho BOOTED\nexec /bin/busybox cat\n";

/// Files and command line of the guest.
#[derive(Debug)]
pub struct MicroGuest {
    /// Kernel, not compressed: decompression is most of a translated guest's boot.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: PathBuf,
    /// Command line. It says what the kernel would otherwise measure: the rates of clocks and loops.
    pub append: &'static str,
}

impl MicroGuest {
    /// Returns the files, built on the first use.
    pub fn get() -> Result<Self, GuestError> {
        let key = blake3::hash(&[CONFIG.as_bytes(), INIT.as_bytes()].concat()).to_hex();
        let place = once("guest-files", &format!("micro-{}", &key[..16]), make)?;
        Ok(Self {
            kernel: place.join("vmlinux"),
            initrd: place.join("initrd"),
            append: "console=ttyS0 quiet panic=-1 tsc=reliable tsc_early_khz=2000000 lpj=4000000",
        })
    }
}

fn make(place: &Path) -> Result<(), GuestError> {
    let work = tempfile::tempdir_in(place).map_err(GuestError::file("create", place))?;
    package::unpack(SOURCE, work.path())?;
    run(Command::new("tar").arg("xf").arg(format!("usr/src/{SOURCE}.tar.xz")).current_dir(&work))?;
    let tree = work.path().join(SOURCE);
    run(Command::new("make").args(["-s", "tinyconfig"]).current_dir(&tree))?;
    let config = tree.join(".config");
    let tiny = fs::read_to_string(&config).map_err(GuestError::file("read", &config))?;
    fs::write(&config, tiny + CONFIG).map_err(GuestError::file("write", &config))?;
    run(Command::new("make").args(["-s", "olddefconfig"]).current_dir(&tree))?;
    run(Command::new("make").args(["-s", "-j2", "vmlinux"]).current_dir(&tree))?;
    run(Command::new("strip").arg("vmlinux").arg("-o").arg(place.join("vmlinux")).current_dir(&tree))?;
    let busybox = fs::read(BUSYBOX).map_err(GuestError::file("read", BUSYBOX))?;
    let mut archive = Archive::new();
    archive.directory("bin");
    archive.file("bin/busybox", 0o755, &busybox);
    archive.file("init", 0o755, INIT.as_bytes());
    let initrd = place.join("initrd");
    fs::write(&initrd, archive.finish()).map_err(GuestError::file("write", &initrd))
}
