//! Named experiments against peers: `cargo xtask bench NAME [--quick] [--record]`. See docs/benchmarks.md.
//!
//! Prints a table and writes `target/bench/NAME.json`. A goal that is missed does not fail the command: a
//! measurement is a finding. An experiment that could not be done does, after the others were; a record
//! names it.

mod capsule;
mod guest;
mod harness;
mod hosts;
mod report;
mod run;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use harness::Report;
use run::{Context, Experiment, SETS, select};
use std::path::{Path, PathBuf};

/// Named experiments against peers.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench")]
struct Arguments {
    /// A row (store.ingest), a family (store), a set (`run`, `pool`, `protect`, `capsule`, `paper`,
    /// `operate`), `list`, or `report`, which writes docs/benchmarks.md from the records.
    name: String,
    /// Fewer repetitions and smaller inputs, under five minutes.
    #[arg(long)]
    quick: bool,
    /// Repetitions of every case, in place of the row's own; cases and inputs stay those of a full run.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    times: Option<u16>,
    /// Minutes of a campaign (moves, takeovers, capsules), in place of its own.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: Option<u64>,
    /// Seed of a campaign, in place of one of the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// Keep the result in bench/results/ as well: that of an experiment in place of its rows in the record of
    /// its set. Not with --quick or --times, and only from a clean checkout.
    #[arg(long, conflicts_with_all = ["quick", "times"])]
    record: bool,
    /// With `report`: write nothing, and fail if the page is not what the records say.
    #[arg(long, conflicts_with_all = ["quick", "times", "record"])]
    check: bool,
    /// Two memory or disk images to keep instead of made ones: the first version and a later one.
    #[arg(long, num_args = 2, value_names = ["FIRST", "LATER"])]
    images: Vec<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.name.as_str() {
        "list" => list(),
        "report" => report::run(arguments.check)?,
        _ => measure(arguments)?,
    }
    Ok(())
}

/// Prints every row and what it is about.
fn list() {
    for (set, experiments) in SETS {
        println!("{set}:");
        let line =
            |experiment: &Experiment| println!("  {:<18} {}", experiment.rows.join(" "), experiment.about);
        experiments.iter().for_each(line);
    }
}

/// Does the experiments that were named and keeps their result.
fn measure(arguments: Arguments) -> Result<()> {
    ensure!(!arguments.check, "--check goes with report");
    let images = <[PathBuf; 2]>::try_from(arguments.images).ok().map(|[first, later]| (first, later));
    let context = Context {
        quick: arguments.quick,
        times: arguments.times.map(usize::from),
        minutes: arguments.minutes,
        seed: arguments.seed,
        images,
    };
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for experiment in select(&arguments.name)? {
        let name = experiment.rows.join(", ");
        eprintln!("==> {name}: {}", experiment.about);
        match (experiment.run)(&context) {
            Ok(done) => rows.extend(done),
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name);
            }
        }
    }
    ensure!(!rows.is_empty(), "could not do {}", failed.join(", "));
    let report = Report::new(&arguments.name, arguments.quick, failed.clone(), rows);
    keep(&report, &arguments.name, arguments.record)?;
    if !failed.is_empty() {
        bail!("could not do {}", failed.join(", "));
    }
    Ok(())
}

/// Prints the report and writes it where it belongs; a record changes the page, too.
fn keep(report: &Report, name: &str, record: bool) -> Result<()> {
    println!("{}\n{}", report.heading(), report.table());
    let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = report.write(&bench.with_file_name("target").join("bench"))?;
    eprintln!("{}", path.display());
    if record {
        ensure!(
            report.is_clean(),
            "the checkout has changes, so the result belongs to no commit: not recorded"
        );
        let set = run::set_of(name)?;
        let results = bench.join("results");
        let path = if set == name { report.write(&results)? } else { report.write_into(set, &results)? };
        eprintln!("{}", path.display());
        report::run(false)?;
    }
    Ok(())
}
