//! The daemon: knows the machines of a host, watches over them, and serves the API and other hosts.
//!
//! The only crate that introduces the engines to each other. What survives what: machines survive the daemon
//! (their QEMU lives on and is taken up again by the next one), capsules and records survive the host.
//!
//! Start: [`run`] with [`DaemonOptions`]. Inside: `host` holds everything and does the short requests;
//! `capture`, `resume` and `migrate` the long ones; `machine` says who may work on a machine; `live` and its
//! parts are what a running machine is made of; `take_up` finds machines again; `http` and `peers` are the
//! faces.

mod capsule;
mod core;
mod daemon;
mod evacuate;
mod guest;
mod lifecycle;
mod machine;
mod migrate;
mod network;
mod peers;
mod protect;
mod running;
mod server;
mod transfer;

pub use crate::core::error::DaemonError;
pub use crate::core::rights::{Access, may, peer_may};
pub use lifecycle::{DaemonOptions, run};

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970, UTC.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
