//! The one loop behind checkpoint, suspend, migrate and protect.
//!
//! ```text
//! learn which pages changed -> read them -> hand them to a sink -> repeat until little is left
//! ... pause, one last short round, take the device state, go on here or stay paused for the other side
//! ```
//!
//! What is here: the bookkeeping of dirty sets ([`DirtyLog`]), the decisions how fast to go and when to stop
//! ([`pace`], [`precopy`], pure), and the loop itself ([`capture`]). What is not: where pages go (a [`Sink`]
//! of the store, of a remote host), and what a machine is (traits of `whimbrel-machine`). Plain blocking
//! calls on the caller's thread.
//!
//! Invariants: a page taken from a ledger is delivered to the sink or put back; when [`capture`] fails the
//! machine is in the run state it was found in and the follower's dirty sets hold at least what they held.

mod dirty_log;
pub mod dirty_observer;
pub mod dirty_trace;
pub mod downtime_model;
mod engine;
pub mod precopy_policy;
mod round;
mod scan_sequence;
mod sink;
pub mod stop_policy;

pub use dirty_log::{Consumer, DirtyLog};
pub use engine::{AfterCapture, CaptureSource, Captured, PauseParts, Phase, Progress, capture};
pub use precopy_policy::{PrecopyPolicy, Rates};
pub use round::RoundStats;
pub use sink::{CaptureError, PageBatch, Sink, SinkError};
pub use stop_policy::{CheckpointPolicy, RoundDecision, Scan, StopPolicy, StopReason};

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod rewritten_pages_tests;
#[cfg(test)]
mod throttle_tests;
