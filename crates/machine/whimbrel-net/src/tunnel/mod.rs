//! Tunnel: carries frames between the ports of a machine and its network, if these are on different hosts.
//!
//! ```text
//!   away:  Port == pipe == [ Relay ] ~~ batches over the wire ~~ [ Relay ] -- taps -- bridges   :home
//! ```
//!
//! Each end is a [`Relay`]: a thread that reads frames from its pipes or taps, batches them and passes the
//! batches to a [`Transport`]; [`Relay::deliver`] writes the batches of the other end to them. A relay
//! without a transport drops what it reads. This crate has no implementation of the transport.

mod backlog;
mod congestion_window;
mod mac_table;
mod relay;

pub use backlog::{BATCH_MAX, BadBatch, frames};
pub use mac_table::MacTable;
pub use relay::{InFlightBatch, Relay, RelayCounters, Socket, Transport};
