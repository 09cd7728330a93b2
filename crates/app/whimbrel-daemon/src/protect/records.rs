//! Protection records: what a restarted daemon must know before it runs a machine.
//!
//! A primary's record is durable before the standby hears of the protection, and removed only when no standby
//! can take over by it any more. A machine with such a record must not run until its owner is determined. A
//! standby's record is durable before it runs a machine that it took over. One JSON file each, in
//! DATA/protections, with the machine and the protection in its name, so that one that cannot be read holds
//! only its machine.

use crate::{core::error::DaemonError, protect::unreadable::UnreadableRecord};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_api::ProtectRequest;
use whimbrel_core::{HostName, MachineName, WitnessAddress};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::protocol::ProtectionId;
use whimbrel_wire::{atomic_file, json_file};

const FORMAT: u32 = 1;

/// Record of one protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProtectionRecord {
    format: u32,
    pub(crate) id: ProtectionId,
    pub(crate) name: MachineName,
    pub(crate) handover: HandoverId,
    pub(crate) side: ProtectionSide,
}

/// Side of the protection that this host is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "side")]
pub(crate) enum ProtectionSide {
    /// Primary: the machine ran here.
    Primary {
        /// The request of the user.
        request: ProtectRequest,
        /// Whether this host has yielded the machine: then it never runs here unless the standby returns it.
        gave_up: bool,
    },
    /// Primary of an ended protection: the machine stays here. The standby has not been notified yet.
    Ended {
        /// Host that must be notified.
        standby: HostName,
        /// Witness that may then delete the protection.
        witness: Option<WitnessAddress>,
        /// Whether another protection can use its pages.
        keep: bool,
    },
    /// Standby that has not recorded a takeover. A restarted daemon discards what it has of the machine and
    /// tells the primary that the protection has ended. The name is of an earlier version, which recorded
    /// only standbys that were loading.
    Loading {
        /// The primary host.
        from: HostName,
    },
    /// Standby that took the machine over.
    TookOver {
        /// The primary host.
        from: HostName,
        /// Time of the takeover.
        at_ms: u64,
    },
}

impl ProtectionRecord {
    pub(crate) fn new(
        id: ProtectionId,
        name: &MachineName,
        handover: HandoverId,
        side: ProtectionSide,
    ) -> Self {
        Self { format: FORMAT, id, name: name.clone(), handover, side }
    }
}

/// The directory of all records.
#[derive(Debug, Clone)]
pub(crate) struct ProtectionRecords(PathBuf);

impl ProtectionRecords {
    /// Opens the directory, and creates it if it is missing.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DaemonError> {
        fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        // What an earlier daemon has prepared ended with it, as its standbys did.
        let entries = fs::read_dir(&dir).map_err(|source| DaemonError::io("read", &dir, source))?;
        let paths = entries.flatten().map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|it| it == PREPARED)).for_each(|path| remove(&path));
        Ok(Self(dir))
    }

    fn path(&self, note: &ProtectionRecord) -> PathBuf {
        self.0.join(format!("{}.{}.json", note.name, note.id))
    }

    /// Path of the record by an earlier version, which had no machine in the name of the file.
    fn earlier_path(&self, id: ProtectionId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Writes a record durably.
    pub(crate) fn put(&self, note: &ProtectionRecord) -> Result<(), DaemonError> {
        write(&self.path(note), note).inspect(|()| remove(&self.earlier_path(note.id)))
    }

    /// Reserves the space of a record, durably: a full disk does not prevent its [`Self::put_prepared`].
    pub(crate) fn prepare(&self, note: &ProtectionRecord) -> Result<(), DaemonError> {
        write(&prepared_path(&self.path(note), PREPARED), note)
    }

    /// Writes a record durably; if that fails, the prepared one.
    pub(crate) fn put_prepared(&self, note: &ProtectionRecord) -> Result<(), DaemonError> {
        let written = write_prepared(&self.path(note), PREPARED, note);
        written.inspect(|()| remove(&self.earlier_path(note.id)))
    }

    /// Removes a record. If it reappears, the other hosts are asked once more.
    pub(crate) fn remove(&self, note: &ProtectionRecord) {
        remove(&prepared_path(&self.path(note), PREPARED));
        remove(&self.path(note));
        remove(&self.earlier_path(note.id));
    }

    /// Reads all records, and says which cannot be read: their machines may belong to other hosts.
    pub(crate) fn all(&self) -> Result<(Vec<ProtectionRecord>, Vec<UnreadableRecord>), DaemonError> {
        read_all(&self.0)
    }
}

