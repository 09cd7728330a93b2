//! Words that promise work instead of being it, or that tie the project to one machine.
//!
//! The words are written in two halves here, so that this file passes its own check.

use super::Finding;
use super::source::SourceFile;

const RULE: &str = "words";

/// A text that must not stand in a tracked file, and what to do instead.
struct Word {
    text: &'static str,
    mend: &'static str,
}

const WORDS: &[Word] = &[
    Word { text: concat!("TO", "DO"), mend: "do it, or open an issue and delete the word" },
    Word { text: concat!("FIX", "ME"), mend: "fix it, or open an issue and delete the word" },
    Word { text: concat!("X", "XX"), mend: "say what is meant" },
    Word { text: concat!("unimple", "mented!"), mend: "implement it, or make the state impossible by type" },
    Word { text: concat!("to", "do!"), mend: "implement it, or make the state impossible by type" },
    Word { text: concat!("db", "g!"), mend: "use tracing, or delete it" },
    Word { text: concat!("/wo", "rk/"), mend: "an absolute path of one machine: make it relative" },
    Word { text: concat!("/home", "/"), mend: "an absolute path of one machine: make it relative" },
];

/// The only place packages may come from, as `Cargo.lock` spells it.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Every place where such a word stands, and every locked package from elsewhere.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    files.iter().flat_map(check_file).collect()
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    if file.path.ends_with("Cargo.lock") {
        return foreign_packages(file);
    }
    let mut findings = Vec::new();
    for (number, line) in file.lines() {
        for word in WORDS.iter().filter(|word| contains_word(line, word.text)) {
            let text = format!("{}: {}", word.text, word.mend);
            findings.push(Finding::violation(&file.path, number, RULE, text));
        }
    }
    findings
}

fn foreign_packages(file: &SourceFile) -> Vec<Finding> {
    let foreign = |line: &str| {
        line.strip_prefix("source = ").is_some_and(|source| source.trim_matches('"') != REGISTRY)
    };
    file.lines()
        .filter(|(_, line)| foreign(line))
        .map(|(number, line)| {
            let text = format!("{line}: packages come from crates.io only; publish, vendor or drop it");
            Finding::violation(&file.path, number, RULE, text)
        })
        .collect()
}

/// Whether `word` stands in `line` as a word of its own. A path counts only where it begins, not further down
/// in one.
fn contains_word(line: &str, word: &str) -> bool {
    let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || "_.".contains(c));
    let ends_open = word.ends_with(['/', '!']);
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next().filter(|c| *c != '.');
        !joins(before) && (ends_open || !joins(after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_whole_only() {
        let word = WORDS[2].text;
        assert!(contains_word(&format!("a {word}."), word));
        assert!(!contains_word("mktemp name.XXXXXX", word));
        let path = WORDS[6].text;
        assert!(contains_word(&format!("see {path}main"), path));
        assert!(
            !contains_word(&format!("target{path}main"), path),
            "a folder of that name further down is fine"
        );
    }

    #[test]
    fn a_package_from_elsewhere_is_named_with_its_line() {
        let text = format!(
            "[[package]]\nsource = \"{REGISTRY}\"\n[[package]]\nsource = \"git+https://example.org/a\"\n"
        );
        let found = check(&[SourceFile { path: "Cargo.lock".into(), text }]);
        assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [4]);
    }
}
