//! Records of capsules that are partial here because most of their pages are in a bucket: one file, durable
//! before such a capsule is named.

use crate::core::error::DaemonError;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Mutex,
};
use whimbrel_core::{CapsuleId, lock};
use whimbrel_wire::json_file;

/// Content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    /// Location of the bucket of each capsule.
    capsules: BTreeMap<CapsuleId, String>,
}

pub(super) struct BucketRecords {
    file: PathBuf,
    /// None if the file cannot be read: nothing is known then, and the file stays as it is.
    stored: Mutex<Option<Stored>>,
}

/// Why the file cannot be read, if it cannot.
pub(crate) fn check(file: &Path) -> io::Result<()> {
    read(file).map(drop)
}

fn read(file: &Path) -> io::Result<Stored> {
    match json_file::read(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Stored::default()),
        read => read,
    }
}

impl BucketRecords {
    pub(super) fn load(file: PathBuf) -> Self {
        let log = |error: &io::Error| {
            tracing::error!(path = %file.display(), %error, "cannot read which capsules are in buckets");
        };
        let stored = read(&file).inspect_err(log).ok();
        Self { file, stored: Mutex::new(stored) }
    }

    /// Buckets of all capsules.
    pub(super) fn buckets(&self) -> BTreeSet<String> {
        lock(&self.stored).iter().flat_map(|stored| stored.capsules.values().cloned()).collect()
    }

    pub(super) fn all(&self) -> Vec<(CapsuleId, String)> {
        let stored = lock(&self.stored);
        stored.iter().flat_map(|stored| &stored.capsules).map(|(id, place)| (*id, place.clone())).collect()
    }

    pub(super) fn of(&self, capsule: &CapsuleId) -> Option<String> {
        lock(&self.stored).as_ref()?.capsules.get(capsule).cloned()
    }

    pub(super) fn add(&self, capsule: CapsuleId, place: &str) -> Result<(), DaemonError> {
        self.change(|capsules| capsules.insert(capsule, place.to_owned()).as_deref() != Some(place))
    }

    pub(super) fn remove(&self, capsule: &CapsuleId) -> Result<(), DaemonError> {
        self.change(|capsules| capsules.remove(capsule).is_some())
    }

    fn change(
        &self,
        change: impl FnOnce(&mut BTreeMap<CapsuleId, String>) -> bool,
    ) -> Result<(), DaemonError> {
        let mut stored = lock(&self.stored);
        let unreadable =
            || DaemonError::UnreadableFile { path: self.file.clone(), reason: "it is damaged".into() };
        let mut changed = stored.clone().ok_or_else(unreadable)?;
        if change(&mut changed.capsules) {
            let written = json_file::replace(&self.file, &changed);
            written.map_err(|source| DaemonError::io("write", &self.file, source))?;
            *stored = Some(changed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    #[test]
    fn what_is_in_a_bucket_is_known_after_a_restart_and_a_damaged_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("buckets.json");
        let capsule = CapsuleId(Digest([7; 32]));
        BucketRecords::load(file.clone()).add(capsule, "s3://vault/vms").unwrap();
        let records = BucketRecords::load(file.clone());
        assert_eq!(records.of(&capsule).as_deref(), Some("s3://vault/vms"));
        assert_eq!(records.buckets().len(), 1);
        records.remove(&capsule).unwrap();
        assert!(BucketRecords::load(file.clone()).all().is_empty());
        std::fs::write(&file, "damaged").unwrap();
        let records = BucketRecords::load(file.clone());
        assert!(records.add(capsule, "s3://vault/vms").is_err() && records.buckets().is_empty());
        assert_eq!(std::fs::read(&file).unwrap(), b"damaged");
    }
}