/// Writes a JSON file atomically and durably.
pub(in crate::protect) fn write(path: &Path, content: &impl Serialize) -> Result<(), DaemonError> {
    json_file::replace(path, content).map_err(|source| DaemonError::io("write", path, source))
}

/// Ending of a prepared record of a takeover.
const PREPARED: &str = "prepared";

/// Path of a record that was prepared to replace the one at `path`.
pub(in crate::protect) fn prepared_path(path: &Path, ending: &str) -> PathBuf {
    path.with_extension(ending)
}

/// Writes a JSON file atomically and durably; if that fails, puts the prepared one in its place, which needs
/// no space.
pub(in crate::protect) fn write_prepared(
    path: &Path,
    ending: &str,
    content: &impl Serialize,
) -> Result<(), DaemonError> {
    let prepared = prepared_path(path, ending);
    write(path, content).inspect(|()| remove(&prepared)).or_else(|error| {
        tracing::error!(error = &error as &dyn std::error::Error, "using the space that was reserved");
        let placed = fs::rename(&prepared, path).and_then(|()| sync_folder(path));
        placed.map_err(|_| error)
    })
}

fn sync_folder(path: &Path) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), |folder| fs::File::open(folder)?.sync_all())
}

/// Removes a file that is no longer needed.
pub(in crate::protect) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove the record of a protection");
        }
        _ => {}
    }
}

/// Reads all JSON files of a directory, each on its own, once they are durable.
pub(in crate::protect) fn read_all<T: DeserializeOwned>(
    dir: &Path,
) -> Result<(Vec<T>, Vec<UnreadableRecord>), DaemonError> {
    let failed = |source| DaemonError::io("read", dir, source);
    let (mut found, mut unreadable) = (Vec::new(), Vec::new());
    atomic_file::make_durable(dir).map_err(|source| DaemonError::io("sync", dir, source))?;
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|ending| ending != "json") {
            continue;
        }
        match json_file::read_format(&path, FORMAT) {
            Ok(one) => found.push(one),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "cannot read the record of a protection; it stays as it is, and what it is about is held");
                unreadable.push(UnreadableRecord::new(path, error.to_string()));
            }
        }
    }
    Ok((found, unreadable))
}

/// Why the record of a protection, or of one that this host is the witness of, cannot be read.
pub(crate) fn check(path: &Path) -> std::io::Result<()> {
    json_file::read_format::<serde_json::Value>(path, FORMAT).map(drop)
}

/// A folder with little room, on a file system of its own.
#[cfg(test)]
pub(in crate::protect) struct FullDisk(tempfile::TempDir);

#[cfg(test)]
impl FullDisk {
    pub(in crate::protect) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(dir.path());
        assert!(mount.status().unwrap().success());
        Self(dir)
    }

    pub(in crate::protect) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(in crate::protect) fn fill(&self) {
        let mut file = fs::File::create(self.path().join("full")).unwrap();
        while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    }
}

#[cfg(test)]
impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.path()).status();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_takeover_is_recorded_on_a_full_disk() {
        let full = FullDisk::new();
        let records = ProtectionRecords::open(full.path().to_owned()).unwrap();
        let (id, from) = (ProtectionId([1; 16]), "alpha".parse::<HostName>().unwrap());
        let note = |side| ProtectionRecord::new(id, &"web".parse().unwrap(), HandoverId([2; 16]), side);
        let took = note(ProtectionSide::TookOver { from: from.clone(), at_ms: 5 });
        records.put(&note(ProtectionSide::Loading { from })).unwrap();
        records.prepare(&took).unwrap();
        full.fill();
        records.put(&took).expect_err("the disk is full");
        records.put_prepared(&took).unwrap();
        assert_eq!(records.all().unwrap(), (vec![took.clone()], vec![]));
        records.remove(&took);
        assert_eq!(records.all().unwrap(), (vec![], vec![]));
    }
}
