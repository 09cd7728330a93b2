//! Debian in a folder, to run programs in that the host's release does not have.

use super::{
    GuestError,
    artifact_cache::{once, run},
    debian::mirror,
};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the folder of a Debian of this release with these packages, installed on the first use, which
/// takes minutes. It is for `chroot`; all users share it.
pub fn debian_root(name: &str, suite: &str, packages: &[&str]) -> Result<PathBuf, GuestError> {
    let place = once("guest-debian", name, |place| install(&place.join("root"), suite, packages))?;
    Ok(place.join("root"))
}

fn install(root: &Path, suite: &str, packages: &[&str]) -> Result<(), GuestError> {
    let source = mirror()?;
    run(Command::new("debootstrap").args(["--variant=minbase", suite]).arg(root).arg(&source.url))?;
    // debootstrap resolves no virtual packages; apt does.
    let apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"];
    let words = ["install", "--yes", "--no-install-recommends"];
    run(Command::new("chroot").arg(root).args(apt).args(words).args(packages))?;
    run(Command::new("chroot").arg(root).args(apt).arg("clean")).map(drop)
}
