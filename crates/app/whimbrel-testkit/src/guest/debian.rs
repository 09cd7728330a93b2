//! Debian guest with a compiler, for measurements on real work. Takes minutes to build, once.
//!
//! `debootstrap` builds the root from the mirror in the host's own package sources. The guest boots with the
//! modules of the small guest from an initial RAM disk that mounts `/dev/vda` and continues there.

use super::{
    GuestError, GuestOptions,
    artifact_cache::{once, run},
    boot_files::{build_test_agent, key},
    image,
    kernel::{Flavour, Kernel},
};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};
use whimbrel_container::Archive;

const INITRD_INIT: &str = include_str!("debian-initrd.sh");
const INIT: &str = include_str!("debian-init.sh");
const DISK_MIB: u64 = 1536;
/// Size of the disk with the kernel, if the guest boots by itself.
const BOOT_DISK_MIB: u64 = 32;

/// Files with which QEMU starts a Debian guest: `-kernel`, `-initrd` and a raw disk.
#[derive(Debug)]
pub struct DebianGuest {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initial RAM disk.
    pub initrd: PathBuf,
    /// Path of the disk, a raw image. All users share it: copy it, or use it as a read-only base.
    pub disk: PathBuf,
}

impl DebianGuest {
    /// Returns the files, built on the first use.
    pub fn get() -> Result<Self, GuestError> {
        let kernel = Kernel::get(Flavour::Cloud)?;
        let packages = "gcc,libc6-dev,make";
        let root =
            once("guest-debian", "root", |place| debootstrap(&place.join("root"), packages))?.join("root");
        let recipe = [INITRD_INIT.as_bytes(), INIT.as_bytes(), include_bytes!("debian.rs")];
        let place = once("guest-debian", &format!("disk-{}", key(&recipe)?), |place| {
            let path = place.join("initrd");
            fs::write(&path, initrd(&kernel)?).map_err(GuestError::file("write", &path))?;
            install(&root, &build_test_agent()?, "sbin/witness")?;
            write_program(&root.join("sbin/whimbrel-init"), INIT)?;
            image::ext4(&place.join("disk.raw"), DISK_MIB, Some(&root))
        })?;
        Ok(Self { kernel: kernel.image, initrd: place.join("initrd"), disk: place.join("disk.raw") })
    }
}

impl DebianGuest {
    /// Creates a boot disk at `path`: boot loader, kernel and initial RAM disk on a FAT file system. It is
    /// the machine's first disk, the root its second one, as an owner would install it: the machine needs
    /// nothing but its disks. Needs `syslinux` and `mtools`.
    pub fn boot_disk(&self, path: &Path, options: &GuestOptions) -> Result<(), GuestError> {
        let file = fs::File::create(path).and_then(|file| file.set_len(BOOT_DISK_MIB << 20));
        file.map_err(GuestError::file("create", path))?;
        let image = path.as_os_str();
        run(Command::new("mkfs.vfat").args(["-F", "16", "-n", "BOOT"]).arg(image))?;
        let settings = path.with_extension("cfg");
        let text = format!(
            "SERIAL 0 115200\nDEFAULT linux\nPROMPT 0\nTIMEOUT 0\nLABEL linux\n KERNEL vmlinuz\n INITRD initrd\n \
             APPEND {options} root=/dev/vdb\n"
        );
        fs::write(&settings, text).map_err(GuestError::file("write", &settings))?;
        let files = [(&settings, "syslinux.cfg"), (&self.kernel, "vmlinuz"), (&self.initrd, "initrd")];
        for (from, name) in files {
            run(Command::new("mcopy").arg("-i").arg(image).arg(from).arg(format!("::{name}")))?;
        }
        fs::remove_file(&settings).map_err(GuestError::file("remove", &settings))?;
        run(Command::new("syslinux").arg("--install").arg(image)).map(drop)
    }
}

