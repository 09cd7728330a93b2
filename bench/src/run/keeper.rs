//! Programs that keep versions of an image, all behind one contract: ours and its peers do the same job on
//! the same files.
//!
//! Each works in a folder of its own with its defaults, except where its name says otherwise. Times include
//! starting the program, because that is how people use them; for ours that is the opening of the store.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Keeps versions of an image.
pub(crate) trait Keeper {
    /// For the table.
    fn name(&self) -> &'static str;

    /// Keeps `image` as `version` and says how long it took.
    fn save(&mut self, image: &Path, version: &str) -> Result<Duration>;

    /// Writes `version` to the file `to`, which is not there yet, and says how long it took.
    fn restore(&mut self, version: &str, to: &Path) -> Result<Duration>;

    /// Where everything it keeps lies.
    fn folder(&self) -> &Path;

    /// Bytes it keeps.
    fn bytes(&self) -> Result<u64> {
        tree_bytes(self.folder())
    }
}

/// Another program as a keeper.
pub(crate) struct Peer {
    kind: PeerKind,
    folder: TempDir,
}

/// Which program, and how it cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerKind {
    Restic,
    Borg,
    /// Cuts at every page, as we do.
    BorgPages,
    Casync,
}

impl PeerKind {
    pub(crate) const ALL: [PeerKind; 4] = [Self::Restic, Self::Borg, Self::BorgPages, Self::Casync];

    fn program(self) -> &'static str {
        match self {
            Self::Restic => "restic",
            Self::Borg | Self::BorgPages => "borg",
            Self::Casync => "casync",
        }
    }
}

impl Peer {
    /// An empty repository below `scratch`. An error if the program is not installed.
    pub(crate) fn new(kind: PeerKind, scratch: &Path) -> Result<Self> {
        let peer = Self { kind, folder: TempDir::new_in(scratch)? };
        let repository = peer.repository();
        match kind {
            PeerKind::Restic => run(peer.command().args(["init", "--quiet"]))?,
            PeerKind::Borg | PeerKind::BorgPages => {
                run(peer.command().args(["init", "--encryption=none"]).arg(&repository))?
            }
            PeerKind::Casync => std::fs::create_dir(&repository)?,
        }
        Ok(peer)
    }

    fn repository(&self) -> PathBuf {
        self.folder.path().join("repository")
    }

    /// The program with an environment in which it asks no question and keeps no cache outside its folder.
    fn command(&self) -> Command {
        let mut command = Command::new(self.kind.program());
        let own = |name: &str| self.folder.path().join(name);
        command
            .env("RESTIC_REPOSITORY", self.repository())
            .env("RESTIC_PASSWORD", "bench")
            .env("RESTIC_CACHE_DIR", own("cache"))
            .env("BORG_BASE_DIR", own("base"))
            .env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
        command
    }

    fn index(&self, version: &str) -> PathBuf {
        self.repository().join(format!("{version}.caibx"))
    }

    fn archive(&self, version: &str) -> String {
        format!("{}::{version}", self.repository().display())
    }

    fn store(&self) -> String {
        format!("--store={}", self.repository().join("default.castr").display())
    }
}

impl Keeper for Peer {
    fn name(&self) -> &'static str {
        match self.kind {
            PeerKind::Restic => "restic",
            PeerKind::Borg => "borg",
            PeerKind::BorgPages => "borg, 4 KiB chunks",
            PeerKind::Casync => "casync",
        }
    }

    fn save(&mut self, image: &Path, version: &str) -> Result<Duration> {
        let mut command = self.command();
        match self.kind {
            // --force: two versions of one path must both be read, whatever their times say.
            PeerKind::Restic => command.args(["backup", "--quiet", "--force", "--tag", version]),
            PeerKind::Borg => command.arg("create").arg(self.archive(version)),
            PeerKind::BorgPages => {
                command.args(["create", "--chunker-params", "fixed,4096"]).arg(self.archive(version))
            }
            PeerKind::Casync => command.arg("make").arg(self.store()).arg(self.index(version)),
        };
        timed(|| run(command.arg(image)))
    }

    fn restore(&mut self, version: &str, to: &Path) -> Result<Duration> {
        let target = TempDir::new_in(to.parent().context("a file without a folder")?)?;
        let mut command = self.command();
        match self.kind {
            PeerKind::Restic => command
                .args(["restore", "latest", "--quiet", "--tag", version, "--target"])
                .arg(target.path()),
            PeerKind::Borg | PeerKind::BorgPages => {
                command.arg("extract").arg(self.archive(version)).current_dir(target.path())
            }
            PeerKind::Casync => command
                .arg("extract")
                .arg(self.store())
                .arg(self.index(version))
                .arg(target.path().join("image")),
        };
        let took = timed(|| run(&mut command))?;
        std::fs::rename(only_file(target.path())?, to)?;
        Ok(took)
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Without what the program keeps outside its repository.
    fn bytes(&self) -> Result<u64> {
        tree_bytes(&self.repository())
    }
}

/// How long `work` takes.
pub(crate) fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output =
        output.with_context(|| format!("cannot start {program}; scripts/bootstrap bench installs it"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} failed: {}", words.trim());
    Ok(())
}

/// The one file below `folder`: programs restore under the path they were given.
fn only_file(folder: &Path) -> Result<PathBuf> {
    let mut place = folder.to_owned();
    while !place.is_file() {
        let entry =
            std::fs::read_dir(&place)?.next().with_context(|| format!("{} is empty", place.display()))?;
        place = entry?.path();
    }
    Ok(place)
}

/// Bytes of all files below `folder`.
fn tree_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { tree_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_that_is_installed_gives_back_what_it_was_given() {
        let scratch = tempfile::tempdir().unwrap();
        for kind in PeerKind::ALL {
            let installed = Command::new(kind.program()).arg("--version").output().is_ok();
            if !installed {
                continue;
            }
            let mut peer = Peer::new(kind, scratch.path()).unwrap();
            let image = scratch.path().join("image");
            for (version, byte) in [("first", 1u8), ("later", 2)] {
                std::fs::write(&image, vec![byte; 300_000]).unwrap();
                peer.save(&image, version).unwrap();
            }
            let back = scratch.path().join(format!("{kind:?}"));
            peer.restore("first", &back).unwrap();
            assert!(std::fs::read(&back).unwrap() == vec![1; 300_000], "{kind:?}");
            assert!(peer.bytes().unwrap() > 0);
        }
    }
}
