//! The command line: words, tables, progress and exit codes over the API of a host daemon.
//!
//! Nothing is decided here that the daemon could decide. A verb is one file in `commands`: its arguments with
//! their help, and one short function. Results go to stdout, everything else to stderr; `edge` alone prints
//! errors and chooses the exit code.

mod capsules;
mod cli;
mod commands;
mod context;
mod doctor;
mod edge;
mod evacuated;
mod failure;
mod machines;
mod operation;
mod outcome;
mod output;
mod picture;
mod progress;
mod protection;
mod rounds;
mod sessions;
mod settings;
mod table;
mod terminal;
mod tree;
mod values;
mod wws;

fn main() -> std::process::ExitCode {
    edge::run()
}
