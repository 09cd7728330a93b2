//! Where experiments keep what they make.

use anyhow::Result;
use std::path::Path;
use tempfile::TempDir;

/// A folder on the disk that the checkout is on, gone with the value: a tmpfs would hide what syncing costs.
pub(crate) fn scratch(purpose: &str) -> Result<TempDir> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench");
    std::fs::create_dir_all(&target)?;
    Ok(tempfile::Builder::new().prefix(purpose).tempdir_in(target)?)
}
