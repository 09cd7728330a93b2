//! Server and client as processes of the released program, in a network namespace each.

use super::far::{CLIENT, ONE_WAY, SERVER};
use crate::harness::scratch;
use crate::hosts::program;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_testkit::lab::{LinkConfig, LinkEmulator, Namespace, Process};

/// A mount first writes back what an earlier one left, which is some megabytes of content at most: changes of
/// names, of which 3,000 were seen, are folded before.
const PATIENCE: Duration = Duration::from_secs(180);

/// The two sides as processes.
pub(super) struct Sides {
    dir: TempDir,
    program: PathBuf,
    keys: [String; 2],
    server: Option<Process>,
    pub(super) mount: Option<Process>,
    pub(super) link: LinkEmulator,
    namespaces: [Namespace; 2],
}

impl Sides {
    pub(super) fn new() -> Result<Self> {
        let (dir, program) = (scratch("session-faults")?, program()?);
        for name in ["server", "mount", "control", "keys", "server-keys"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let key = |name: &str| -> Result<String> {
            let said = Command::new(&program)
                .args(["session", "key", "--keys-dir"])
                .arg(dir.path().join(name))
                .output()?;
            ensure!(said.status.success(), "no key: {}", String::from_utf8_lossy(&said.stderr));
            Ok(String::from_utf8(said.stdout)?.trim().to_owned())
        };
        let keys = [key("keys")?, key("server-keys")?];
        let namespaces = [Namespace::new()?, Namespace::new()?];
        let ends = ((&namespaces[0], CLIENT), (&namespaces[1], SERVER));
        let link = LinkEmulator::between(ends.0, ends.1, LinkConfig::new(100, ONE_WAY), 1)?;
        let mut sides = Self { dir, program, keys, server: None, mount: None, link, namespaces };
        sides.serve()?;
        sides.mount()?;
        Ok(sides)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(&self, side: usize, arguments: &[&str]) -> Result<Process> {
        let mut command = Command::new(&self.program);
        let log = OpenOptions::new().append(true).create(true).open(self.path("log"))?;
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(self.namespaces[side].start(command)?)
    }

    pub(super) fn serve(&mut self) -> Result<()> {
        self.server = None;
        let (served, keys) = (self.path("server"), self.path("server-keys"));
        let listen = format!("{SERVER}:7788");
        let arguments = [
            "serve",
            text(&served)?,
            "--listen",
            &listen,
            "--allow",
            &self.keys[0],
            "--keys-dir",
            text(&keys)?,
        ];
        self.server = Some(self.start(1, &arguments)?);
        Ok(())
    }

    /// Mounts, also over what a killed mount left.
    pub(super) fn mount(&mut self) -> Result<()> {
        self.mount = None;
        let (mount, keys, control, cache) =
            (self.path("mount"), self.path("keys"), self.path("control"), self.path("cache"));
        let target = format!("{SERVER}:7788:{}", self.path("server").canonicalize()?.display());
        let deadline = Instant::now() + PATIENCE;
        // The server may have died just before.
        loop {
            let arguments = [
                "mount",
                &target,
                text(&mount)?,
                "--foreground",
                "--key",
                &self.keys[1],
                "--keys-dir",
                text(&keys)?,
                "--control-dir",
                text(&control)?,
                "--cache-dir",
                text(&cache)?,
                "--cache-size",
                "64M",
                "--write",
                "back",
                "--write-back-delay",
                "0",
                "--attr-timeout",
                "session",
                "--name",
                "faults",
            ];
            let mut process = self.start(0, &arguments)?;
            while process.try_wait()?.is_none() {
                if is_mounted(&mount)? {
                    self.mount = Some(process);
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(5));
                ensure!(
                    Instant::now() < deadline,
                    "the mount does not come: {}",
                    fs::read_to_string(self.path("log"))?
                );
            }
            ensure!(Instant::now() < deadline, "no mount: {}", fs::read_to_string(self.path("log"))?);
        }
    }

    pub(super) fn kill_mount(&mut self) -> Result<()> {
        self.mount = None;
        let done = Command::new("umount").arg("-l").arg(self.path("mount")).status()?;
        ensure!(done.success(), "cannot take the dead mount away");
        Ok(())
    }

    pub(super) fn session(&self, verb: &str) -> Result<()> {
        let asked = Command::new(&self.program)
            .args(["session", "--control-dir"])
            .arg(self.path("control"))
            .args([verb, "faults"])
            .output()?;
        ensure!(asked.status.success(), "{verb}: {}", String::from_utf8_lossy(&asked.stderr));
        Ok(())
    }

    pub(super) fn put_aside(&self) -> usize {
        fs::read_dir(self.path("cache/kept")).map_or(0, Iterator::count)
    }
}

impl Drop for Sides {
    fn drop(&mut self) {
        if self.mount.take().is_some() {
            // Nothing is to be done about a mount that stays.
            let _ = Command::new("umount").arg("-l").arg(self.path("mount")).status();
        }
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

fn is_mounted(path: &Path) -> Result<bool> {
    let path = path.canonicalize()?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(1).is_some_and(|at| Path::new(at) == path)))
}
