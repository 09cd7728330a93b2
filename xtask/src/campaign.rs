//! `cargo xtask campaign NAME`: real machines under faults, for minutes or hours, from one seed.
//!
//! The campaigns are experiments of the harness, so that a record of the set `kept` is made by the same code.

use crate::bench;
use anyhow::{Result, bail};
use std::path::Path;

/// Names of the campaigns.
const NAMES: [&str; 3] = ["moves", "takeovers", "capsules"];

/// Runs a campaign with the rest of `args`, like `--minutes 60 --seed 7`.
pub(crate) fn run(root: &Path, args: &[String]) -> Result<()> {
    match args.first().map(String::as_str) {
        Some(name) if NAMES.contains(&name) => bench::run(root, args),
        other => bail!("a campaign is one of {NAMES:?}, not {other:?}"),
    }
}