/// Installs the smallest Debian and `packages` (comma-separated) in a new folder.
pub(super) fn debootstrap(root: &Path, packages: &str) -> Result<(), GuestError> {
    let source = mirror()?;
    let mut command = Command::new("debootstrap");
    command
        .args(["--variant=minbase", &format!("--include={packages}"), &source.suite])
        .arg(root)
        .arg(&source.url);
    run(&mut command)?;
    // Downloaded package files would only enlarge every disk built from the root.
    let archives = root.join("var/cache/apt/archives");
    if archives.is_dir() {
        run(Command::new("chroot").arg(root).args(["apt-get", "clean"]))?;
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mirror {
    pub(super) url: String,
    suite: String,
}

/// First Debian source in the host's own configuration.
pub(super) fn mirror() -> Result<Mirror, GuestError> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    files.extend(
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path()),
    );
    let texts = files.iter().filter_map(|path| fs::read_to_string(path).ok());
    let found = texts.filter_map(|text| one_line_source(&text).or_else(|| stanza_source(&text))).next();
    found.ok_or_else(|| GuestError::Missing { what: "Debian package source in /etc/apt".into() })
}

/// Parses `deb [options] URL SUITE COMPONENT…` (sources.list(5)).
fn one_line_source(text: &str) -> Option<Mirror> {
    text.lines().find_map(|line| {
        let mut line = line.trim().strip_prefix("deb ")?.trim_start();
        if line.starts_with('[') {
            line = line.split_once(']')?.1;
        }
        let mut words = line.split_whitespace();
        debian_source(words.next()?, words.next()?)
    })
}

/// Parses stanzas of `URIs:` and `Suites:` (deb822 format).
fn stanza_source(text: &str) -> Option<Mirror> {
    text.split("\n\n").find_map(|stanza| {
        let field = |name: &str| {
            let line = stanza.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()
        };
        debian_source(field("URIs:")?, field("Suites:")?)
    })
}

/// Accepts the main archive: other sources have no plain release name as their suite, or another path.
fn debian_source(url: &str, suite: &str) -> Option<Mirror> {
    let is_debian = url.trim_end_matches('/').ends_with("/debian");
    let is_release = suite.chars().all(|c| c.is_ascii_lowercase());
    (is_debian && is_release).then(|| Mirror { url: url.to_owned(), suite: suite.to_owned() })
}

fn initrd(kernel: &Kernel) -> Result<Vec<u8>, GuestError> {
    let mut archive = Archive::new();
    for directory in ["bin", "proc", "sys", "dev", "root"] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, INITRD_INIT.as_bytes());
    let busybox = fs::read("/bin/busybox").map_err(GuestError::file("read", "/bin/busybox"))?;
    archive.file("bin/busybox", 0o755, &busybox);
    kernel.add_modules(&mut archive)?;
    Ok(archive.finish())
}

fn install(root: &Path, program: &Path, name: &str) -> Result<(), GuestError> {
    fs::copy(program, root.join(name)).map(drop).map_err(GuestError::file("copy", program))?;
    let busybox = Path::new("/bin/busybox");
    fs::copy(busybox, root.join("sbin/busybox")).map(drop).map_err(GuestError::file("copy", busybox))
}

fn write_program(path: &Path, text: &str) -> Result<(), GuestError> {
    fs::write(path, text).map_err(GuestError::file("write", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(GuestError::file("change", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_read_from_either_form_of_source() {
        let expected = Some(Mirror { url: "http://mirror.test/debian".into(), suite: "bookworm".into() });
        let line =
            "# deb http://no.test/debian x main\ndeb [arch=amd64] http://mirror.test/debian bookworm main\n";
        assert_eq!(one_line_source(line), expected);
        let stanzas = "Types: deb\nURIs: https://other.test/node\nSuites: nodistro\n\n\
                       Types: deb\n# note\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\n";
        assert_eq!(stanza_source(stanzas), expected);
        assert_eq!(one_line_source("deb https://other.test/apt tool-bookworm main"), None);
    }
}
