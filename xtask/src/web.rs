//! Web page of a host: built by npm from `web/` into `web/dist`, which is checked in.
//!
//! Whoever builds the daemon needs neither node nor a network. So that `web/dist` is nothing but what the
//! sources give, the gate builds it again and compares (docs/design/2026-11-24-web-page.md).

use anyhow::{Context, Result, bail};
use std::{collections::BTreeMap, fs, path::Path, process::Command};

/// Content of the files in a folder, by their names.
type Files = BTreeMap<String, Vec<u8>>;

/// Builds the web page and checks its types.
pub(crate) fn build(root: &Path) -> Result<()> {
    let web = root.join("web");
    install(&web)?;
    npm(&web, &["run", "--silent", "build"])?;
    npm(&web, &["run", "--silent", "check"])
}

/// Builds the web page and fails if that is not what is checked in.
pub(crate) fn check(root: &Path) -> Result<()> {
    let dist = root.join("web/dist");
    let before = files(&dist)?;
    build(root)?;
    let after = files(&dist)?;
    let names = before.keys().chain(after.keys());
    let changed: Vec<&str> =
        names.filter(|name| before.get(*name) != after.get(*name)).map(String::as_str).collect();
    if !changed.is_empty() {
        bail!("web/dist was not what web/src gives: {}; it is now, so commit it", changed.join(", "));
    }
    Ok(())
}

/// Installs the libraries that the lock file names, unless they are there.
fn install(web: &Path) -> Result<()> {
    let lock = fs::read(web.join("package-lock.json")).context("cannot read web/package-lock.json")?;
    let stamp = web.join("node_modules/.whimbrel-lock");
    if fs::read(&stamp).is_ok_and(|installed| installed == lock) {
        return Ok(());
    }
    // No package runs a program of its own when it is installed.
    npm(web, &["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])?;
    fs::write(stamp, lock).context("cannot write into web/node_modules")
}

fn npm(web: &Path, arguments: &[&str]) -> Result<()> {
    let status = Command::new("npm").args(arguments).current_dir(web).status();
    let status = status.context("cannot start npm; scripts/bootstrap installs it")?;
    if !status.success() {
        bail!("npm {0} failed; repeat it with: cd web && npm {0}", arguments.join(" "));
    }
    Ok(())
}

fn files(folder: &Path) -> Result<Files> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut files = Files::new();
    for entry in entries {
        let path = entry.context("cannot list web/dist")?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        files.insert(name, content);
    }
    Ok(files)
}
