//! Names of files are nouns of the field. Private words, gerunds and verbs need an entry here. Names of
//! functions are no private verbs. A type's name stands in at most two crates, unless every reader knows it.
//!
//! The words are those of docs/glossary.md; the refused ones are what they replaced.

use super::Finding;
use super::source::SourceFile;
use std::collections::{BTreeMap, BTreeSet};

const RULE: &str = "names";

/// Words that only their author knew.
const PRIVATE: &[&str] = &[
    "ahead",
    "asking",
    "ballot",
    "beat",
    "beats",
    "beginning",
    "bell",
    "beside",
    "brake",
    "cave",
    "chores",
    "cut",
    "cuts",
    "elsewhere",
    "far",
    "feed",
    "filling",
    "front",
    "giving",
    "heir",
    "helper",
    "holding",
    "hot",
    "keep",
    "keeper",
    "keeping",
    "kept",
    "known",
    "landing",
    "lane",
    "lanes",
    "learnt",
    "leave",
    "ledger",
    "lending",
    "marks",
    "memo",
    "odds",
    "older",
    "order",
    "ours",
    "owed",
    "owing",
    "pace",
    "past",
    "patient",
    "permits",
    "piece",
    "pieces",
    "place",
    "places",
    "pooled",
    "pump",
    "reach",
    "recut",
    "rest",
    "retiring",
    "room",
    "seal",
    "settle",
    "settling",
    "shadow",
    "shelf",
    "slot",
    "slots",
    "standing",
    "stock",
    "strays",
    "stretch",
    "switch",
    "take_up",
    "taking",
    "turn",
    "twins",
    "walked",
    "warm",
    "whole",
    "wish",
    "wishes",
    "word",
    "words",
];

/// Names that end in `ing` and are nouns of the field.
const GERUNDS: &[&str] = &[
    "dirty_sampling",
    "fencing",
    "framing",
    "incoming",
    "input_shipping",
    "listing",
    "page_sharing",
    "running",
    "sampling",
    "seeding",
    "tree_listing",
];

/// Verbs, which name a file only where the command line has a verb of that name.
const VERBS: &[&str] = &[
    "add",
    "announce",
    "append",
    "attach",
    "decode",
    "encode",
    "execute",
    "follow",
    "inject",
    "introduce",
    "limit",
    "parse",
    "predict",
    "receive",
    "recover",
    "save",
    "send",
    "serve",
    "settle",
    "supervise",
    "write",
];

/// Verbs that told nothing of what a function does.
const PRIVATE_VERBS: &[&str] = &[
    "came", "fare", "go_on", "hear", "hears", "keep", "keeps", "kept", "landed", "lend", "let_go", "look",
    "owe", "owed", "ring", "say", "settle", "strike", "take_up", "tell", "told",
];

/// Types that may have the same name in three crates or more: every reader knows what they are.
const GENERIC: &[&str] = &[
    "Access",
    "Answer",
    "Args",
    "BoxError",
    "Call",
    "Command",
    "Decoder",
    "Encoder",
    "Entry",
    "Inner",
    "Link",
    "Options",
    "PageBatch",
    "Process",
    "Progress",
    "ReadAt",
    "Reader",
    "Report",
    "Request",
    "Result",
    "Server",
    "Shared",
    "Status",
    "Version",
];

/// A file of one verb of the command line.
const COMMANDS: &str = "/commands/";

/// Every name in the product that is against the rules.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let product: Vec<_> = files.iter().filter(|file| is_product(&file.path)).collect();
    let mut found: Vec<_> = product.iter().filter_map(|file| check_file(file)).collect();
    found.extend(product.iter().flat_map(|file| check_functions(file)));
    found.extend(check_types(&product));
    found
}

fn check_functions(file: &SourceFile) -> Vec<Finding> {
    let lines = file.text.lines().enumerate();
    let names = lines.filter_map(|(at, line)| Some((at, word(line.split_once("fn ")?.1))));
    let private = names.filter(|(_, name)| PRIVATE_VERBS.contains(name));
    let objection = |name| format!("fn {name}: a private verb; docs/glossary.md has the field's");
    private.map(|(at, name)| Finding::violation(&file.path, at + 1, RULE, objection(name))).collect()
}

