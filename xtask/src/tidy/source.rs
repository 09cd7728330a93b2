//! The text files of the checkout: tracked ones and new ones that are not ignored, so a rule speaks before a
//! commit.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// One text file.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Path from the top folder, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl SourceFile {
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub(crate) fn is_markdown(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// Lines with their numbers, from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Every text file git knows of or would add. Files that are not UTF-8 are no text.
pub(crate) fn tracked(root: &Path) -> Result<Vec<SourceFile>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let listing = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    let mut paths: Vec<&str> = listing.split_terminator('\0').collect();
    paths.sort_unstable();
    paths.dedup();
    // A file that is gone from the work tree but still in the index reads as an error and is left out.
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    Ok(paths
        .into_iter()
        .filter_map(|path| Some(SourceFile { path: path.to_owned(), text: read(path)? }))
        .collect())
}
