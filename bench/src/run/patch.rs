//! `zstd --patch-from`: what a program says that has both versions of an image before it and all the time it
//! wants.

use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Bytes of the patch from the file `before` to the file `after`.
pub(crate) fn bytes(before: &Path, after: &Path) -> Result<u64> {
    let patch = after.with_extension("patch");
    let mut command = Command::new("zstd");
    // The window must hold an image and the part of the other one that has been read: 1 GiB for half of it
    // each.
    command
        .args(["-q", "-f", "-3", "--long=30", "--patch-from"])
        .arg(before)
        .arg(after)
        .arg("-o")
        .arg(&patch);
    let output = command.output().context("cannot start zstd; scripts/bootstrap installs it")?;
    ensure!(output.status.success(), "zstd failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    let bytes = std::fs::metadata(&patch)?.len();
    std::fs::remove_file(&patch)?;
    Ok(bytes)
}
