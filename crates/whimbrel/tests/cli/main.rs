//! The real binary against a scripted daemon: what it prints, how it ends, what it does to a terminal.

mod console;
mod edge;
mod fake;
mod help;
mod kept;
mod transcript;
