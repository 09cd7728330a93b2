//! What processes and a tmpfs hold in memory.
//!
//! Guest memory is a file on a tmpfs that several processes map, so it is counted where it lies, once; of a
//! process only the rest counts: its own pages, and its share of the program and libraries that all of them
//! map.

use super::Daemon;
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Bytes of a process that are not on a tmpfs, pages it shares divided by those who share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resident(pub(crate) u64);

impl Resident {
    /// Of the daemon.
    pub(crate) fn of_daemon(daemon: &Daemon) -> Result<Self> {
        Self::read(&format!("/proc/{}/smaps_rollup", daemon.pid()?))
    }

    /// Of the QEMU of each machine whose name begins with `prefix`, together.
    pub(crate) fn of_machines(daemon: &Daemon, prefix: &str) -> Result<Self> {
        let machines = daemon.json(&["ps"])?;
        // Pids are those of the daemon's namespace, and so is the /proc below its root.
        let proc = format!("/proc/{}/root/proc", daemon.pid()?);
        let chosen = |machine: &&Value| machine["name"].as_str().is_some_and(|name| name.starts_with(prefix));
        let each = machines.as_array().context("`ps` without a list")?.iter().filter(chosen).map(|machine| {
            let pid = machine["pid"].as_u64().context("a machine without a process")?;
            Self::read(&format!("{proc}/{pid}/smaps_rollup"))
        });
        each.sum()
    }

    fn read(path: &str) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        Self::parse(&text).with_context(|| format!("{path} has not the expected fields"))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| -> Option<u64> {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().strip_suffix(" kB")?.parse().ok()
        };
        Some(Self((field("Pss_Anon:")? + field("Pss_File:")?) << 10))
    }
}

impl std::iter::Sum for Resident {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        Self(all.map(|one| one.0).sum())
    }
}

/// Bytes that files below `folder` occupy, one with several names once.
pub(crate) fn allocated(folder: &Path) -> Result<u64> {
    let mut files = HashMap::new();
    collect(folder, &mut files)?;
    // st_blocks counts in units of 512 bytes, whatever the file system.
    Ok(files.values().sum::<u64>() * 512)
}

/// Blocks of each file below `folder`, by inode: all are on one file system.
fn collect(folder: &Path, files: &mut HashMap<u64, u64>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            collect(&entry.path(), files)?;
        } else {
            files.insert(metadata.ino(), metadata.blocks());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_names_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::write(&one, vec![1; 1 << 20]).unwrap();
        let before = allocated(folder.path()).unwrap();
        fs::hard_link(one, two).unwrap();
        assert!(before >= 1 << 20);
        assert_eq!(allocated(folder.path()).unwrap(), before);
    }

    #[test]
    fn shared_memory_is_left_out() {
        let text = "55d0-7ffd ---p 00000000 00:00 0   [rollup]\nRss: 9 kB\nPss: 700 kB\nPss_Dirty: 3 kB\n\
                    Pss_Anon:            100 kB\nPss_File:             20 kB\nPss_Shmem:           580 kB\n";
        assert_eq!(Resident::parse(text), Some(Resident(120 << 10)));
        assert_eq!(Resident::parse("Pss: 1 kB\n"), None);
    }
}
