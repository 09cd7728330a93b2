//! A release: everything that is published of one commit, in `target/release-VERSION/`.
//!
//! Nothing is uploaded, tagged or committed, and nothing that is checked in changes. The commit must have the
//! version everywhere and a section of it in the changelog before; what is missing is refused before anything
//! is built. No time of a clock is in what is made.

use crate::{clients, sbom};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What a release is made of.
#[derive(Debug, PartialEq, Eq)]
struct Order {
    version: String,
    /// Program that was built before, by `scripts/deb` of this commit.
    built: Option<String>,
    dry_run: bool,
}

impl Order {
    fn parse(arguments: &[String]) -> Result<Self> {
        let (mut version, mut built, mut dry_run) = (None, None, false);
        let mut rest = arguments.iter();
        while let Some(word) = rest.next() {
            match word.as_str() {
                "--dry-run" => dry_run = true,
                "--built" => {
                    built = Some(rest.next().context("--built needs the path of a program")?.clone())
                }
                word if is_version(word) && version.is_none() => version = Some(word.to_owned()),
                other => {
                    bail!(
                        "release takes VERSION, like 0.2.0, [--built PROGRAM] and [--dry-run], not {other:?}"
                    )
                }
            }
        }
        let version =
            version.context("release needs the version, like: cargo xtask release 0.2.0 --dry-run")?;
        Ok(Self { version, built, dry_run })
    }

    fn folder(&self, root: &Path) -> PathBuf {
        root.join(format!("target/release-{}", self.version))
    }

    /// Name of a file of the release: of the part of it that ends so.
    fn name(&self, ending: &str) -> String {
        format!("whimbrel-{}{ending}", self.version)
    }

    fn steps(&self) -> Vec<String> {
        let program = match &self.built {
            Some(program) => format!("take the program {program}"),
            None => "build the program".to_owned(),
        };
        let package = format!("{program}, and make the Debian package of it: scripts/deb --release");
        let bill = format!("write the bill of materials: {}", self.name(".cdx.json"));
        vec![
            "check that the tree is clean, and that Cargo.toml, clients/python and CHANGELOG.md have the version"
                .to_owned(),
            "ask the RustSec database for known flaws of dependencies: cargo deny, with deny.toml".to_owned(),
            package,
            "build the static program: scripts/static".to_owned(),
            bill,
            "build the Python client: a source archive and a wheel".to_owned(),
            "cut release-notes.md out of CHANGELOG.md".to_owned(),
            "write SHA256SUMS of all of it".to_owned(),
        ]
    }
}

/// Makes the release that these arguments ask for.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<()> {
    let order = Order::parse(arguments)?;
    if order.dry_run {
        println!("release {} would:", order.version);
        order.steps().iter().enumerate().for_each(|(index, step)| println!("{}. {step}", index + 1));
    }
    let notes = check(root, &order.version)?;
    if order.dry_run {
        println!("Nothing is in its way. Its files would be in target/release-{}.", order.version);
        return Ok(());
    }
    advisories(root)?;
    let folder = order.folder(root);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    programs(root, &order, &folder)?;
    sbom::write(root, &folder.join(order.name(".cdx.json")))?;
    clients::distribute(root, &folder)?;
    fs::write(folder.join("release-notes.md"), notes).context("cannot write the release notes")?;
    sums(&folder)?;
    println!("target/release-{} has the release. When it is right: git tag -s v{0}", order.version);
    Ok(())
}

/// Refuses a commit that is not that of the version; its notes.
fn check(root: &Path, version: &str) -> Result<String> {
    let changes = output(root, "git", &["status", "--porcelain"])?;
    ensure!(changes.is_empty(), "the tree has changes that are not committed; see: git status");
    for manifest in ["Cargo.toml", "clients/python/pyproject.toml"] {
        let text = read(root, manifest)?;
        let found = version_of(&text).with_context(|| format!("{manifest} has no version"))?;
        ensure!(found == version, "{manifest} has the version {found}: write {version} there, and commit it");
    }
    let heading = "rename the section \"## Unreleased\" to it, and commit that";
    let notes = notes(&read(root, "CHANGELOG.md")?, version);
    notes.with_context(|| format!("CHANGELOG.md has no section \"## {version}\" with text: {heading}"))
}

/// Refuses a release with a dependency of which a flaw is known.
fn advisories(root: &Path) -> Result<()> {
    let arguments = ["deny", "check", "advisories", "sources"];
    let status = Command::new("cargo").args(arguments).current_dir(root).status();
    ensure!(
        status.context("cannot start cargo")?.success(),
        "a dependency is not as deny.toml wants it, or cargo-deny is missing: cargo install --locked cargo-deny"
    );
    Ok(())
}

