//! Command line of a host: verbs, tables, progress and exit codes over the API of the daemon.
//!
//! The daemon decides, this program shows. A verb is one file in `commands`: its arguments with their help,
//! and one short function. Results go to stdout, everything else to stderr. Only `app` prints errors and
//! chooses the exit code.

mod app;
mod argument_types;
mod bisection;
mod capsule_text;
mod capsule_tree;
mod cli;
mod commands;
mod context;
mod dirty_rate;
mod doctor;
mod end_signal;
mod error;
mod evacuation_text;
mod first_boot;
mod guest_command;
mod hardware_args;
mod host_bench;
mod image_build;
mod image_server;
mod machine_text;
mod mcp;
mod metrics;
mod migration_chart;
mod open_files;
mod operation;
mod output;
mod progress;
mod protection_text;
mod report;
mod result_text;
mod round_text;
mod session_dirs;
mod settings;
mod settings_args;
mod table;
mod terminal;

fn main() -> std::process::ExitCode {
    app::run()
}
