//! QMP, QEMU's control protocol: one JSON object a line over a unix socket (QEMU docs/interop/qmp-spec).
//!
//! Answers are plain [`serde_json::Value`]s: what a newer QEMU adds must never make an answer unreadable.

mod client;
mod event;
mod line_reader;

pub(crate) use client::PendingCommand;
pub use client::{Qmp, QmpError};
pub use event::{MachineEvent, ShutdownCause};
