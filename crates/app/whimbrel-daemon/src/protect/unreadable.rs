//! Records of protections that cannot be read: what they say stays unknown, and nothing is done that may
//! contradict them.
//!
//! The name of a record's file has the machine and the protection. So only that machine is held: it does not
//! run here, and other hosts get no answer about its protection. A file of an earlier version has no machine
//! in its name; then every machine is held that this host would let run.

use crate::{
    core::error::DaemonError,
    machine::record::{Phase, Record},
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use whimbrel_core::MachineName;
use whimbrel_protect::protocol::ProtectionId;

/// One record that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnreadableRecord {
    pub(crate) path: PathBuf,
    pub(crate) reason: String,
    id: Option<ProtectionId>,
    name: Option<MachineName>,
}

impl UnreadableRecord {
    pub(super) fn new(path: PathBuf, reason: String) -> Self {
        let (name, id) = parts_of(&path);
        Self { path, reason, id, name }
    }

    fn refusal(&self) -> DaemonError {
        DaemonError::UnreadableFile { path: self.path.clone(), reason: self.reason.clone() }
    }
}

/// Machine and protection in the name of a record's file, as far as it has them.
fn parts_of(path: &Path) -> (Option<MachineName>, Option<ProtectionId>) {
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { return (None, None) };
    match stem.rsplit_once('.') {
        Some((name, id)) => (name.parse().ok(), id.parse().ok()),
        None => (None, stem.parse().ok()),
    }
}

/// All such records of this host.
#[derive(Debug, Default)]
pub(super) struct UnreadableRecords(pub(super) Vec<UnreadableRecord>);

impl UnreadableRecords {
    /// Refuses what is about the protection of such a record.
    pub(super) fn check(&self, id: ProtectionId) -> Result<(), DaemonError> {
        let one = self.0.iter().find(|one| one.id == Some(id));
        one.map_or(Ok(()), |one| Err(one.refusal()))
    }

    /// Takes those of `records` out whose machines may be elsewhere, and adds why to `unreadable`.
    pub(super) fn hold(
        &self,
        records: Vec<Record>,
        unreadable: &mut BTreeMap<MachineName, String>,
    ) -> Vec<Record> {
        let holds = |one: &&UnreadableRecord, record: &Record| {
            one.name.as_ref().is_none_or(|name| *name == record.name)
                && matches!(record.phase, Phase::Here | Phase::Prepared { .. })
        };
        let mut rest = Vec::with_capacity(records.len());
        for record in records {
            match self.0.iter().find(|one| holds(one, &record)) {
                Some(one) => {
                    drop(unreadable.insert(record.name, one.refusal().to_string()));
                }
                None => rest.push(record),
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::{ByteSize, MachineConfig};

    #[test]
    fn only_the_machine_in_the_name_of_the_file_is_held_and_without_one_all_that_may_run() {
        let record = |name: &str, phase| {
            let config = MachineConfig::minimal(ByteSize(1 << 20));
            let mut record = Record::new(name.parse().unwrap(), config, vec![]);
            record.phase = phase;
            record
        };
        let records = || {
            let stopped = record("old", Phase::Stopped);
            vec![record("web.2", Phase::Here), record("db", Phase::Here), stopped]
        };
        let id = ProtectionId([7; 16]);
        let held = |file: String| {
            let one = UnreadableRecord::new(PathBuf::from(file), "it is empty".into());
            let (all, mut why) = (UnreadableRecords(vec![one]), BTreeMap::new());
            assert!(all.check(id).is_err() && all.check(ProtectionId([8; 16])).is_ok());
            let rest = all.hold(records(), &mut why);
            assert_eq!(rest.len() + why.len(), 3);
            why.into_keys().map(|name| name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(held(format!("/protections/web.2.{id}.json")), ["web.2"]);
        assert_eq!(held(format!("/protections/{id}.json")), ["db", "web.2"]);
    }
}
