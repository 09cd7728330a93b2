//! `cargo xtask simulate`: builds the simulation and hands it the arguments.
//!
//! In the profile of the tests, which shares their artefacts; `--release` builds it for a long run instead.

use anyhow::{Context, Result, bail};
use std::{path::Path, process::Command};

/// Runs the simulation with `args`.
pub(crate) fn run(root: &Path, args: &[String]) -> Result<()> {
    let release = args.iter().filter(|word| *word == "--release");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--locked", "-p", "whimbrel-simulation"]).args(release).arg("--");
    cargo.args(args.iter().filter(|word| *word != "--release"));
    let status = cargo.current_dir(root).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the simulation has found something, or could not run");
    }
    Ok(())
}
