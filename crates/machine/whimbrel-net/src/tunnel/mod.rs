//! A tunnel between the ports of a machine and the network it belongs to, where the two are on different
//! hosts.
//!
//! ```text
//!   away:  Port == line == [ Relay ] ~~ batches over the wire ~~ [ Relay ] -- taps -- bridges   :home
//! ```
//!
//! Each end is a [`Relay`]: a thread that reads frames from its lines or taps, gathers them in batches and
//! gives these to a [`Transport`]; what the other end sent is written to them by [`Relay::deliver`]. A relay
//! without a carrier drops what it reads. How batches get to the other host is no business of this crate.

mod backlog;
mod congestion_window;
mod mac_table;
mod relay;

pub use backlog::{BATCH_MAX, BadBatch, frames};
pub use mac_table::MacTable;
pub use relay::{InFlightBatch, Relay, RelayCounters, Socket, Transport};