fn check_types(product: &[&SourceFile]) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut last = BTreeMap::new();
    for file in product {
        let Some(home) = file.path.split('/').nth(2) else { continue };
        for name in file.text.lines().filter_map(public_type) {
            crates.entry(name).or_default().insert(home);
            last.insert(name, &file.path);
        }
    }
    let many = crates.iter().filter(|(name, homes)| homes.len() > 2 && !GENERIC.contains(name));
    let objection = |name, homes: &BTreeSet<&str>| format!("{name} is a type of {} crates", homes.len());
    many.map(|(name, homes)| Finding::violation(last[name], 0, RULE, objection(name, homes))).collect()
}

/// Name of the public type that a line defines.
fn public_type(line: &str) -> Option<&str> {
    let (visibility, rest) = line.trim_start().split_once(' ')?;
    let (kind, name) = rest.split_once(' ')?;
    let defines = visibility.starts_with("pub") && ["struct", "enum", "trait", "type"].contains(&kind);
    // A macro's name for what it defines is no name.
    defines.then(|| word(name)).filter(|name| !name.is_empty())
}

fn word(text: &str) -> &str {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or(text)
}

fn is_product(path: &str) -> bool {
    let below_src = path.starts_with("crates/") && path.contains("/src/");
    below_src && path.ends_with(".rs") && !path.contains("/src/bin/")
}

fn check_file(file: &SourceFile) -> Option<Finding> {
    let (_, inside) = file.path.split_once("/src/")?;
    let parts = inside.trim_end_matches(".rs").split('/').filter(|part| *part != "mod");
    let is_command = file.path.contains(COMMANDS);
    let wrong = parts.filter_map(|part| objection(part, is_command)).next()?;
    Some(Finding::violation(&file.path, 0, RULE, wrong))
}

fn objection(part: &str, is_command: bool) -> Option<String> {
    let stem = part.trim_end_matches("_tests");
    if stem.split('_').count() > 3 {
        return Some(format!("{part}: more than three words"));
    }
    if PRIVATE.contains(&stem) {
        return Some(format!("{part}: a private word; docs/glossary.md has the field's"));
    }
    if stem.ends_with("ing") && !GERUNDS.contains(&stem) {
        return Some(format!("{part}: a gerund; name the thing, or add the word to {}", file!()));
    }
    (VERBS.contains(&stem) && !is_command).then(|| format!("{part}: a verb; name the thing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    fn found(path: &str) -> usize {
        check(&[file(path, "")]).len()
    }

    #[test]
    fn a_private_verb_and_a_name_of_many_types_are_refused() {
        let bad = file("crates/move/m/src/state.rs", "impl A {\n    pub(crate) fn settle(&self) {}\n}\n");
        assert_eq!(check(&[bad]).len(), 1);
        let named = |name| ["a", "b", "c"].map(|home| file(&format!("crates/x/{home}/src/y.rs"), name));
        assert_eq!(check(&named("pub(crate) struct Batch<T>(T);\n")).len(), 1);
        assert_eq!(check(&named("pub struct Progress;\n")).len(), 0);
        assert_eq!(check(&named("pub struct Batch;\n")[..2]).len(), 0);
    }

    #[test]
    fn private_words_gerunds_and_verbs_are_refused() {
        assert_eq!(found("crates/move/m/src/postcopy/taking.rs"), 1);
        assert_eq!(found("crates/move/m/src/page_fetcher.rs"), 0);
        assert_eq!(found("crates/move/m/src/fetching.rs"), 1);
        assert_eq!(found("crates/move/m/src/seeding/mod.rs"), 0);
        assert_eq!(found("crates/move/m/src/receive.rs"), 1);
        assert_eq!(found("crates/app/w/src/commands/serve/mod.rs"), 0);
        assert_eq!(found("crates/app/w/src/a_name_of_four.rs"), 1);
        assert_eq!(found("crates/move/m/tests/it/taking.rs"), 0, "tests are named after what they fear");
    }
}
