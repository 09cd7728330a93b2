//! Links in documents lead somewhere, the pages that code names exist, every page on a format or protocol is
//! named by the code that parses it, and every page is in the list of its folder.
//!
//! Only targets inside the checkout are looked at; whether a web page still stands is not this check's
//! business.

use super::Finding;
use super::source::SourceFile;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

const RULE: &str = "links";
/// Folders whose pages describe bytes that some file of the code reads or writes.
const DESCRIBED: &[&str] = &["docs/formats/", "docs/protocols/"];

/// Every broken link and every page no code points at.
pub(crate) fn check(root: &Path, files: &[SourceFile]) -> Vec<Finding> {
    let documents = files.iter().filter(|file| file.is_markdown());
    let broken = documents.flat_map(|file| check_document(root, file, files));
    broken
        .chain(missing_pages(root, files))
        .chain(unnamed_pages(files))
        .chain(unlisted_pages(files))
        .collect()
}

/// Links of a page inside the checkout: as they are written, and the paths that they mean, without anchors.
pub(crate) fn targets(page: &str, text: &str) -> impl Iterator<Item = (String, String)> {
    let inside =
        |link: &String| !link.contains("://") && !link.starts_with('#') && !link.starts_with("mailto:");
    links(text).into_iter().map(|(_, link)| link).filter(inside).map(|link| {
        let place = link.split_once('#').map_or(&*link, |(place, _)| place);
        let path = resolve(page, place);
        (link, path)
    })
}

/// Pages of the folder of a page that it links to, in their order.
pub(crate) fn pages_beside(page: &str, text: &str) -> impl Iterator<Item = String> {
    let folder = Path::new(page).parent().map(Path::to_owned);
    let beside = move |path: &String| path.ends_with(".md") && Path::new(path).parent() == folder.as_deref();
    targets(page, text).map(|(_, path)| path).filter(beside)
}

/// Pages that the `README.md` of their folder does not name, where there is one.
fn unlisted_pages(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for list in
        files.iter().filter(|file| file.path.starts_with("docs/") && file.path.ends_with("/README.md"))
    {
        let listed: BTreeSet<String> = pages_beside(&list.path, &list.text).collect();
        let folder = Path::new(&list.path).parent();
        let unlisted = files.iter().filter(|file| file.is_markdown() && file.path != list.path);
        let unlisted =
            unlisted.filter(|file| Path::new(&file.path).parent() == folder && !listed.contains(&file.path));
        findings.extend(unlisted.map(|file| {
            let text = format!("{} does not list this page", list.path);
            Finding::violation(&file.path, 0, RULE, text)
        }));
    }
    findings
}

fn check_document(root: &Path, file: &SourceFile, files: &[SourceFile]) -> Vec<Finding> {
    let links = links(&file.text);
    links
        .into_iter()
        .filter_map(|(number, target)| {
            let why = objection(root, &file.path, &target, files)?;
            Some(Finding::violation(&file.path, number, RULE, format!("{target}: {why}")))
        })
        .collect()
}

/// Why `target`, written in the file at `path`, leads nowhere.
fn objection(root: &Path, path: &str, target: &str, files: &[SourceFile]) -> Option<&'static str> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (place, anchor) =
        target.split_once('#').map_or((target, None), |(place, anchor)| (place, Some(anchor)));
    let place = if place.is_empty() { path.to_owned() } else { resolve(path, place) };
    if !root.join(&place).exists() {
        return Some("no such file; mend the link or write the page");
    }
    let anchor = anchor?;
    let page = files.iter().find(|file| file.path == place)?;
    (!anchors(&page.text).contains(anchor)).then_some("the page has no such heading")
}

/// `target` as seen from the folder of the file at `path`.
fn resolve(path: &str, target: &str) -> String {
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    let mut out = PathBuf::new();
    for part in folder.join(target).components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::Normal(name) => out.push(name),
            _ => {}
        }
    }
    out.display().to_string()
}

/// The targets of `[text](target)` with their lines, outside of code.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        // Every other piece between backticks is code.
        for piece in line.split('`').step_by(2) {
            for (at, _) in piece.match_indices("](") {
                let rest = &piece[at + 2..];
                if let Some(end) = rest.find(')') {
                    links.push((number, rest[..end].to_owned()));
                }
            }
        }
    }
    links
}

