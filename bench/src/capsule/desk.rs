//! Disks of guests that work by themselves: the Debian guest's root with another first process.

use super::tools::run;
use anyhow::{Context as _, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use whimbrel_core::Digest;
use whimbrel_testkit::guest::{DebianGuest, image};

const DISK_MIB: u64 = 1536;

/// A raw disk whose first process is the script `init`. Made once a checkout and kept in `target/bench`,
/// again when the script changes.
pub(super) fn disk(init: &str) -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench");
    fs::create_dir_all(&folder)?;
    let name = Digest::of(init.as_bytes()).to_string();
    let path = folder.join(format!("desk-{}.raw", &name[..12]));
    if !path.exists() {
        let place = tempfile::Builder::new().prefix("desk").tempdir_in(&folder)?;
        let root = place.path().join("root");
        run(Command::new("cp").arg("-a").arg(guest_root()?).arg(&root))?;
        let program = root.join("sbin/whimbrel-init");
        fs::write(&program, init)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        let part = place.path().join("part");
        image::ext4(&part, DISK_MIB, Some(&root))?;
        fs::rename(part, &path)?;
    }
    Ok(path)
}

/// The root that the Debian guest's disk was made of, beside it.
pub(crate) fn guest_root() -> Result<PathBuf> {
    let disk = DebianGuest::get()?.disk;
    Ok(disk.ancestors().nth(2).context("the guest's folder")?.join("root/root"))
}
