//! A finished experiment: the table for people and the JSON file for the record.
//!
//! The shape of the file: `{"bench", "commit", "date", "machine", "quick", "undone": [...], "rows": [...]}`,
//! one object a [`Row`]. A file appears whole or not at all.

use super::Row;
use super::machine;
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// All rows of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Name of the experiment.
    bench: String,
    /// Commit it ran at; `+` means with changes on top.
    commit: String,
    /// Day on which it ended, in UTC.
    date: Option<String>,
    /// What it ran on.
    machine: String,
    /// Whether it ran with fewer repetitions.
    quick: bool,
    /// Rows of the experiments that could not be done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    undone: Vec<String>,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(bench: &str, quick: bool, undone: Vec<String>, rows: Vec<Row>) -> Self {
        let (commit, date, machine) = (machine::commit(), machine::date(), machine::describe());
        Self { bench: bench.to_owned(), commit, date, machine, quick, undone, rows }
    }

    /// The rows as a table.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "row",
            "case",
            "value",
            "unit",
            "peer",
            "peer value",
            "ratio",
            "goal",
            "met",
            "n",
            "min",
            "max",
        ]);
        for row in &self.rows {
            table.add_row([
                row.row.to_owned(),
                row.case.clone(),
                number(row.value),
                row.unit.to_owned(),
                row.peer.clone().unwrap_or_default(),
                row.peer_value.map(number).unwrap_or_default(),
                row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
                row.goal.clone().unwrap_or_default(),
                row.met.map(|met| if met { "yes" } else { "NO" }.to_owned()).unwrap_or_default(),
                row.n.to_string(),
                number(row.min),
                number(row.max),
            ]);
        }
        for column in [2, 5, 6, 9, 10, 11] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// Whether the checkout was as committed.
    pub(crate) fn is_clean(&self) -> bool {
        !self.commit.ends_with('+')
    }

    /// The line above the table.
    pub(crate) fn heading(&self) -> String {
        format!("{} at {} on {}", self.bench, self.commit, self.machine)
    }

    /// Writes `NAME.json` into `folder`, which is made if it is not there.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf> {
        write(folder, &self.bench, self)
    }

    /// Writes the rows into `SET.json` of `folder` in place of those of the same names. Each tells its commit
    /// if it is not that of the record. A record that was quick is begun anew.
    pub(crate) fn write_into(&self, set: &str, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(format!("{set}.json"));
        let old: Option<Value> = match std::fs::read(&path) {
            Ok(text) => Some(serde_json::from_slice(&text).with_context(|| path.display().to_string())?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let Some(mut record) = old.filter(|record| record["quick"] == false) else {
            let mut record = serde_json::to_value(self)?;
            record["bench"] = set.into();
            return write(folder, set, &record);
        };
        let names: Vec<&str> = self.rows.iter().map(|row| row.row).collect();
        let is_new = |row: &Value| row["row"].as_str().is_some_and(|name| names.contains(&name));
        let rows = record["rows"].as_array_mut().context("a record without rows")?;
        rows.retain(|row| !is_new(row));
        let kept = std::mem::take(rows);
        let same_commit = record["commit"] == self.commit;
        let new = self.rows.iter().map(|row| {
            let mut row = serde_json::to_value(row)?;
            if !same_commit {
                row["commit"] = self.commit.as_str().into();
            }
            Ok(row)
        });
        record["rows"] = kept.into_iter().map(Ok).chain(new).collect::<Result<Vec<Value>>>()?.into();
        let mut undone = record["undone"].as_array().cloned().unwrap_or_default();
        let is_done = |rows: &str| rows.split(", ").any(|row| names.contains(&row));
        undone.retain(|rows| !rows.as_str().is_some_and(is_done));
        undone.extend(self.undone.iter().map(|rows| rows.as_str().into()));
        record["undone"] = undone.into();
        write(folder, set, &record)
    }
}

fn write(folder: &Path, name: &str, record: &impl Serialize) -> Result<PathBuf> {
    let path = folder.join(format!("{name}.json"));
    let write = || -> Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer_pretty(&mut file, record)?;
        file.write_all(b"\n")?;
        file.persist(&path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Three or more significant digits, never an exponent.
pub(crate) fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::super::{Goal, Samples};
    use super::*;

    #[test]
    fn the_file_has_the_fields_that_readers_rely_on() {
        let samples = Samples::new(vec![1.5, 2.5, 3.5]);
        let row = Row::new("store.ingest", "idle", "MB/s", &samples)
            .against("restic", &Samples::new(vec![5.0]))
            .goal(Goal::PeerAtLeast(1.0));
        let folder = tempfile::tempdir().unwrap();
        let path = Report::new("store", true, Vec::new(), vec![row]).write(folder.path()).unwrap();
        assert!(path.ends_with("store.json"));
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let row = &json["rows"][0];
        assert_eq!(row["value"], 2.5);
        assert_eq!(row["ratio"], 0.5);
        assert_eq!(row["met"], false);
        for field in ["bench", "commit", "date", "machine", "quick"] {
            assert!(!json[field].is_null(), "{field}");
        }
        for field in ["row", "case", "unit", "peer", "peer_value", "goal", "n", "min", "max"] {
            assert!(!row[field].is_null(), "{field}");
        }
    }

    #[test]
    fn what_is_measured_again_takes_the_place_of_its_rows_in_the_record_of_the_set() {
        let folder = tempfile::tempdir().unwrap();
        let row = |name, value| Row::new(name, "idle", "ms", &Samples::new(vec![value]));
        let report = |quick, undone: &[&str], rows| {
            let undone = undone.iter().map(|&rows| rows.to_owned()).collect();
            Report::new("set", quick, undone, rows)
        };
        let read = || -> Value {
            serde_json::from_slice(&std::fs::read(folder.path().join("set.json")).unwrap()).unwrap()
        };
        report(true, &[], vec![row("a", 1.0), row("b", 2.0)]).write(folder.path()).unwrap();
        report(false, &["b, c"], vec![row("a", 3.0)]).write_into("set", folder.path()).unwrap();
        let first = read();
        assert_eq!((first["rows"].as_array().unwrap().len(), &first["quick"]), (1, &Value::Bool(false)));
        let mut again = report(false, &[], vec![row("b", 4.0)]);
        again.commit = "another".to_owned();
        again.write_into("set", folder.path()).unwrap();
        let second = read();
        let rows = second["rows"].as_array().unwrap();
        assert_eq!((&rows[0], rows[1]["value"].as_f64()), (&first["rows"][0], Some(4.0)));
        assert_eq!((&rows[1]["commit"], &second["undone"]), (&"another".into(), &Value::Array(Vec::new())));
    }
}
