//! sshfs as a peer: the mount of one file server that needs no kernel with NFS.
//!
//! The server of OpenSSH is its other end, over a pipe and without ssh between: nobody pays for encryption,
//! which is to the peer's favour. It makes a file durable when `fsync` asks.

use super::processes::detach;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::{Namespace, Process};

const PATIENCE: Duration = Duration::from_secs(30);
const SERVER: &str = "/usr/lib/openssh/sftp-server";

/// A mounted directory.
pub(super) struct Sftp {
    pub(super) mounted: PathBuf,
    _process: Process,
}

impl Sftp {
    /// Serves a folder below `dir` and mounts it there.
    pub(super) fn start(dir: &Path) -> Result<Self> {
        ensure!(Path::new(SERVER).exists(), "no {SERVER}: `scripts/bootstrap bench` installs it");
        let [served, mounted, instead] = ["served", "mnt", "ssh"].map(|name| dir.join(name));
        fs::create_dir(&served)?;
        fs::create_dir(&mounted)?;
        fs::write(served.join("probe"), "x")?;
        // Called as ssh would be, for the subsystem.
        fs::write(&instead, format!("#!/bin/sh\nexec {SERVER}\n"))?;
        fs::set_permissions(&instead, fs::Permissions::from_mode(0o755))?;
        let mut command = Command::new("sshfs");
        command.arg("-f").arg(format!("here:{}", served.display())).arg(&mounted);
        command.arg("-o").arg(format!("ssh_command={},max_conns=4", instead.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process =
            Namespace::new()?.start(command).context("sshfs: `scripts/bootstrap bench` installs it")?;
        let sftp = Self { mounted, _process: process };
        let deadline = Instant::now() + PATIENCE;
        while !sftp.mounted.join("probe").exists() {
            ensure!(Instant::now() < deadline, "sshfs does not mount");
            sleep(Duration::from_millis(50));
        }
        Ok(sftp)
    }
}

impl Drop for Sftp {
    fn drop(&mut self) {
        detach(&self.mounted);
    }
}
