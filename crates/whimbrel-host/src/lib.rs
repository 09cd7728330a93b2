//! The daemon: knows the machines of a host, watches over them, and serves the API and other hosts.
//!
//! The only crate that introduces the engines to each other. What survives what: machines survive the daemon
//! (their QEMU lives on and is taken up again by the next one), capsules and records survive the host.
//!
//! Start: [`run`] with [`HostOptions`]. Inside: `host` holds everything and does the short requests; `capture`,
//! `resume` and `migrate` the long ones; `machine` says who may work on a machine; `live` and its parts
//! are what a running machine is made of; `take_up` finds machines again; `http` and `peers` are the faces.

mod balloon;
mod beginning;
mod bell;
mod capture;
mod commit_mark;
mod derive;
mod disk_cuts;
mod error;
mod evacuate;
mod file_cuts;
mod files;
mod follow;
mod golden;
mod graph;
mod guest_helper;
mod handovers;
mod host;
mod http;
mod images;
mod inactive;
mod kept;
mod landing;
mod layout;
mod live;
mod machine;
mod migrate;
mod operation;
mod owing;
mod page_cache;
mod peers;
mod pooled;
mod promote;
mod protect;
mod rebase;
mod record;
mod refs;
mod resume;
mod retiring;
mod rights;
mod serve;
mod settling;
mod slot;
mod stage;
mod start;
mod stock;
mod strays;
mod supervise;
mod take_up;
mod transfer;
mod tunnel;
mod warm;
mod wws;

pub use error::HostError;
pub use rights::{Access, may, peer_may};
pub use serve::{HostOptions, run};

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970, UTC.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