/// Anchors of the headings, spelled as code hosts spell them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    headings
        .map(|(_, line)| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Lines outside of fenced code, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut in_fence = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_fence = !in_fence;
        } else if !in_fence {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// Pages that a comment of the code sends its reader to and that are not there.
fn missing_pages(root: &Path, files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && !file.path.starts_with("xtask/")) {
        for (number, line) in file.lines() {
            let page = pages_named(line).find(|page| !root.join(page).exists());
            let finding = page.map(|page| {
                let text = format!("{page}: the code names this page and it is not there; write it");
                Finding::violation(&file.path, number, RULE, text)
            });
            findings.extend(finding);
        }
    }
    findings
}

/// Every `docs/….md` in a line of code.
fn pages_named(line: &str) -> impl Iterator<Item = &str> {
    let starts = line.match_indices("docs/").filter(|(at, _)| !line[..*at].ends_with(['/', '.']));
    starts.filter_map(|(at, _)| {
        let rest = &line[at..];
        let end =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || "/-_.".contains(c))).unwrap_or(rest.len());
        let path = rest[..end].trim_end_matches('.');
        path.ends_with(".md").then_some(path)
    })
}

fn unnamed_pages(files: &[SourceFile]) -> Vec<Finding> {
    let is_page =
        |path: &str| DESCRIBED.iter().any(|folder| path.starts_with(folder)) && !path.ends_with("README.md");
    let is_named = |page: &str| files.iter().any(|file| file.is_rust() && file.text.contains(page));
    let unnamed =
        files.iter().filter(|file| file.is_markdown() && is_page(&file.path) && !is_named(&file.path));
    unnamed
        .map(|file| {
            let text =
                format!("no code names this page: write `{}` into the comment of its parser", file.path);
            Finding::violation(&file.path, 0, RULE, text)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_broken_link_is_found_and_code_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("docs")).unwrap();
        std::fs::write(dir.path().join("docs/here.md"), "").unwrap();
        let text = "[a](here.md) [b](gone.md)\n`[c](code.md)`\n```\n[d](fence.md)\n```\n[e](https://example.org/x)\n";
        let found = check(dir.path(), &[file("docs/a.md", text)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].line, found[0].text.split(':').next()), (1, Some("gone.md")));
    }

    #[test]
    fn an_anchor_must_be_a_heading_of_the_page() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b.md"), "").unwrap();
        let page = file("b.md", "# The `wire`: frames\n");
        let good = file("a.md", "[x](b.md#the-wire-frames)");
        let bad = file("a.md", "[x](b.md#the-wire)");
        assert_eq!(objection(dir.path(), &good.path, "b.md#the-wire-frames", &[page]), None);
        assert_eq!(check(dir.path(), &[bad, file("b.md", "# Frames\n")]).len(), 1);
    }

    #[test]
    fn a_format_page_that_no_code_names_is_found() {
        let page = || file("docs/formats/pack.md", "");
        assert_eq!(unnamed_pages(&[page(), file("pack.rs", "//! See docs/formats/pack.md.\n")]), []);
        assert_eq!(unnamed_pages(&[page()]).len(), 1);
    }

    #[test]
    fn a_page_that_its_folder_does_not_list_is_found() {
        let list = || file("docs/guides/README.md", "[a](a.md#x) [b](../operations/b.md)");
        let page = |path| file(path, "");
        assert_eq!(unlisted_pages(&[list(), page("docs/guides/a.md"), page("docs/operations/b.md")]), []);
        assert_eq!(unlisted_pages(&[list(), page("docs/guides/b.md")]).len(), 1);
    }

    #[test]
    fn a_page_that_code_names_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let code =
            file("a.rs", "//! Bytes as in docs/formats/gone.md.\n//! See QEMU's qemu/docs/devel/x.md.\n");
        let found = check(dir.path(), &[code]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].text.starts_with("docs/formats/gone.md:"));
    }

    #[test]
    fn targets_resolve_from_the_folder_of_the_page() {
        assert_eq!(resolve("docs/design/a.md", "../formats/b.md"), "docs/formats/b.md");
        assert_eq!(resolve("README.md", "./docs/"), "docs");
    }
}
