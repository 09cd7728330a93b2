//! Page capture: the one loop behind checkpoint, suspend, migration and protection.
//!
//! ```text
//! collect dirty pages -> read them -> deliver them to a sink -> repeat until few are left
//! ... pause, one last short round, save the device state, then run on here or stay paused for the target
//! ```
//!
//! Contents: the accounting of dirty pages ([`DirtyLog`]), the pure decisions about rates and the pause
//! ([`stop_policy`], [`precopy_policy`]), and the loop ([`capture`]). Pages go to a [`Sink`] (the store, a
//! remote host); the machine is reached through the traits of `whimbrel-machine`. All calls block the
//! caller's thread.
//!
//! Invariants: a page collected from a dirty log is delivered to the sink or put back. When [`capture`]
//! fails, the machine has its former run state and the consumer's dirty set holds at least what it held
//! before.

mod dirty_log;
pub mod dirty_observer;
pub mod dirty_trace;
pub mod downtime_model;
mod engine;
pub mod precopy_policy;
mod round;
mod scan_sequence;
mod sink;
mod staged_pages;
pub mod stop_policy;

pub use dirty_log::{Consumer, ConsumerPages, DirtyLog, DirtyLogState, WrongState};
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
