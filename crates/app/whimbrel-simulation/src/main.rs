//! Simulation: the program's own code under a simulated clock, disk and network, on threads of which one
//! goes on at a time. One seed decides everything, so a seed that breaks a rule can be run again.
//!
//! This binary defines the symbols of the C library that the program reaches the system by ([`symbols`]);
//! behind them is the [`world`]. A scene runs the program, rules say what must hold. Each seed is a forked
//! child. `docs/design/2026-11-25-simulation.md` has the reasons.

mod command;
mod losses;
mod random;
mod raw;
mod report;
mod rules;
mod scenes;
mod seeds;
mod shrink;
mod symbols;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    match command::run(std::env::args().skip(1).collect()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("simulate: {error:#}");
            ExitCode::from(2)
        }
    }
}
