//! OpenPGP signatures of lists, checked by gpgv(1) against a keyring that the owner of this host named.

use super::download::FetchError;
use crate::{
    capsule::disk_image::ScratchDir,
    core::{directories::Directories, error::DaemonError},
};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// Checks a detached signature of `data`.
pub(super) fn check(
    layout: &Directories,
    keyring: &Path,
    data: &[u8],
    signature: &[u8],
) -> Result<(), FetchError> {
    let dir = scratch(layout)?;
    let (signed, detached) = (dir.path().join("list"), dir.path().join("signature"));
    write(&signed, data)?;
    write(&detached, signature)?;
    gpgv(keyring, &[&detached, &signed]).map(drop)
}

/// Text of a message with a signature around it.
pub(super) fn open(layout: &Directories, keyring: &Path, message: &[u8]) -> Result<Vec<u8>, FetchError> {
    let dir = scratch(layout)?;
    let signed = dir.path().join("message");
    write(&signed, message)?;
    gpgv(keyring, &[Path::new("--output"), Path::new("-"), &signed])
}

fn scratch(layout: &Directories) -> Result<ScratchDir, FetchError> {
    ScratchDir::create(layout)
        .map_err(|error: DaemonError| FetchError::Signature { reason: error.to_string() })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), FetchError> {
    fs::write(path, bytes).map_err(|source| FetchError::File { path: path.to_owned(), source })
}

fn gpgv(keyring: &Path, arguments: &[&Path]) -> Result<Vec<u8>, FetchError> {
    let mut command = Command::new("gpgv");
    command.arg("--quiet").arg("--keyring").arg(keyring).args(arguments).stdin(Stdio::null());
    let output = command.output();
    let output = output.map_err(|error| FetchError::Signature {
        reason: format!("the program gpgv cannot be started: {error}"),
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("gpgv gives no reason");
    Err(FetchError::Signature { reason: last.chars().take(200).collect() })
}
