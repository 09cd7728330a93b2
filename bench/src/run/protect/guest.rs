//! The guest that is protected: the Debian guest's root with Apache and redis of the distribution, and small
//! programs of ours where no package has the work (`compute.c`, `web-page.c`).
//!
//! Packages are fetched from the mirror once a checkout, by `apt-get` below the new root; the disk is kept in
//! `target/bench`, and made again when what it is made of changes.

use crate::capsule::{guest_root, run_command};
use crate::run::stores::{below, install, program};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use whimbrel_core::Digest;
use whimbrel_testkit::guest::image;

const INIT: &str = include_str!("init.sh");
const COMPUTE: &str = include_str!("compute.c");
const WEB_PAGE: &str = include_str!("web-page.c");
const PACKAGES: [&str; 4] = ["apache2", "redis-server", "redis-tools", "libc6-dev"];
const DISK_MIB: u64 = 1536;
/// The file that is fetched in the paper's experiment.
pub(super) const FETCHED: usize = 256 << 10;

/// A raw disk of the guest.
pub(in crate::run) fn disk() -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench");
    fs::create_dir_all(&folder)?;
    let recipe = [INIT, COMPUTE, WEB_PAGE, include_str!("guest.rs")].concat();
    let name = Digest::of(recipe.as_bytes()).to_string();
    let path = folder.join(format!("protect-{}.raw", &name[..12]));
    if !path.exists() {
        eprintln!("    making a Debian disk with Apache and redis; this takes a minute, once");
        let place = tempfile::Builder::new().prefix("protect").tempdir_in(&folder)?;
        let root = place.path().join("root");
        run_command(Command::new("cp").arg("-a").arg(guest_root()?).arg(&root))?;
        fill(&root)?;
        let part = place.path().join("part");
        image::ext4(&part, DISK_MIB, Some(&root))?;
        fs::rename(part, &path)?;
    }
    Ok(path)
}

fn fill(root: &Path) -> Result<()> {
    install(root, &PACKAGES)?;
    below(root, &["a2enmod", "-q", "cgid"])?;
    for (source, name, to) in
        [(COMPUTE, "compute.c", "/usr/local/bin/compute"), (WEB_PAGE, "page.c", "/usr/lib/cgi-bin/page")]
    {
        fs::write(root.join(name), source)?;
        below(root, &["gcc", "-O2", "-o", to, &format!("/{name}"), "-lm"])?;
    }
    let noise: Vec<u8> = (0..FETCHED as u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
    let served = root.join("var/www/html");
    fs::write(served.join("large"), &noise)?;
    for (name, size) in [("small", 2 << 10), ("picture", 16 << 10)] {
        fs::write(served.join(name), &noise[..size])?;
    }
    program(&root.join("sbin/whimbrel-init"), INIT)
}
