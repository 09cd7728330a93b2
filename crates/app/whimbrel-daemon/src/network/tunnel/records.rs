//! Tunnel records: the durable state of tunnels, one small file each, replaced as a whole.
//!
//! ```text
//! DATA/tunnels/home-ID.json    a machine that is away, with its network here
//! DATA/tunnels/close-ID.json   a home host that is to be told to end its tunnel
//! ```
//!
//! A record that cannot be read is left alone and reported: it costs one tunnel, not the daemon's start.

use crate::core::error::DaemonError;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs, io, path::PathBuf};
use whimbrel_core::{HostName, MachineConfig, MachineName};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_wire::json_file;

/// Longest record in bytes: a configuration and some names.
const RECORD_MAX: u64 = 1 << 20;

/// A machine of this host that runs elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HomeRecord {
    pub(super) id: TunnelId,
    pub(super) name: MachineName,
    /// Configuration, for its ports and for `ps`.
    pub(super) config: MachineConfig,
    /// The host that has the other end, or had it last.
    pub(super) away: HostName,
    pub(super) since_ms: u64,
}

/// A tunnel that its home may end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CloseRecord {
    pub(super) id: TunnelId,
    pub(super) home: HostName,
}

#[derive(Debug)]
pub(super) struct TunnelRecords {
    dir: PathBuf,
}

impl TunnelRecords {
    pub(super) fn open(dir: PathBuf) -> Result<Self, DaemonError> {
        fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        Ok(Self { dir })
    }

    pub(super) fn homes(&self) -> Vec<HomeRecord> {
        self.all("home-")
    }

    pub(super) fn closes(&self) -> Vec<CloseRecord> {
        self.all("close-")
    }

    pub(super) fn put_home(&self, note: &HomeRecord) -> Result<(), DaemonError> {
        self.put(self.path("home", note.id), note)
    }

    pub(super) fn put_close(&self, note: &CloseRecord) -> Result<(), DaemonError> {
        self.put(self.path("close", note.id), note)
    }

    pub(super) fn remove_home(&self, id: TunnelId) {
        remove(&self.path("home", id));
    }

    pub(super) fn remove_close(&self, id: TunnelId) {
        remove(&self.path("close", id));
    }

    fn path(&self, kind: &str, id: TunnelId) -> PathBuf {
        self.dir.join(format!("{kind}-{id}.json"))
    }

    fn put(&self, path: PathBuf, note: &impl Serialize) -> Result<(), DaemonError> {
        json_file::replace(&path, note).map_err(|source| DaemonError::io("write", &path, source))
    }

    fn all<T: DeserializeOwned>(&self, prefix: &str) -> Vec<T> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(prefix) && name.ends_with(".json")
        });
        let read = |path: PathBuf| match read(&path) {
            Ok(note) => Some(note),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "cannot read a tunnel record");
                None
            }
        };
        paths.filter_map(read).collect()
    }
}

/// Why the record of a tunnel cannot be read, if it cannot.
pub(crate) fn check(path: &std::path::Path) -> io::Result<()> {
    let is_home = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("home-"));
    if is_home { read::<HomeRecord>(path).map(drop) } else { read::<CloseRecord>(path).map(drop) }
}

fn read<T: DeserializeOwned>(path: &std::path::Path) -> io::Result<T> {
    if fs::metadata(path)?.len() > RECORD_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the record is too long"));
    }
    json_file::read(path)
}

fn remove(path: &std::path::Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "could not remove a tunnel record");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_there_again_until_it_is_removed_and_a_damaged_one_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let notes = TunnelRecords::open(dir.path().join("tunnels")).unwrap();
        let note = CloseRecord { id: TunnelId([7; 16]), home: "alpha".parse().unwrap() };
        notes.put_close(&note).unwrap();
        fs::write(notes.path("close", TunnelId([8; 16])), "{").unwrap();
        let again = TunnelRecords::open(dir.path().join("tunnels")).unwrap();
        assert_eq!((again.closes(), again.homes()), (vec![note.clone()], Vec::new()));
        again.remove_close(note.id);
        assert_eq!(notes.closes(), []);
    }
}
