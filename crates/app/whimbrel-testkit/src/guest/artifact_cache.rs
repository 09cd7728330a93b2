//! Artifact cache: files that take long to build are built once, below `target/`, by one process at a time.
//!
//! Invariant: a directory with a final name is complete. It is built under another name and renamed; a
//! process that dies meanwhile leaves a temporary directory that the next one removes.

use super::GuestError;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

pub(super) fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(3).unwrap_or(here)
}

/// Directory `target/<area>/<name>`; if it does not exist, `make` fills an empty one.
pub(super) fn once(
    area: &str,
    name: &str,
    make: impl FnOnce(&Path) -> Result<(), GuestError>,
) -> Result<PathBuf, GuestError> {
    let area = workspace().join("target").join(area);
    let done = area.join(name);
    if done.is_dir() {
        return Ok(done);
    }
    fs::create_dir_all(&area).map_err(GuestError::file("create", &area))?;
    let lock_path = area.join(format!("{name}.lock"));
    let lock = fs::File::create(&lock_path).map_err(GuestError::file("create", &lock_path))?;
    lock.lock().map_err(GuestError::file("lock", &lock_path))?;
    if done.is_dir() {
        return Ok(done);
    }
    let part = area.join(format!("{name}.part"));
    if part.exists() {
        fs::remove_dir_all(&part).map_err(GuestError::file("remove", &part))?;
    }
    fs::create_dir(&part).map_err(GuestError::file("create", &part))?;
    make(&part)?;
    fs::rename(&part, &done).map_err(GuestError::file("rename", &part))?;
    Ok(done)
}

/// Runs a program and returns its standard output.
pub(super) fn run(command: &mut Command) -> Result<String, GuestError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|source| GuestError::Start { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let from = errors.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
    Err(GuestError::Program { program, status: output.status, errors: errors[from..].to_owned() })
}
