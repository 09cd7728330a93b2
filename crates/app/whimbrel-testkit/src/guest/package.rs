//! Files of Debian's packages, without installing them. `apt-get update` must have run.

use super::{GuestError, artifact_cache::run};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Downloads a package and unpacks it below `root`.
pub(super) fn unpack(package: &str, root: &Path) -> Result<(), GuestError> {
    let work = tempfile::tempdir().map_err(GuestError::file("create", std::env::temp_dir()))?;
    run(Command::new("apt-get").args(["-q", "download", package]).current_dir(&work))?;
    let deb = find(work.path(), &|name| name.ends_with(".deb"))?;
    let deb = deb.ok_or_else(|| GuestError::Missing { what: format!("downloaded file of {package}") })?;
    run(Command::new("dpkg").arg("-x").arg(deb).arg(root)).map(drop)
}

/// Name of the package that a package for the newest version of something depends on, if it begins so.
pub(super) fn newest(package: &str, begins: &str) -> Result<String, GuestError> {
    let depends = run(Command::new("apt-cache").args(["depends", package]))?;
    let mut names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let found = names.find(|name| name.starts_with(begins));
    found.map(str::to_owned).ok_or_else(|| GuestError::Missing { what: format!("package {package}") })
}

/// First file below `root` whose name satisfies `wanted`.
pub(super) fn find(root: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>, GuestError> {
    for entry in fs::read_dir(root).map_err(GuestError::file("list", root))? {
        let entry = entry.map_err(GuestError::file("list", root))?;
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Some(found) = find(&path, wanted)? {
                return Ok(Some(found));
            }
        } else if wanted(&entry.file_name().to_string_lossy()) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// The file below `root` with this name.
pub(super) fn named(root: &Path, name: &str) -> Result<PathBuf, GuestError> {
    find(root, &|found| found == name)?.ok_or_else(|| GuestError::Missing { what: name.to_owned() })
}
