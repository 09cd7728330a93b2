//! House rules that a compiler does not know. Each rule is one file here with one entry function.
//!
//! A rule gets the tracked text of the workspace or the package graph and returns findings; it prints
//! nothing. A finding names the place, the rule and how to mend it. A note is shown and fails nothing.

mod arrows;
mod comments;
mod dependencies;
mod ignored;
mod licences;
pub(crate) mod links;
pub(crate) mod metadata;
mod names;
mod opening;
mod size;
mod source;
mod words;

use anyhow::{Result, bail};
use std::fmt;
use std::path::Path;

/// Something a rule has to say about one place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Path from the top folder.
    path: String,
    /// Line, from 1; 0 is the file as a whole.
    line: usize,
    /// The rule's name.
    rule: &'static str,
    /// What is wrong and how to mend it.
    text: String,
    weight: Weight,
}

/// Whether a finding fails the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weight {
    Note,
    Violation,
}

impl Finding {
    fn violation(path: &str, line: usize, rule: &'static str, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule, text: text.into(), weight: Weight::Violation }
    }

    fn note(path: &str, line: usize, rule: &'static str, text: impl Into<String>) -> Self {
        Self { weight: Weight::Note, ..Self::violation(path, line, rule, text) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, rule, text, weight } = self;
        let word = if *weight == Weight::Note { "note: " } else { "" };
        match line {
            0 => write!(f, "{path}: {word}{rule}: {text}"),
            _ => write!(f, "{path}:{line}: {word}{rule}: {text}"),
        }
    }
}

/// Checks every rule, prints what was found, fails if any of it is a violation.
pub(crate) fn run(root: &Path) -> Result<()> {
    let graph = metadata::read::<metadata::Graph>(root)?;
    let files = source::tracked(root)?;
    let mut findings = arrows::check(&graph);
    findings.extend(licences::check(&graph));
    findings.extend(dependencies::check(&graph, &files));
    findings.extend(size::check(&files));
    findings.extend(opening::check(&files));
    findings.extend(words::check(&files));
    findings.extend(names::check(&files));
    findings.extend(comments::check(&files));
    findings.extend(links::check(root, &files));
    findings.extend(ignored::check(&files));

    findings.iter().for_each(|finding| eprintln!("{finding}"));
    let violations = findings.iter().filter(|f| f.weight == Weight::Violation).count();
    if violations > 0 {
        bail!("{violations} violations of house rules");
    }
    println!("tidy: {} packages, {} files, nothing against the rules", graph.packages.len(), files.len());
    Ok(())
}
