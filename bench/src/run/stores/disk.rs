//! The disk: redis and PostgreSQL of the distribution, and nothing else, so that a copy of the guest takes a
//! second.
//!
//! Its root is what those two need of a Debian root (`trim.sh`), with a database in it that has pgbench's
//! tables; made once a checkout.

use super::packages::{below, install, program};
use crate::capsule::{guest_root, run_command};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use whimbrel_core::Digest;
use whimbrel_testkit::guest::image;

const INIT: &str = include_str!("init.sh");
const TRIM: &str = include_str!("trim.sh");
/// Room for the histories of more than a thousand kills: 256 MiB were full after 915.
const DISK_MIB: u64 = 512;

/// A raw disk of the guest.
pub(in crate::run) fn disk() -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench");
    fs::create_dir_all(&folder)?;
    let name = Digest::of([INIT, TRIM, include_str!("disk.rs")].concat().as_bytes()).to_string();
    let path = folder.join(format!("stores-{}.raw", &name[..12]));
    if !path.exists() {
        eprintln!("    making a disk with redis and PostgreSQL; this takes a minute, once");
        let place = tempfile::Builder::new().prefix("stores").tempdir_in(&folder)?;
        let root = place.path().join("root");
        run_command(Command::new("cp").arg("-a").arg(guest_root()?).arg(&root))?;
        install(&root, &["redis-server", "postgresql-15"])?;
        program(&root.join("trim"), TRIM)?;
        below(&root, &["/trim"])?;
        let small = root.join("small");
        fs::copy(root.join("sbin/witness"), small.join("usr/sbin/witness"))?;
        program(&small.join("usr/sbin/whimbrel-init"), INIT)?;
        let part = place.path().join("part");
        image::ext4(&part, DISK_MIB, Some(&small))?;
        fs::rename(part, &path)?;
    }
    Ok(path)
}
