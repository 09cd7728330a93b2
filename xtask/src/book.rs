//! The manual as a book: every page of `docs/` in one searchable site, made by mdBook.
//!
//! There is no list of chapters to keep: a folder's `README.md` names its pages in their order, which
//! `cargo xtask tidy` checks. Pages keep their places, so links between them work in the book as they do in
//! the checkout. mdBook is installed below `target/` at the version named here.

use crate::tidy::links;
use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const VERSION: &str = "0.4.52";
/// Root of the tools that this program installs.
const TOOLS: &str = "target/tools";
/// Where the book's sources and its pages are made.
const BOOK: &str = "target/book";

/// Parts of the book: a heading, and pages whose links to pages beside them are the chapters below.
const PARTS: &[(&str, &[&str])] = &[
    ("Whimbrel", &["README.md"]),
    ("Tasks", &["docs/guides/README.md"]),
    (
        "Running",
        &[
            "docs/operations/README.md",
            "docs/security.md",
            "SECURITY.md",
            "clients/python/README.md",
            "docs/benchmarks.md",
            "docs/glossary.md",
            "CHANGELOG.md",
        ],
    ),
    ("Understanding", &["ARCHITECTURE.md", "docs/design/README.md", "CONTRIBUTING.md"]),
    ("Every byte", &["docs/formats/README.md", "docs/protocols/README.md"]),
];

const SETTINGS: &str = r#"[book]
title = "Whimbrel"
language = "en"
src = "src"
[build]
build-dir = "html"
[output.html]
no-section-label = true
"#;

/// Builds the book.
pub(crate) fn build(root: &Path) -> Result<()> {
    let mdbook = install(root)?;
    let book = root.join(BOOK);
    if book.exists() {
        fs::remove_dir_all(&book).with_context(|| format!("cannot remove {}", book.display()))?;
    }
    let (summary, pages) = summary(root)?;
    let source = book.join("src");
    copy(root, &source, &pages)?;
    write(&source.join("SUMMARY.md"), &summary)?;
    write(&book.join("book.toml"), SETTINGS)?;
    let status =
        Command::new(mdbook).arg("build").current_dir(&book).status().context("cannot run mdbook")?;
    if !status.success() {
        bail!("mdbook failed; repeat it with: {TOOLS}/bin/mdbook build {BOOK}");
    }
    println!("{} pages: {}", pages.len(), book.join("html/index.html").display());
    Ok(())
}

/// Installs mdBook, unless this version is there.
fn install(root: &Path) -> Result<PathBuf> {
    let mdbook = root.join(TOOLS).join("bin/mdbook");
    let version = Command::new(&mdbook).arg("--version").output();
    if version.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).trim() == format!("mdbook v{VERSION}"))
    {
        return Ok(mdbook);
    }
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["install", "mdbook", "--version", VERSION, "--locked", "--quiet", "--root"])
        .arg(root.join(TOOLS))
        .args(["--no-default-features", "--features", "search"])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("mdBook {VERSION} cannot be installed");
    }
    Ok(mdbook)
}

/// The list of chapters, and its pages.
fn summary(root: &Path) -> Result<(String, Vec<String>)> {
    let (mut summary, mut pages) = (String::from("# Summary\n"), Vec::new());
    for (part, tops) in PARTS {
        summary += &format!("\n# {part}\n\n");
        for top in *tops {
            let text = read(root, top)?;
            summary += &chapter(0, &text, top);
            pages.push((*top).to_owned());
            // Only a list of pages has chapters below it.
            for page in links::pages_beside(top, &text).filter(|_| top.starts_with("docs/")) {
                if !pages.contains(&page) {
                    summary += &chapter(1, &read(root, &page)?, &page);
                    pages.push(page);
                }
            }
        }
    }
    Ok((summary, pages))
}

fn chapter(depth: usize, text: &str, page: &str) -> String {
    let title = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or(page);
    format!("{:1$}- [{title}]({2})\n", "", 2 * depth, chapter_name(page))
}

/// Copies the pages, and the files that they link to.
fn copy(root: &Path, source: &Path, pages: &[String]) -> Result<()> {
    let mut files = BTreeSet::new();
    for page in pages {
        let mut text = read(root, page)?;
        for (link, path) in links::targets(page, &text).collect::<Vec<_>>() {
            let (written, file) = (format!("]({link})"), root.join(&path).is_file());
            match file {
                // A folder of the checkout is no page.
                false => text = text.replace(&written, "]"),
                true if pages.contains(&path) => text = text.replace(&written, &chapter_name(&written)),
                true => drop(files.insert(path)),
            }
        }
        write(&source.join(chapter_name(page)), &text)?;
    }
    for file in files {
        let copy = source.join(&file);
        fs::create_dir_all(copy.parent().context("a file in a folder")?)?;
        fs::copy(root.join(&file), &copy).with_context(|| format!("cannot copy {file}"))?;
    }
    Ok(())
}

/// The page of a folder is its index in the book, where links find it.
fn chapter_name(page: &str) -> String {
    page.replace("README.md", "index.md")
}

fn read(root: &Path, page: &str) -> Result<String> {
    fs::read_to_string(root.join(page)).with_context(|| format!("cannot read {page}"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(path.parent().context("a file in a folder")?)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
