//! `cargo xtask bench NAME`: builds the harness in the release profile and hands it the arguments.
//!
//! The experiments live in the crate `whimbrel-bench`; this file only finds it, so that xtask builds in
//! seconds.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// Runs the harness with `args`.
pub(crate) fn run(root: &Path, args: &[String]) -> Result<()> {
    // Neither of these measures anything, so they need no release build.
    if matches!(args.first().map(String::as_str), Some("report" | "list")) {
        return step(root, &["run", "--quiet", "--locked", "-p", "whimbrel-bench", "--"], args);
    }
    // An experiment may start the product, so it is built too: figures of a stale binary would be worthless.
    step(root, &["build", "--release", "--locked", "-p", "whimbrel", "-p", "whimbrel-bench"], &[])?;
    step(root, &["run", "--release", "--quiet", "--locked", "-p", "whimbrel-bench", "--"], args)
}

fn step(root: &Path, cargo: &[&str], args: &[String]) -> Result<()> {
    let status = Command::new(env!("CARGO"))
        .args(cargo)
        .args(args)
        .current_dir(root)
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("cargo {} failed", cargo[0]);
    }
    Ok(())
}
