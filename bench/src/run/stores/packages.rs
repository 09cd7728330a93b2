//! Packages of the distribution below a root that becomes a guest's disk.

use crate::capsule::run_command;
use anyhow::{Context as _, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Installs packages of the distribution below a root.
pub(in crate::run) fn install(root: &Path, packages: &[&str]) -> Result<()> {
    for file in ["etc/resolv.conf", "etc/hosts"] {
        fs::copy(Path::new("/").join(file), root.join(file))?;
    }
    // Nothing that is installed may start anything (invoke-rc.d, policy-rc.d).
    program(&root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
    below(root, &["apt-get", "-q", "update"])?;
    let install = ["apt-get", "-q", "-y", "install", "--no-install-recommends"];
    below(root, &[&install[..], packages].concat())?;
    below(root, &["apt-get", "clean"])
}

/// Runs a program of the root below it.
pub(in crate::run) fn below(root: &Path, words: &[&str]) -> Result<()> {
    let mut command = Command::new("chroot");
    command.arg(root).args(words).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    run_command(&mut command).with_context(|| words.join(" "))
}

/// Writes a program.
pub(in crate::run) fn program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}
