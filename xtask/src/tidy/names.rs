//! Names of files are nouns of the field. Private words, gerunds and verbs need an entry here.
//!
//! The words are those of docs/glossary.md; the refused ones are what they replaced.

use super::Finding;
use super::source::SourceFile;

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

/// A file of one verb of the command line.
const COMMANDS: &str = "/commands/";

/// Every source file of the product that is named otherwise.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    files.iter().filter(|file| is_product(&file.path)).filter_map(check_file).collect()
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

    fn found(path: &str) -> usize {
        check(&[SourceFile { path: path.into(), text: String::new() }]).len()
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
