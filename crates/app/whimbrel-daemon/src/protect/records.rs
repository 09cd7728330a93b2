//! Protection records: what a restarted daemon must know before it runs a machine.
//!
//! A primary's record is durable before the standby hears of the protection, and removed only when no standby
//! can take over by it any more. A machine with such a record must not run until its owner is determined. A
//! standby's record is durable before it runs a machine that it took over. One JSON file each, in
//! DATA/protections.

use crate::core::error::DaemonError;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_api::ProtectRequest;
use whimbrel_core::{HostName, MachineName, WitnessAddress};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::protocol::ProtectionId;
use whimbrel_wire::atomic_file;

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
    /// Standby that loads a yielded machine. A restarted daemon discards it and tells the primary, which
    /// still has the machine, that the protection has ended.
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
        Ok(Self(dir))
    }

    fn path(&self, id: ProtectionId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Writes a record durably.
    pub(crate) fn put(&self, note: &ProtectionRecord) -> Result<(), DaemonError> {
        write(&self.path(note.id), note)
    }

    /// Removes a record. If it reappears, the other hosts are asked once more.
    pub(crate) fn remove(&self, id: ProtectionId) {
        remove(&self.path(id));
    }

    /// Reads all records. An unreadable one prevents the daemon from starting: its machine may belong to
    /// another host.
    pub(crate) fn all(&self) -> Result<Vec<ProtectionRecord>, DaemonError> {
        read_all(&self.0, |note: &ProtectionRecord| note.format)
    }
}

/// Writes a JSON file atomically and durably.
pub(in crate::protect) fn write(path: &Path, content: &impl Serialize) -> Result<(), DaemonError> {
    let text = serde_json::to_vec_pretty(content).expect("ids, names and numbers");
    atomic_file::replace(path, &text).map_err(|source| DaemonError::io("write", path, source))
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

/// Reads all JSON files of a directory.
pub(in crate::protect) fn read_all<T: serde::de::DeserializeOwned>(
    dir: &Path,
    format: impl Fn(&T) -> u32,
) -> Result<Vec<T>, DaemonError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|source| DaemonError::io("read", dir, source))?.flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|ending| ending != "json") {
            continue;
        }
        let bad = |source| DaemonError::io("read", &path, source);
        let one: T = serde_json::from_slice(&fs::read(&path).map_err(bad)?)
            .map_err(|error| bad(std::io::Error::from(error)))?;
        if format(&one) != FORMAT {
            let reason = format!("format {} is unknown; this version reads {FORMAT}", format(&one));
            return Err(bad(std::io::Error::new(std::io::ErrorKind::InvalidData, reason)));
        }
        found.push(one);
    }
    Ok(found)
}
