//! Python client of the API (`clients/python`): generates its lower layer, installs and checks it, and the
//! Ansible collection (`clients/ansible`) that is made with it.
//!
//! Tools and libraries of known hashes go into an environment below `target/`, which the cases of e2e use
//! too. The package is built and installed as its users do it, so what is checked is the package and not the
//! folder.

use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Folder of the package.
const PACKAGE: &str = "clients/python";
/// Folder of the collection.
const COLLECTION: &str = "clients/ansible";
/// Environment of their tools.
const ENVIRONMENT: &str = "target/clients-venv";

/// Writes the generated layer, and checks the package and the collection.
pub(crate) fn build(root: &Path) -> Result<()> {
    let python = install(root)?;
    run(root, PACKAGE, &python, &["generate.py"])?;
    check(root)
}

/// Checks that the generated layer is current, types, lint, format, and what needs no host.
pub(crate) fn check(root: &Path) -> Result<()> {
    let python = install(root)?;
    run(root, PACKAGE, &python, &["generate.py", "--check"])?;
    let package = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall", "."];
    run(root, PACKAGE, &python, &[&["-m", "pip", "install", "--quiet"], &package[..]].concat())?;
    for folder in [PACKAGE, COLLECTION] {
        run(root, folder, &python, &["-m", "mypy"])?;
        run(root, folder, &python, &["-m", "ruff", "check", "--quiet"])?;
        run(root, folder, &python, &["-m", "ruff", "format", "--quiet", "--check"])?;
    }
    run(root, PACKAGE, &python, &["-m", "pytest", "tests/test_offline.py"])?;
    run(root, COLLECTION, &python, &["-m", "pytest"])
}

/// Builds a source archive and a wheel of the package into a folder.
pub(crate) fn distribute(root: &Path, folder: &Path) -> Result<()> {
    let python = install(root)?;
    let folder = folder.to_str().context("a path in UTF-8")?;
    run(root, PACKAGE, &python, &["-m", "hatchling", "build", "-d", folder])
}

/// Installs what `requirements-dev.txt` names, unless it is there. The interpreter of the environment.
fn install(root: &Path) -> Result<PathBuf> {
    let environment = root.join(ENVIRONMENT);
    let python = environment.join("bin/python");
    let wanted = fs::read(root.join(PACKAGE).join("requirements-dev.txt"));
    let wanted = wanted.context("cannot read requirements-dev.txt")?;
    let stamp = environment.join("whimbrel-requirements.txt");
    if fs::read(&stamp).is_ok_and(|installed| installed == wanted) && python.exists() {
        return Ok(python);
    }
    // Anew: a package that is no longer named must not be found by accident.
    let venv = ["-m", "venv", "--clear", environment.to_str().context("a path in UTF-8")?];
    run(root, PACKAGE, Path::new("python3"), &venv).context("scripts/bootstrap installs python3-venv")?;
    let pip = ["-m", "pip", "install", "--quiet", "--require-hashes", "--only-binary", ":all:"];
    run(root, PACKAGE, &python, &[&pip[..], &["-r", "requirements-dev.txt"]].concat())?;
    fs::write(stamp, wanted).context("cannot write into the environment")?;
    Ok(python)
}

/// Runs Python in a folder. It leaves nothing there.
fn run(root: &Path, folder: &str, python: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(python);
    command.args(arguments).current_dir(root.join(folder));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    command.env("MYPY_CACHE_DIR", root.join("target/clients-mypy"));
    command.env("RUFF_CACHE_DIR", root.join("target/clients-ruff"));
    let status = command.status().with_context(|| format!("cannot start {}", python.display()))?;
    if !status.success() {
        let (python, arguments) = (python.display(), arguments.join(" "));
        bail!("it failed; repeat it with: cd {folder} && {python} {arguments}");
    }
    Ok(())
}
