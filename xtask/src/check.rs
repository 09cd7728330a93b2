//! `cargo xtask check`: the gate. Each step is a child process whose output is shown as it comes; the first
//! that fails ends it.
//!
//! Everything is built in the dev profile, so the tests, the programs that they start and a developer's own
//! builds share one set of artefacts. Tests are compiled before clippy runs: it then finds procedural macros
//! and C code built. `--changed` is the developer's loop: no documentation, and of the tests those whose
//! binary changed since they passed. CI runs everything, and builds once: with `WHIMBREL_LINT_BUILD` clippy
//! itself compiles what it checks, and rustdoc checks against what it compiled. What it builds is not what a
//! developer's own builds could use.

use crate::{clients, lint_build, test_run, tidy, web};
use anyhow::{Context, Result, bail};
use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// Which tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    Changed,
}

const FMT: &[&str] = &["fmt", "--all", "--check"];
const CLIPPY: &[&str] = &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
/// Targets named one by one have the features that the tests were built with; all of them together have
/// others.
const DOC: &[&str] = &[
    "doc",
    "--workspace",
    "--no-deps",
    "--lib",
    "--bins",
    "--examples",
    "--document-private-items",
    "--locked",
];

/// Says that what the build compiles is checked by clippy meanwhile.
const LINT_BUILD: &str = "WHIMBREL_LINT_BUILD";

/// Runs every step and stops at the first that fails; then says how long each took.
pub(crate) fn run(root: &Path, scope: Scope) -> Result<()> {
    let mut times = StepTimes::default();
    times.step("tidy", || tidy::run(root))?;
    times.step("web", || web::check(root))?;
    times.step("clients", || clients::check(root))?;
    times.step("fmt", || cargo(root, FMT))?;
    let lints = std::env::var_os(LINT_BUILD).is_some();
    let binaries = times.step("build", || test_run::build(root, lints))?;
    if !lints {
        times.step("clippy", || cargo(root, CLIPPY))?;
    }
    if lints {
        times.step("doc", || lint_build::check_documentation(root))?;
    } else if scope == Scope::All {
        times.step("doc", || cargo(root, DOC))?;
    }
    let slowest = times.step("test", || test_run::run(root, &binaries, scope))?;
    times.print();
    slowest.print();
    Ok(())
}

/// How long the steps took, in their order.
#[derive(Default)]
struct StepTimes(Vec<(&'static str, Duration)>);

impl StepTimes {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("==> {name}");
        let started = Instant::now();
        let result = work()?;
        self.0.push((name, started.elapsed()));
        Ok(result)
    }

    fn print(&self) {
        let total: Duration = self.0.iter().map(|(_, time)| *time).sum();
        println!("\n{:>7}  step", "seconds");
        self.0.iter().for_each(|(name, time)| println!("{:>7}  {name}", time.as_secs()));
        println!("{:>7}  all steps", total.as_secs());
    }
}

fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command.args(args).env("RUSTDOCFLAGS", "-D warnings").current_dir(root);
    let status = command.status().with_context(|| format!("cannot start cargo {}", args[0]))?;
    if !status.success() {
        bail!("{} failed; repeat it with: cargo {}", args[0], args.join(" "));
    }
    Ok(())
}
