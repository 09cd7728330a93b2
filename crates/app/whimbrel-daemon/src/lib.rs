//! The daemon: knows the machines of a host, supervises them, and serves the API and other hosts.
//!
//! Only this crate connects the engines. Machines survive the daemon: their QEMU lives on, and the next
//! daemon adopts it. Capsules and records survive the host.
//!
//! [`run`] starts it with [`DaemonOptions`]. `daemon` has the state and the short requests; `capsule`,
//! `migrate`, `protect` and `transfer` the long ones; `machine` locks, records and recovery; `server` the
//! interfaces for users and peers. What runs a machine is `whimbrel-vm`, which knows no daemon.

mod capsule;
mod core;
mod daemon;
#[cfg(test)]
mod damage_tests;
mod evacuate;
mod examine;
mod guest;
mod image;
mod lifecycle;
mod machine;
mod migrate;
mod network;
mod peers;
mod protect;
mod schedule;
mod server;
mod transfer;

pub use crate::core::error::DaemonError;
pub use crate::core::master_key::KeySource;
pub use crate::core::rights::{Access, Action, Caller, Forbidden, Object, may};
pub use examine::{DataFinding, examine};
pub use image::{ContainerSettings, ImageSource, ImageSourceKind};
pub use lifecycle::{DaemonOptions, run};
pub use machine::machine_process::hold_machine;
pub use server::metrics::all as metrics;
pub use server::web_page::routes_of_several as page_of_several_hosts;

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970, UTC.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
