//! Files stay small enough to read at one sitting, functions small enough to see at once.
//!
//! Over [`FILE_LIMIT`] lines a file fails, over [`FUNCTION_LIMIT`] a function. Functions are found by
//! indentation, which is exact for text that rustfmt made: the closing brace of a body stands in the column
//! of its `fn` line.

use super::Finding;
use super::source::SourceFile;

const RULE: &str = "size";
const FILE_LIMIT: usize = 600;
const FUNCTION_LIMIT: usize = 70;
/// A case tells a story from its start to its end, so a test may be longer.
const TEST_LIMIT: usize = 100;

/// Every Rust file and function that is too long.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    files.iter().filter(|file| file.is_rust()).flat_map(check_file).collect()
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    let mut findings = long_functions(file);
    let lines = file.text.lines().count();
    if lines > FILE_LIMIT {
        let text = format!("{lines} lines, the limit is {FILE_LIMIT}: split it by subject");
        findings.push(Finding::violation(&file.path, 0, RULE, text));
    }
    findings
}

fn long_functions(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let limit = if file.path.contains("tests/") { TEST_LIMIT } else { FUNCTION_LIMIT };
    let mut open: Option<(usize, &str, usize)> = None;
    for (number, line) in file.lines() {
        let indent = line.len() - line.trim_start().len();
        if let Some((start, name, column)) = open
            && indent == column
            && line.trim_end() == format!("{}}}", " ".repeat(column))
        {
            let length = number - start + 1;
            if length > limit {
                let text = format!("{name} has {length} lines, the limit is {limit}: name its steps");
                findings.push(Finding::violation(&file.path, start, RULE, text));
            }
            open = None;
        }
        if open.is_none()
            && let Some(name) = function_name(line)
            && !line.trim_end().ends_with(['}', ';'])
        {
            open = Some((number, name, indent));
        }
    }
    findings
}

/// The name of the function that `line` begins to define.
fn function_name(line: &str) -> Option<&str> {
    const QUALIFIERS: &[&str] = &["pub", "const", "async", "unsafe", "extern", "\"C\""];
    let mut words = line.split_whitespace();
    loop {
        let word = words.next()?;
        if word == "fn" {
            let name = words.next()?;
            return Some(name.split(['(', '<']).next().unwrap_or(name));
        }
        if !QUALIFIERS.contains(&word) && !word.starts_with("pub(") {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: String) -> SourceFile {
        SourceFile { path: "a.rs".into(), text }
    }

    #[test]
    fn a_long_function_is_found_and_a_short_one_after_it_is_not() {
        let body = "        step();\n".repeat(FUNCTION_LIMIT);
        let text = format!(
            "impl A {{\n    pub(crate) async fn long<T>(&self) {{\n{body}    }}\n\n    fn short() {{\n    }}\n}}\n"
        );
        let found = check(&[file(text)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].line, 2);
        assert!(found[0].text.starts_with("long has"));
    }

    #[test]
    fn a_declaration_without_body_does_not_swallow_the_next_function() {
        let body = "    step();\n".repeat(FUNCTION_LIMIT - 20);
        let text = format!(
            "trait T {{\n    fn declared(&self);\n}}\n\nfn one() {{\n{body}}}\n\nfn two() {{\n{body}}}\n"
        );
        assert_eq!(check(&[file(text)]), []);
    }

    #[test]
    fn a_long_file_fails() {
        let count = |lines: usize| check(&[file("//\n".repeat(lines))]).len();
        assert_eq!((count(FILE_LIMIT), count(FILE_LIMIT + 1)), (0, 1));
    }
}
