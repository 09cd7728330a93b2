//! Comments are sentences that name their noun, in lines of at most [`WIDTH`] columns.
//!
//! Checked in the product: a block has three words or more and does not begin with a word that points at
//! something before it; a module comment does not begin with a question word. Width is checked in every Rust
//! file.

use super::Finding;
use super::source::SourceFile;

const RULE: &str = "comments";
const WIDTH: usize = 110;

/// Words that point at something that the block has not named.
const POINTERS: &[&str] = &[
    "It ",
    "Its ",
    "They ",
    "Their ",
    "Them ",
    "These ",
    "Those ",
    "This ",
    "That ",
    "One of",
    "Whoever ",
    "The same",
    "The other ",
    "The others ",
    "Same ",
    "Of ",
    "By ",
    "So ",
    "And ",
    "But ",
    "Also ",
    "He ",
    "Who ",
];

/// First words of a module comment that ask instead of saying what the module is.
const QUESTIONS: &[&str] =
    &["What ", "Whether ", "Where ", "Who ", "Whose ", "Whom ", "How ", "Why ", "Which ", "When "];

/// Every comment that breaks a rule.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    files.iter().filter(|file| file.is_rust()).flat_map(check_file).collect()
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_product = (file.path.starts_with("crates/") || file.path.starts_with("guest/"))
        && !file.path.contains("/tests/")
        && !file.path.ends_with("tests.rs");
    let (mut block, mut start, mut is_first) = (Vec::new(), 0, true);
    for (number, line) in file.lines().chain([(usize::MAX, "")]) {
        match comment(line) {
            Some(text) => {
                if line.chars().count() > WIDTH {
                    let text = format!("wider than {WIDTH} columns");
                    findings.push(Finding::violation(&file.path, number, RULE, text));
                }
                if block.is_empty() {
                    start = number;
                }
                block.push(text);
            }
            None if !block.is_empty() => {
                let text = block.join(" ");
                let wrong = objection(text.trim(), is_first).filter(|_| is_product);
                findings.extend(wrong.map(|wrong| Finding::violation(&file.path, start, RULE, wrong)));
                (block, is_first) = (Vec::new(), false);
            }
            None => {}
        }
    }
    findings
}

/// The text of a line that is a comment and nothing else.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.strip_prefix(['/', '!']).unwrap_or(text).trim_start_matches(' '))
}

fn objection(text: &str, is_module: bool) -> Option<String> {
    if text.split_whitespace().count() < 3 {
        return Some(format!("{text:?}: two words say no more than the name; write a sentence, or nothing"));
    }
    let begins = |words: &&&str| text.starts_with(**words);
    if let Some(word) = POINTERS.iter().find(begins) {
        return Some(format!("begins with {:?}: name the noun", word.trim_end()));
    }
    let question = QUESTIONS.iter().find(begins).filter(|_| is_module)?;
    Some(format!("a module comment that begins with {:?}: say what the module is", question.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<usize> {
        let file = SourceFile { path: path.into(), text: text.into() };
        check(&[file]).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_block_is_a_sentence_that_names_its_noun() {
        let text = "//! Pages of a machine.\n\n/// Why.\nfn a() {}\n/// The same.\nfn b() {}\n// It is so because of that.\n";
        assert_eq!(found("crates/a/b/src/c.rs", text), [3, 5, 7]);
        assert_eq!(found("crates/a/b/tests/it/c.rs", text), [0; 0]);
        assert_eq!(found("crates/a/b/src/c.rs", "//! What a machine is made of.\n"), [1]);
        assert_eq!(
            found("crates/a/b/src/c.rs", "//! Parts of a machine.\n\n/// What is left of it.\n"),
            [0; 0]
        );
    }

    #[test]
    fn the_lines_of_one_block_are_read_together() {
        assert_eq!(found("crates/a/b/src/c.rs", "//! Pages\n//! of a machine.\n"), [0; 0]);
    }

    #[test]
    fn width_counts_in_tests_too() {
        let wide = format!("    // {}\n", "a ".repeat(60));
        assert_eq!(found("e2e/tests/it/a.rs", &wide), [1]);
    }
}
