//! Migration history for `whimbrel migrations`: one JSON record for each ended migration; only the newest are
//! stored.
//!
//! docs/formats/migration-record.md is the format. Nothing else depends on these files: a record that cannot
//! be written is only logged, and one that cannot be read is skipped.

use crate::{
    core::state::Core,
    core::{directories::Directories, error::DaemonError},
};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use whimbrel_api::{MigrationId, MigrationRecord};
use whimbrel_wire::json_file;

const FORMAT: u32 = 1;
const RECORDS_MAX: usize = 100;
/// More than the record of a hundred rounds needs; a larger file is not one of ours.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Serialize, Deserialize)]
struct StoredRecord {
    format: u32,
    #[serde(flatten)]
    record: MigrationRecord,
}

impl Core {
    /// All stored records, newest first.
    pub(crate) fn past_migrations(&self) -> Result<Vec<MigrationRecord>, DaemonError> {
        let dir = self.directories.migrations();
        let paths = newest_first(&dir).map_err(|source| DaemonError::io("read", &dir, source))?;
        Ok(paths.iter().filter_map(|path| read(path)).collect())
    }
}

pub(super) fn new_id() -> MigrationId {
    MigrationId(format!("{:08x}", rand::random::<u32>()))
}

/// Writes a record and deletes the oldest beyond [`RECORDS_MAX`].
pub(super) fn save(layout: &Directories, record: MigrationRecord) {
    let dir = layout.migrations();
    if let Err(error) = write(&dir, record) {
        tracing::warn!(dir = %dir.display(), %error, "cannot write the record of a migration");
    }
}

fn write(dir: &Path, record: MigrationRecord) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    // Enough digits for the next 300 years, so that names sort by time.
    let path = dir.join(format!("{:013}-{}.json", record.started_ms, record.id));
    let content = json_file::encode(&StoredRecord { format: FORMAT, record })?;
    // Atomic, but not synced: while a disk is busy, a sync takes longer than everything else at the end of a
    // migration, and the caller would wait for it.
    let beside = path.with_extension("new");
    fs::write(&beside, &content)?;
    fs::rename(&beside, &path)?;
    newest_first(dir)?.iter().skip(RECORDS_MAX).try_for_each(fs::remove_file)
}

fn newest_first(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths?;
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    paths.sort_unstable_by(|a, b| b.cmp(a));
    Ok(paths)
}

fn read(path: &Path) -> Option<MigrationRecord> {
    let read = read_checked(path);
    read.inspect_err(|error| tracing::debug!(path = %path.display(), %error, "not a record of a migration"))
        .ok()
}

fn read_checked(path: &Path) -> io::Result<MigrationRecord> {
    if fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"));
    }
    json_file::read_format::<StoredRecord>(path, FORMAT).map(|stored| stored.record)
}

/// Why the record of a migration cannot be read, if it cannot.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    read_checked(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_api::MigrationEnd;

    fn record(started_ms: u64) -> MigrationRecord {
        MigrationRecord {
            id: new_id(),
            machine: "web".parse().unwrap(),
            from: "alpha".parse().unwrap(),
            started_ms,
            request: serde_json::from_str(r#"{"host": "beta"}"#).unwrap(),
            total_ms: 1.0,
            rounds: vec![],
            end: MigrationEnd::Failed { reason: "on purpose".into() },
        }
    }

    #[test]
    fn the_newest_are_kept_and_what_is_no_record_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("migrations");
        assert!(newest_first(&place).unwrap().is_empty(), "before the first");
        for started in 1..=RECORDS_MAX as u64 + 3 {
            write(&place, record(started)).unwrap();
        }
        fs::write(place.join("0000000000999-torn.json"), b"{").unwrap();
        let times: Vec<u64> = newest_first(&place)
            .unwrap()
            .iter()
            .filter_map(|path| read(path))
            .map(|r| r.started_ms)
            .collect();
        assert_eq!(times, (4..=RECORDS_MAX as u64 + 3).rev().collect::<Vec<_>>());
    }
}
