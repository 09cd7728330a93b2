//! A finished experiment: the table for people and the JSON file for the record.
//!
//! The shape of the file: `{"bench", "commit", "date", "machine", "quick", "undone": [...], "rows": [...]}`,
//! one object a [`Row`]. A file appears whole or not at all.

use super::Row;
use super::machine;
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
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
        let path = folder.join(format!("{}.json", self.bench));
        let write = || -> Result<()> {
            std::fs::create_dir_all(folder)?;
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            serde_json::to_writer_pretty(&mut file, self)?;
            file.write_all(b"\n")?;
            file.persist(&path)?;
            Ok(())
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
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
}
