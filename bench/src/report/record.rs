//! Records of `bench/results/`: the files as they were written, and which of them speaks for a row.
//!
//! A row often stands in several records: in that of a whole set and in that of the experiment alone. One
//! record speaks for all cases of a row name: full before quick, then the later day, then that of the
//! experiment alone.

use crate::run::SETS;
use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One file of `bench/results/`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Record {
    /// Name of the experiment or set, which is the name of the file.
    pub(super) bench: String,
    pub(super) commit: String,
    pub(super) machine: String,
    /// Day of the run; older records have none.
    pub(super) date: Option<String>,
    /// Whether the record was made with fewer repetitions and smaller inputs.
    pub(super) quick: bool,
    /// Rows of the experiments of that run that could not be done.
    #[serde(default)]
    pub(super) undone: Vec<String>,
    pub(super) rows: Vec<RecordedRow>,
}

/// One row of a record, as `harness::Row` wrote it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct RecordedRow {
    pub(super) row: String,
    pub(super) case: String,
    pub(super) unit: String,
    pub(super) value: f64,
    pub(super) peer: Option<String>,
    pub(super) peer_value: Option<f64>,
    pub(super) ratio: Option<f64>,
    pub(super) goal: Option<String>,
    pub(super) met: Option<bool>,
    pub(super) n: usize,
    pub(super) min: f64,
    pub(super) max: f64,
    /// Commit of a row that was measured again after the rest of its record.
    pub(super) commit: Option<String>,
}

/// All records, in the order of their names.
#[derive(Debug)]
pub(super) struct Records(Vec<Record>);

/// One row with the record that speaks for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) record: &'a Record,
    pub(super) row: &'a RecordedRow,
}

impl Records {
    /// Reads every `*.json` of a folder.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut records = Vec::new();
        let files = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for file in files {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                records.push(read(&path).with_context(|| format!("cannot read {}", path.display()))?);
            }
        }
        ensure!(!records.is_empty(), "{} holds no records", folder.display());
        Ok(Self::new(records))
    }

    pub(super) fn new(mut records: Vec<Record>) -> Self {
        records.sort_by(|a, b| a.bench.cmp(&b.bench));
        Self(records)
    }

    /// Every row of the records that speak for them, in the order of the records.
    pub(super) fn entries(&self) -> Vec<Entry<'_>> {
        let speakers = self.speakers();
        let speaks = |entry: &Entry<'_>| speakers.get(entry.row.row.as_str()) == Some(&&*entry.record.bench);
        self.all().filter(speaks).collect()
    }

    /// Every row that another record speaks for, by the name of the record that has it.
    pub(super) fn replaced(&self) -> BTreeMap<&str, Vec<&RecordedRow>> {
        let speakers = self.speakers();
        let mut replaced: BTreeMap<&str, Vec<&RecordedRow>> = BTreeMap::new();
        for Entry { record, row } in self.all() {
            if speakers.get(row.row.as_str()) != Some(&&*record.bench) {
                replaced.entry(&record.bench).or_default().push(row);
            }
        }
        replaced
    }

    /// The record that speaks for each row name.
    fn speakers(&self) -> BTreeMap<&str, &str> {
        let mut best: BTreeMap<&str, &Record> = BTreeMap::new();
        for Entry { record, row } in self.all() {
            let speaker = best.entry(&row.row).or_insert(record);
            if record.rank() > speaker.rank() {
                *speaker = record;
            }
        }
        best.into_iter().map(|(row, record)| (row, &*record.bench)).collect()
    }

    fn all(&self) -> impl Iterator<Item = Entry<'_>> {
        self.0.iter().flat_map(|record| record.rows.iter().map(move |row| Entry { record, row }))
    }
}

impl Record {
    /// The record with the higher rank speaks for the rows that both have.
    fn rank(&self) -> (bool, Option<&str>, bool, &str) {
        let is_set = SETS.iter().any(|(set, _)| *set == self.bench);
        (!self.quick, self.date.as_deref(), !is_set, &self.bench)
    }
}

impl Entry<'_> {
    /// Limits to what the row can tell: few measurements, a quick run, another commit than its record's.
    pub(super) fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if self.record.quick {
            caveats.push("`quick`".to_owned());
        }
        if self.row.n < 5 {
            caveats.push(format!("`n={}`", self.row.n));
        }
        caveats.extend(self.row.commit.as_ref().map(|commit| format!("at `{}`", short(commit))));
        caveats
    }
}

/// The first digits of a commit, as many as in the shortest one of the records.
fn short(commit: &str) -> &str {
    commit.get(..7).unwrap_or(commit)
}

fn read(path: &Path) -> Result<Record> {
    let record: Record = serde_json::from_slice(&std::fs::read(path)?)?;
    let name = path.file_stem().and_then(|name| name.to_str());
    ensure!(name == Some(&*record.bench), "the record is of {:?}, not of its file's name", record.bench);
    Ok(record)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn record(bench: &str, quick: bool, rows: &[RecordedRow]) -> Record {
        Record {
            bench: bench.into(),
            commit: "0123456789ab".into(),
            machine: "one".into(),
            date: None,
            quick,
            undone: Vec::new(),
            rows: rows.to_vec(),
        }
    }

    pub(in super::super) fn row(
        name: &str,
        case: &str,
        value: f64,
        peer: Option<(&str, f64)>,
    ) -> RecordedRow {
        RecordedRow {
            row: name.into(),
            case: case.into(),
            unit: "ms".into(),
            value,
            peer: peer.map(|(peer, _)| peer.into()),
            peer_value: peer.map(|(_, value)| value),
            ratio: peer.map(|(_, theirs)| value / theirs),
            goal: None,
            met: None,
            n: 7,
            min: value,
            max: value,
            commit: None,
        }
    }

    fn values(records: Vec<Record>) -> Vec<f64> {
        Records::new(records).entries().iter().map(|entry| entry.row.value).collect()
    }

    #[test]
    fn one_record_speaks_for_a_row() {
        let (old, new) = (row("a.b", "", 1.0, None), row("a.b", "", 2.0, None));
        let other = row("c.d", "", 9.0, None);
        let set = record("run", true, &[old.clone(), other.clone()]);
        assert_eq!(values(vec![set.clone(), record("a", true, std::slice::from_ref(&new))]), [2.0, 9.0]);
        let full = Record { quick: false, ..set.clone() };
        assert_eq!(values(vec![full, record("a", true, std::slice::from_ref(&new))]), [1.0, 9.0]);
        let later = Record { date: Some("2026-11-24".into()), ..set };
        let records = Records::new(vec![later, record("a", true, &[new])]);
        assert_eq!(records.replaced()["a"].len(), 1);
    }

    #[test]
    fn a_row_of_a_quick_record_says_so() {
        let quick = record("a", true, &[RecordedRow { n: 2, ..row("a.b", "", 1.0, None) }]);
        let records = Records::new(vec![quick]);
        assert_eq!(records.entries()[0].caveats(), ["`quick`", "`n=2`"]);
    }
}
