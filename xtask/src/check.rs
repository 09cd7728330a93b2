//! `cargo xtask check`: the gate. Cheap steps first, each a child process whose output is shown as it comes.
//!
//! Everything is built in the dev profile, so the tests, the binary they start and a developer's own builds share
//! one set of artefacts. clippy and rustdoc need only the metadata of dependencies, which cargo keeps apart.

use crate::tidy;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// One step: what it is called, what cargo is asked, and the environment it needs.
struct Step {
    name: &'static str,
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

const STEPS: &[Step] = &[
    Step { name: "fmt", args: &["fmt", "--all", "--check"], env: &[] },
    Step {
        name: "clippy",
        args: &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
        env: &[],
    },
    Step {
        name: "doc",
        args: &["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"],
        env: &[("RUSTDOCFLAGS", "-D warnings")],
    },
    // `cargo test` alone would not build the binary of a crate for the tests of another one.
    Step { name: "build", args: &["build", "--workspace", "--all-targets", "--locked"], env: &[] },
    Step { name: "test", args: &["test", "--workspace", "--no-fail-fast", "--locked"], env: &[] },
];

/// Runs every step and stops at the first that fails.
pub(crate) fn run(root: &Path) -> Result<()> {
    println!("==> tidy");
    tidy::run(root)?;
    for step in STEPS {
        println!("==> {}", step.name);
        let begun = Instant::now();
        cargo(root, step)?;
        println!("==> {} took {} s", step.name, begun.elapsed().as_secs());
    }
    Ok(())
}

fn cargo(root: &Path, step: &Step) -> Result<()> {
    let status = Command::new(env!("CARGO"))
        .args(step.args)
        .envs(step.env.iter().copied())
        .current_dir(root)
        .status()
        .with_context(|| format!("cannot start cargo {}", step.args[0]))?;
    if !status.success() {
        bail!("{} failed; repeat it with: cargo {}", step.name, step.args.join(" "));
    }
    Ok(())
}
