//! The set `kept`: whether machines and capsules outlast every fault.

mod freeze;
mod replace;
mod soak;
mod stall;
mod stops;

use super::{Context, Experiment, campaign};
use crate::harness::{Goal, Row, Samples};
use anyhow::{Context as _, Result};
use serde::Deserialize;
use std::{path::Path, process::Command};

/// The experiments.
pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["simulation"],
        about: "the program under seeds of simulated faults",
        run: simulation,
    },
    Experiment {
        rows: &["moves.lost", "moves.both"],
        about: "a machine moves while its hosts are disturbed",
        run: campaign::moves,
    },
    Experiment {
        rows: &["takeovers.lost"],
        about: "a protected machine under every kind of failure",
        run: campaign::takeovers,
    },
    Experiment {
        rows: &["capsules.lost"],
        about: "capsules are pushed, pulled and resumed lazily while hosts are disturbed and collect garbage",
        run: campaign::capsules,
    },
    Experiment {
        rows: &["replace.gap"],
        about: "the process of a machine is replaced under a guest that writes",
        run: replace::run,
    },
    Experiment {
        rows: &["freeze.max"],
        about: "how long a protected guest stands still that writes more than its link carries",
        run: freeze::run,
    },
    Experiment {
        rows: &["stall.other"],
        about: "how long a guest waits for a page while one of three holders is dark",
        run: stall::run,
    },
    Experiment {
        rows: &["soak"],
        about: "memory and open files after very many checkpoints, moves and seconds of protection",
        run: soak::run,
    },
    Experiment { rows: &["mutants"], about: "losses put back on purpose, and found", run: mutants },
];

/// Seeds of a record.
const SEEDS: u64 = 100_000;
const SEEDS_QUICK: u64 = 500;
/// Losses that must be found at least.
const FOUND_MIN: f64 = 10.0;

/// Last line of a simulation that ran seeds.
#[derive(Deserialize)]
struct Seeds {
    seeds: u64,
    hours: f64,
    violations: f64,
}

/// Last line of a simulation that brought losses back.
#[derive(Deserialize)]
struct Losses {
    found: f64,
    losses: u64,
}

fn simulation(context: &Context) -> Result<Vec<Row>> {
    let seeds = if context.quick { SEEDS_QUICK } else { SEEDS }.to_string();
    let said: Seeds = simulate(&["--seeds", &seeds])?;
    let case = format!("{} seeds, {:.0} simulated hours", said.seeds, said.hours);
    let violations = Samples::new(vec![said.violations]);
    Ok(vec![Row::new("simulation", case, "violations", &violations).goal(Goal::AtMost(0.0))])
}

fn mutants(_: &Context) -> Result<Vec<Row>> {
    let said: Losses = simulate(&["--losses"])?;
    let goal = FOUND_MIN.max(said.losses as f64);
    let case = format!("{} losses, at most 5,000 seeds each", said.losses);
    let found = Samples::new(vec![said.found]);
    Ok(vec![Row::new("mutants", case, "found", &found).goal(Goal::AtLeast(goal))])
}

/// Runs the simulation; what it says in its last line. A violation is a figure, not a failure.
fn simulate<T: for<'a> Deserialize<'a>>(words: &[&str]) -> Result<T> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    cargo.args(["xtask", "simulate", "--release", "--json"]).args(words);
    let output = cargo.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    eprint!("{said}");
    let last = said.lines().last().with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    serde_json::from_str(last).with_context(|| format!("the simulation ended with {last:?}"))
}
