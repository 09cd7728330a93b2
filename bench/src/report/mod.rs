//! The report: `docs/benchmarks.md` and its charts, made from the records in `bench/results/`.
//!
//! Equal records give equal bytes. A test compares what is in the tree with what the records say, so the page
//! cannot drift from them.

mod chart;
mod charts;
mod page;
mod record;
mod sections;
mod text;

use anyhow::{Context as _, Result, bail};
use charts::Drawn;
use record::Records;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folder of the charts, beside the page.
const PICTURES: &str = "benchmarks";

/// Writes page and charts, or only compares them.
pub(crate) fn run(check: bool) -> Result<()> {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = files(&Records::read(&bench.join("results"))?)?;
    let docs = bench.with_file_name("docs");
    if check { compare(&docs, &files) } else { write(&docs, &files) }
}

/// Every file of the report below `docs/`, by its path there.
fn files(records: &Records) -> Result<BTreeMap<PathBuf, String>> {
    let charts = charts::draw(&records.entries())?;
    let mut files = BTreeMap::from([(PathBuf::from("benchmarks.md"), page::write(records, &charts)?)]);
    for chart in charts {
        if let Drawn::Picture { name, svg, .. } = chart {
            files.insert(Path::new(PICTURES).join(format!("{name}.svg")), svg);
        }
    }
    Ok(files)
}

fn write(docs: &Path, files: &BTreeMap<PathBuf, String>) -> Result<()> {
    for stale in stale(docs, files)? {
        std::fs::remove_file(&stale).with_context(|| format!("cannot remove {}", stale.display()))?;
    }
    std::fs::create_dir_all(docs.join(PICTURES))?;
    for (path, content) in files {
        let path = docs.join(path);
        if std::fs::read_to_string(&path).is_ok_and(|old| old == *content) {
            continue;
        }
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("{}", path.display());
    }
    Ok(())
}

/// Fails if a file is missing, differs, or is of a chart that is not drawn any more.
fn compare(docs: &Path, files: &BTreeMap<PathBuf, String>) -> Result<()> {
    let differs =
        |path: &&PathBuf| !std::fs::read_to_string(docs.join(path)).is_ok_and(|old| old == files[*path]);
    let mut wrong: Vec<_> = files.keys().filter(differs).map(|path| path.display().to_string()).collect();
    wrong.extend(stale(docs, files)?.iter().map(|path| path.display().to_string()));
    if !wrong.is_empty() {
        bail!("out of date: {}; run `cargo xtask bench report`", wrong.join(", "));
    }
    Ok(())
}

/// Charts in the tree that are not among `files`.
fn stale(docs: &Path, files: &BTreeMap<PathBuf, String>) -> Result<Vec<PathBuf>> {
    let Ok(folder) = std::fs::read_dir(docs.join(PICTURES)) else { return Ok(Vec::new()) };
    let mut stale = Vec::new();
    for file in folder {
        let file = file?;
        if !files.contains_key(&Path::new(PICTURES).join(file.file_name())) {
            stale.push(file.path());
        }
    }
    stale.sort();
    Ok(stale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_the_records_say() {
        run(true).unwrap();
    }

    #[test]
    fn a_changed_missing_or_stale_file_is_found() {
        let docs = tempfile::tempdir().unwrap();
        let files = BTreeMap::from([(PathBuf::from("benchmarks.md"), "a".to_owned())]);
        assert!(compare(docs.path(), &files).is_err());
        write(docs.path(), &files).unwrap();
        compare(docs.path(), &files).unwrap();
        std::fs::write(docs.path().join("benchmarks.md"), "b").unwrap();
        assert!(compare(docs.path(), &files).is_err());
        std::fs::write(docs.path().join("benchmarks/old.svg"), "").unwrap();
        write(docs.path(), &files).unwrap();
        compare(docs.path(), &files).unwrap();
    }
}
