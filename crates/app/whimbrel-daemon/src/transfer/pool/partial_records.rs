//! Partial records: the pool of each partial capsule here, durable before the capsule is named, and its open
//! reader.
//!
//! A record is removed when its capsule is complete. Until then it remains, also when the capsule itself is
//! deleted: a descendant may lack the same pages. When no capsule here is partial any more, all records are
//! removed.

use super::{capsule_reader::PooledCapsule, pool_path::PoolPath};
use crate::core::error::DaemonError;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, lock};
use whimbrel_wire::json_file;

/// How long a new record is needed although nothing leads to its capsule yet: a machine may be about to use
/// it.
const NEW_RECORD_TIME: Duration = Duration::from_secs(3600);
/// Longest record that is read.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Location of a capsule in a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartialRecord {
    pub(super) pool: PoolPath,
    /// The version of the file, as the pool numbers it.
    pub(super) version: u64,
}

pub(super) struct OpenPartial {
    pub(super) record: PartialRecord,
    open: Mutex<Option<Arc<PooledCapsule>>>,
    /// Time and subject of a record that this daemon made.
    created: Option<(Instant, String)>,
}

impl OpenPartial {
    /// A new record with its open capsule, needed by `subject`.
    pub(super) fn new(record: PartialRecord, held: Arc<PooledCapsule>, subject: String) -> Self {
        Self { record, open: Mutex::new(Some(held)), created: Some((Instant::now(), subject)) }
    }

    pub(super) fn new_subject(&self) -> Option<&str> {
        let (since, subject) = self.created.as_ref()?;
        (since.elapsed() < NEW_RECORD_TIME).then_some(subject)
    }

    /// The open capsule; concurrent callers wait while it is opened.
    pub(super) fn open_capsule<E>(
        &self,
        open: impl FnOnce(&PartialRecord) -> Result<PooledCapsule, E>,
    ) -> Result<Arc<PooledCapsule>, E> {
        let mut slot = lock(&self.open);
        match &*slot {
            Some(held) => Ok(held.clone()),
            None => Ok(slot.insert(Arc::new(open(&self.record)?)).clone()),
        }
    }
}

fn read(path: &Path) -> io::Result<PartialRecord> {
    if std::fs::metadata(path)?.len() > RECORD_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"));
    }
    json_file::read(path)
}

/// Why the record of a partial capsule cannot be read, if it cannot.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    read(path).map(drop)
}

pub(super) struct PartialRecords {
    dir: PathBuf,
    table: Mutex<BTreeMap<CapsuleId, Arc<OpenPartial>>>,
}

impl PartialRecords {
    /// Reads all records; one that cannot be read is logged and skipped.
    pub(super) fn load(dir: PathBuf) -> Result<Self, DaemonError> {
        let mut table = BTreeMap::new();
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let Some(capsule) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match read(&path) {
                Ok(note) => drop(table.insert(
                    capsule,
                    Arc::new(OpenPartial { record: note, open: Mutex::default(), created: None }),
                )),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "cannot read the record of a partial capsule")
                }
            }
        }
        Ok(Self { dir, table: Mutex::new(table) })
    }

    pub(super) fn of(&self, capsule: &CapsuleId) -> Option<Arc<OpenPartial>> {
        lock(&self.table).get(capsule).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<OpenPartial>> {
        lock(&self.table).values().cloned().collect()
    }

    pub(super) fn entries(&self) -> Vec<(CapsuleId, Arc<OpenPartial>)> {
        lock(&self.table).iter().map(|(id, noted)| (*id, noted.clone())).collect()
    }

    /// Stores a record durably.
    pub(super) fn add(&self, capsule: CapsuleId, noted: Arc<OpenPartial>) -> Result<(), DaemonError> {
        let path = self.dir.join(capsule.to_string());
        let failed = |source| DaemonError::io("write", &path, source);
        std::fs::create_dir_all(&self.dir).map_err(failed)?;
        json_file::replace(&path, &noted.record).map_err(failed)?;
        lock(&self.table).insert(capsule, noted);
        Ok(())
    }

    pub(super) fn remove(&self, capsule: &CapsuleId) {
        if lock(&self.table).remove(capsule).is_some()
            && let Err(error) = std::fs::remove_file(self.dir.join(capsule.to_string()))
        {
            tracing::warn!(%error, %capsule, "cannot remove the record of a partial capsule");
        }
    }

    /// Removes all records when nothing is missing here any more.
    pub(super) fn clear(&self) {
        let all: Vec<CapsuleId> = lock(&self.table).keys().copied().collect();
        all.iter().for_each(|capsule| self.remove(capsule));
    }
}
