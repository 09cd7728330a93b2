//! Protections of this host, written down: what a later daemon must know before it lets a machine run.
//!
//! A primary's note is durable before the standby hears of the protection, and struck out only when no
//! standby can take over by it any more. A machine with such a note is nobody's to run until it is settled
//! whose it is. A standby's note is durable before it runs a machine that it took over. One JSON file each,
//! in DATA/protections.

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

/// One protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProtectionRecord {
    format: u32,
    pub(crate) id: ProtectionId,
    pub(crate) name: MachineName,
    pub(crate) handover: HandoverId,
    pub(crate) side: ProtectionSide,
}

/// Which side of it this host is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "side")]
pub(crate) enum ProtectionSide {
    /// The machine ran here.
    Primary {
        /// What was asked for.
        request: ProtectRequest,
        /// Whether this host has given the machine up: then it never runs here unless the standby lets go of
        /// it.
        gave_up: bool,
    },
    /// The machine ran here and stays here, that is decided. The standby has not heard of it yet.
    Ended {
        /// Who is to hear of it.
        standby: HostName,
        /// Who may forget it then.
        witness: Option<WitnessAddress>,
        /// Whether its pages are of use for another protection.
        keep: bool,
    },
    /// The machine was given to it and is being loaded. A daemon that finds this drops what was loaded: the
    /// primary is told that the protection has ended, and still has the machine.
    Loading {
        /// From whom.
        from: HostName,
    },
    /// It took the machine over.
    TookOver {
        /// From whom.
        from: HostName,
        /// When.
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

/// The directory of them.
#[derive(Debug, Clone)]
pub(crate) struct ProtectionRecords(PathBuf);

impl ProtectionRecords {
    /// Makes the directory if it is missing.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DaemonError> {
        fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        Ok(Self(dir))
    }

    fn path(&self, id: ProtectionId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Makes a note durable.
    pub(crate) fn put(&self, note: &ProtectionRecord) -> Result<(), DaemonError> {
        write(&self.path(note.id), note)
    }

    /// Strikes it out. One that comes back costs a question to others.
    pub(crate) fn remove(&self, id: ProtectionId) {
        remove(&self.path(id));
    }

    /// All of them. One that cannot be read keeps the daemon from starting: its machine may be another
    /// host's.
    pub(crate) fn all(&self) -> Result<Vec<ProtectionRecord>, DaemonError> {
        read_all(&self.0, |note: &ProtectionRecord| note.format)
    }
}

/// Writes one JSON file whole and durable.
pub(in crate::protect) fn write(path: &Path, content: &impl Serialize) -> Result<(), DaemonError> {
    let text = serde_json::to_vec_pretty(content).expect("ids, names and numbers");
    atomic_file::replace(path, &text).map_err(|source| DaemonError::io("write", path, source))
}

/// Removes a file whose content is of no use any more.
pub(in crate::protect) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a note of a protection is left over");
        }
        _ => {}
    }
}

/// All JSON files of a directory.
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
            let reason = format!("format {} is not {FORMAT}, which this version reads", format(&one));
            return Err(bad(std::io::Error::new(std::io::ErrorKind::InvalidData, reason)));
        }
        found.push(one);
    }
    Ok(found)
}
