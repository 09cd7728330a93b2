//! An ignored test says why, and is listed on every run so that nobody forgets it.

use super::Finding;
use super::source::SourceFile;

const RULE: &str = "ignored";

/// Every ignored test: a note if it gives its reason, a violation if not.
pub(crate) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let rust = files.iter().filter(|file| file.is_rust());
    rust.flat_map(|file| file.lines().filter_map(|(number, line)| check_line(file, number, line))).collect()
}

fn check_line(file: &SourceFile, number: usize, line: &str) -> Option<Finding> {
    let rest = line.trim().strip_prefix("#[ignore")?;
    if let Some(reason) = rest.strip_prefix(" = ") {
        let reason = reason.trim_end_matches(']');
        return Some(Finding::note(&file.path, number, RULE, format!("test left out: {reason}")));
    }
    Some(Finding::violation(&file.path, number, RULE, "give the reason: #[ignore = \"why\"]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Weight;

    #[test]
    fn a_reason_turns_a_violation_into_a_note() {
        let text = ["#[test]", "#[ignore]", "fn a() {}", "#[ignore = \"needs a second host\"]"].join("\n");
        let found = check(&[SourceFile { path: "a.rs".into(), text }]);
        let shape: Vec<_> = found.iter().map(|f| (f.line, f.weight)).collect();
        assert_eq!(shape, [(2, Weight::Violation), (4, Weight::Note)]);
    }
}