/// Builds the package and both programs, and copies them.
fn programs(root: &Path, order: &Order, folder: &Path) -> Result<()> {
    let built: Vec<&str> = order.built.iter().flat_map(|program| ["--built", program]).collect();
    call(root, "scripts/deb", &[&["--release"], &built[..]].concat())?;
    call(root, "scripts/static", &[])?;
    let debian = root.join("target/debian");
    let arch = output(root, "dpkg", &["--print-architecture"])?;
    let package = format!("whimbrel_{}_{}.deb", order.version, arch.trim());
    copy(&debian.join(&package), &folder.join(&package))?;
    copy(&debian.join("tree/usr/bin/whimbrel"), &folder.join(order.name("-x86_64-linux")))?;
    let fixed = root.join("target/static");
    copy(&fixed.join("whimbrel"), &folder.join(order.name("-x86_64-linux-static")))?;
    copy(
        &fixed.join("whimbrel-guest"),
        &folder.join(format!("whimbrel-guest-{}-x86_64-linux", order.version)),
    )
}

/// Writes the checksums of all files of the folder, in the order of their names.
fn sums(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).context("cannot list the release")?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<std::io::Result<Vec<String>>>().context("cannot list the release")?;
    names.sort();
    let names: Vec<&str> = [&["--"][..], &names.iter().map(String::as_str).collect::<Vec<_>>()].concat();
    let sums = output(folder, "sha256sum", &names)?;
    fs::write(folder.join("SHA256SUMS"), sums).context("cannot write SHA256SUMS")
}

/// Whether it is three numbers. Debian orders what follows a hyphen otherwise than Cargo does.
fn is_version(word: &str) -> bool {
    let parts: Vec<&str> = word.split('.').collect();
    parts.len() == 3 && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// The first version that a manifest names: the one of the package or workspace itself.
fn version_of(manifest: &str) -> Option<&str> {
    manifest.lines().find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"'))
}

/// The text of a version's section in a changelog; none if there is no such section, or nothing in it.
fn notes(changelog: &str, version: &str) -> Option<String> {
    let is_section = |line: &&str| line.starts_with("## ");
    let is_wanted =
        |line: &&str| line.strip_prefix("## ").and_then(|title| title.split(' ').next()) == Some(version);
    let lines = changelog.lines().skip_while(|line| !is_wanted(line)).skip(1);
    let text = lines.take_while(|line| !is_section(line)).collect::<Vec<_>>().join("\n");
    let text = text.trim();
    (!text.is_empty()).then(|| format!("{text}\n"))
}

fn read(root: &Path, name: &str) -> Result<String> {
    fs::read_to_string(root.join(name)).with_context(|| format!("cannot read {name}"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Runs a program in a folder; what it prints.
fn output(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let run = Command::new(program).args(arguments).current_dir(folder).output();
    let run = run.with_context(|| format!("cannot start {program}"))?;
    ensure!(run.status.success(), "{program} failed: {}", String::from_utf8_lossy(&run.stderr).trim());
    String::from_utf8(run.stdout).with_context(|| format!("{program} prints no UTF-8"))
}

/// Runs a program in a folder; its output is seen.
fn call(folder: &Path, program: &str, arguments: &[&str]) -> Result<()> {
    let status = Command::new(folder.join(program)).args(arguments).current_dir(folder).status();
    let status = status.with_context(|| format!("cannot start {program}"))?;
    ensure!(status.success(), "it failed; repeat it with: {program} {}", arguments.join(" "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGES: &str = "# Changelog\n\nWords.\n\n## Unreleased\n\n- new\n\n## 0.2.0 of 2027-01-02\n\n\
                           First words.\n\n- **One** thing\n\n### Files\n\n- kept\n\n## 0.1.1\n\n## 0.1.0\n\n- old\n";

    fn order(words: &[&str]) -> Result<Order> {
        Order::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn notes_are_those_of_the_version_and_no_other() {
        let newest = "First words.\n\n- **One** thing\n\n### Files\n\n- kept\n";
        assert_eq!(notes(CHANGES, "0.2.0").as_deref(), Some(newest));
        assert_eq!(notes(CHANGES, "0.1.0").as_deref(), Some("- old\n"));
        assert_eq!(notes(CHANGES, "0.1"), None);
        assert_eq!(notes(CHANGES, "0.3.0"), None);
    }

    #[test]
    fn a_section_without_text_is_no_notes() {
        assert_eq!(notes(CHANGES, "0.1.1"), None);
    }

    #[test]
    fn the_version_of_a_manifest_is_not_that_of_what_it_depends_on() {
        let manifest = "[workspace.package]\nversion = \"0.2.0\"\n\n[dependencies]\nversion = \"9\"\n";
        assert_eq!(version_of(manifest), Some("0.2.0"));
        assert_eq!(version_of("anyhow = { version = \"1\" }\n"), None);
    }

    #[test]
    fn an_order_without_a_version_or_with_two_is_refused() {
        let wanted = Order { version: "1.2.3".into(), built: Some("p".into()), dry_run: true };
        assert_eq!(order(&["1.2.3", "--built", "p", "--dry-run"]).unwrap(), wanted);
        for words in
            [&[][..], &["1.2"], &["1.2.x"], &["1.2.3-rc1"], &["1.2.3", "1.2.4"], &["1.2.3", "--built"]]
        {
            assert!(order(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn files_are_named_by_their_version() {
        let order = order(&["0.2.0"]).unwrap();
        assert_eq!(order.name("-x86_64-linux"), "whimbrel-0.2.0-x86_64-linux");
        assert_eq!(order.folder(Path::new("top")), Path::new("top/target/release-0.2.0"));
    }
}
