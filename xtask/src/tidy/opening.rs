//! Every Rust file opens with a module comment that says what it is for.

use super::Finding;
use super::source::SourceFile;

const RULE: &str = "opening";

/// Every Rust file that begins with something else.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let silent = files.iter().filter(|file| file.is_rust() && !has_comment(&file.text));
    silent
        .map(|file| {
            let text = "begin the file with a //! comment: what it does, what not, how it fails";
            Finding::violation(&file.path, 1, RULE, text)
        })
        .collect()
}

/// A fuzz target must begin with an inner attribute, so attributes may stand before the comment.
fn has_comment(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with("#!["));
    lines.next().is_some_and(|line| line.strip_prefix("//!").is_some_and(|rest| !rest.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_comment_is_none() {
        assert!(has_comment("//! Frames.\nuse a;\n"));
        assert!(has_comment("#![no_main]\n//! Frames.\n"));
        assert!(!has_comment("//!\nuse a;\n"));
        assert!(!has_comment("// Frames.\n"));
        assert!(!has_comment(""));
    }
}
