//! A Debian disk with older packages on it, and newer ones of the same: what an administrator has before an
//! update.
//!
//! Made of the Debian guest's root by the machine's own package sources: what is in the release is installed,
//! what its security archive has newer is downloaded and kept on a second disk, as the paper did (section
//! 5.1.2, "a temporary disk"). Takes minutes, once a checkout; kept in `target/bench/packages`. Nothing is
//! installed on this machine: `apt-get` works below the new root.

use super::desk::guest_root;
use super::tools::run;
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use whimbrel_testkit::guest::image;

/// Size of the disk, as of the Debian guest.
const DISK_MIB: u64 = 1536;
const PACKAGES_MIB: u64 = 192;
const MIRROR: &str = "http://deb.debian.org";
/// The first process of the guest: installs the set that the kernel's command line names and switches the
/// machine off.
const INIT: &str = include_str!("packages-init.sh");
/// Servers and tools that many people have, each with newer versions in the security archive.
const INSTALLED: &str = include_str!("packages.txt");
/// A package or two each, with what belongs to them.
pub(super) const SMALL: [(&str, &[&str]); 5] = [
    ("unzip", &["unzip"]),
    ("rsync", &["rsync"]),
    ("tzdata", &["tzdata"]),
    ("jq", &["jq", "libjq1"]),
    ("openssl", &["openssl", "libssl3"]),
];
/// A dozen packages of more than 10 MB together, for a quick run.
const DOZEN: &[&str] = &[
    "perl",
    "perl-base",
    "perl-modules-5.36",
    "libperl5.36",
    "apt",
    "libapt-pkg6.0",
    "openssl",
    "libssl3",
    "7zip",
    "unzip",
    "rsync",
    "apache2-bin",
];

/// Disks, and what the packages of each set weigh together.
pub(super) struct Packages {
    /// With the older versions; it switches itself off when it has booted.
    pub(super) golden: PathBuf,
    /// The newer versions, a folder a set.
    pub(super) disk: PathBuf,
    /// Names of the sets, with the number and the bytes of their packages.
    pub(super) sets: BTreeMap<String, (usize, u64)>,
}

impl Packages {
    /// Makes them, if they are not there.
    pub(super) fn get() -> Result<Self> {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench/packages");
        // Renamed into place last: where it is, all of it is.
        if !place.exists() {
            eprintln!(
                "    making a Debian disk of many packages and fetching newer ones; this takes minutes, once"
            );
            fs::create_dir_all(place.parent().context("a folder")?)?;
            let part = tempfile::Builder::new()
                .prefix("packages")
                .tempdir_in(place.parent().context("a folder")?)?;
            make(part.path())?;
            fs::rename(part.keep(), &place)?;
        }
        let mut sets = BTreeMap::new();
        for set in fs::read_dir(place.join("sets"))? {
            let set = set?;
            let sizes = fs::read_dir(set.path())?.map(|file| Ok(file?.metadata()?.len()));
            let sizes = sizes.collect::<std::io::Result<Vec<u64>>>()?;
            sets.insert(set.file_name().to_string_lossy().into_owned(), (sizes.len(), sizes.iter().sum()));
        }
        Ok(Self { golden: place.join("golden.raw"), disk: place.join("packages.raw"), sets })
    }
}

fn make(place: &Path) -> Result<()> {
    let root = place.join("root");
    run(Command::new("cp").arg("-a").arg(guest_root()?).arg(&root))?;
    for file in ["etc/resolv.conf", "etc/hosts"] {
        fs::copy(Path::new("/").join(file), root.join(file))?;
    }
    // Nothing that is installed may start anything (invoke-rc.d, policy-rc.d).
    write_program(&root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
    install(&root)?;
    let newer = fetch(&root)?;
    let sets = sort(&newer, &place.join("sets"))?;
    clean(&root)?;
    write_program(&root.join("sbin/whimbrel-init"), INIT)?;
    image::ext4(&place.join("golden.raw"), DISK_MIB, Some(&root))?;
    image::ext4(&place.join("packages.raw"), PACKAGES_MIB, Some(&sets))?;
    fs::remove_dir_all(&root)?;
    Ok(())
}

fn install(root: &Path) -> Result<()> {
    fs::write(root.join("etc/apt/sources.list"), format!("deb {MIRROR}/debian bookworm main\n"))?;
    apt(root, &["update"])?;
    let packages = INSTALLED.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace);
    let words = ["install", "--no-install-recommends"].into_iter().chain(packages);
    apt(root, &words.collect::<Vec<_>>())?;
    apt(root, &["clean"])
}

/// Downloads what is newer, without installing it.
fn fetch(root: &Path) -> Result<PathBuf> {
    let sources = root.join("etc/apt/sources.list");
    let more = format!(
        "{}deb {MIRROR}/debian-security bookworm-security main\ndeb {MIRROR}/debian bookworm-updates main\n",
        fs::read_to_string(&sources)?
    );
    fs::write(sources, more)?;
    apt(root, &["update"])?;
    apt(root, &["--download-only", "dist-upgrade"])?;
    Ok(root.join("var/cache/apt/archives"))
}

/// A folder a set of packages: the small ones, the dozen, all.
fn sort(archives: &Path, sets: &Path) -> Result<PathBuf> {
    let all: Vec<PathBuf> = fs::read_dir(archives)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()?
        .into_iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .collect();
    ensure!(all.len() > 100, "only {} packages are newer", all.len());
    let some = SMALL.iter().copied().chain([("dozen", DOZEN)]);
    for (set, names) in some.map(|(set, names)| (set, Some(names))).chain([("all", None)]) {
        let folder = sets.join(set);
        fs::create_dir_all(&folder)?;
        for package in &all {
            let file = package.file_name().unwrap_or_default();
            let name = file.to_string_lossy();
            let name = name.split('_').next().unwrap_or_default();
            if names.is_none_or(|names| names.contains(&name)) {
                fs::copy(package, folder.join(file))?;
            }
        }
    }
    Ok(sets.to_owned())
}

/// Leaves neither packages nor lists of packages on the disk.
fn clean(root: &Path) -> Result<()> {
    apt(root, &["clean"])?;
    for folder in ["var/lib/apt/lists", "var/cache/apt"] {
        fs::remove_dir_all(root.join(folder))?;
    }
    Ok(())
}

/// Runs apt-get below `root`.
fn apt(root: &Path, words: &[&str]) -> Result<()> {
    let mut command = Command::new("chroot");
    command.arg(root).args(["apt-get", "-q", "-y"]).args(words);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    run(&mut command).with_context(|| format!("apt-get {}", words[0]))
}

fn write_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}
