//! `cargo xtask`: the checks and chores of the workspace. The same commands run here and in CI.
//!
//! Nothing in this program knows how a part of Whimbrel works; it knows only the rules that hold for all of
//! them. Exit code 0: done and clean. 1: a check found something, or a step failed; what it was is on stderr.

mod bench;
mod book;
mod campaign;
mod check;
mod clients;
mod fuzz;
mod lint_build;
mod release;
mod sbom;
mod simulate;
mod test_run;
mod tidy;
mod web;

use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  check                 everything that must hold before a change is merged: tidy, fmt, build, clippy, doc, test
  check --changed       the same without doc, and only the tests whose programs changed since they passed
  fuzz [--minutes N] [TARGET...]
                        parsers of outside bytes by libFuzzer with sanitizers (nightly), N minutes for all
  simulate [OPTIONS]    the program under simulated clocks, disks and networks, by seeds; --help tells more
  campaign NAME [--minutes N] [--seed S]
                        real machines under faults at random instants: moves, takeovers
  tidy                  house rules only: arrows between crates, licences, sizes, comments, words, links
  book                  the manual as a site of pages with a search, by mdBook: target/book/html/index.html
  sbom FILE             the bill of materials of the program: CycloneDX JSON
  release VERSION [--built PROGRAM] [--dry-run]
                        all that is published of this commit, into target/release-VERSION: programs, package,
                        bill of materials, Python client, notes, checksums
  web                   build the web page from web/ with npm; the daemon embeds web/dist
  clients               generate the Python client from docs/openapi.json, and check it
  bench NAME [OPTIONS]  run one named experiment (see: cargo xtask bench --help)
";

fn main() -> ExitCode {
    match lint_build::become_compiler().and_then(|()| run(std::env::args().skip(1).collect())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut args: Vec<String>) -> Result<()> {
    let rest = if args.is_empty() { Vec::new() } else { args.split_off(1) };
    match args.first().map(String::as_str) {
        Some("check") => check::run(root(), scope(&rest)?),
        Some("fuzz") => fuzz::run(root(), &rest),
        Some("simulate") => simulate::run(root(), &rest),
        Some("campaign") => campaign::run(root(), &rest),
        Some("tidy") => tidy::run(root()),
        Some("sbom") => match &rest[..] {
            [file] => sbom::write(root(), Path::new(file)),
            other => bail!("sbom takes the file to write, not {other:?}"),
        },
        Some("release") => release::run(root(), &rest),
        Some("book") => book::build(root()),
        Some("web") => web::build(root()),
        Some("clients") => clients::build(root()),
        Some("bench") => bench::run(root(), &rest),
        None | Some("help" | "-h" | "--help") => {
            print!("{USAGE}");
            Ok(())
        }
        Some(other) => bail!("no command {other:?}\n{USAGE}"),
    }
}

/// Which tests `check` runs.
fn scope(arguments: &[String]) -> Result<check::Scope> {
    match arguments {
        [] => Ok(check::Scope::All),
        [changed] if changed == "--changed" => Ok(check::Scope::Changed),
        other => bail!("check takes --changed or nothing, not {other:?}"),
    }
}

/// The top folder of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in a folder of the workspace")
}
