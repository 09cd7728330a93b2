//! The real binary against a scripted daemon and as the daemon: what it prints, how it ends, what it does to
//! a terminal.

mod console;
mod daemon;
mod edge;
mod fake;
mod help;
mod kept;
mod transcript;
