//! The one loop behind checkpoint, suspend, migrate and protect.
//!
//! ```text
//! learn which pages changed -> read them -> hand them to a sink -> repeat until little is left
//! ... pause, one last short round, take the device state, go on here or stay paused for the other side
//! ```
//!
//! What is here: the bookkeeping of dirty sets ([`Ledger`]), the decisions how fast to go and when to stop ([`pace`],
//! [`precopy`], pure), and the loop itself ([`capture`]). What is not: where pages go (a [`Sink`] of the store, of a remote host), and
//! what a machine is (traits of `whimbrel-machine`). Plain blocking calls on the caller's thread.
//!
//! Invariants: a page taken from a ledger is delivered to the sink or put back; when [`capture`] fails the
//! machine is in the run state it was found in and the follower's dirty sets hold at least what they held.

mod engine;
mod ledger;
mod order;
pub mod pace;
pub mod precopy;
pub mod predict;
mod round;
mod sink;
pub mod tap;
pub mod trace;

pub use engine::{Captured, Finish, PauseParts, Phase, Progress, Subject, capture};
pub use ledger::{Follower, Ledger};
pub use pace::{Pace, Policy, Scan, StopReason, Verdict};
pub use precopy::{Precopy, Rates};
pub use round::RoundStats;
pub use sink::{Batch, CaptureError, Sink, SinkError};

#[cfg(test)]
mod brake_tests;
#[cfg(test)]
mod hot_tests;
#[cfg(test)]
mod tests;
