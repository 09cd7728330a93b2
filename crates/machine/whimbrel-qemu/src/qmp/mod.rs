//! QMP, QEMU's control protocol: one JSON object a line over a Unix socket (QEMU docs/interop/qmp-spec).
//!
//! Answers are plain [`serde_json::Value`]s, so that additions of a newer QEMU never make an answer
//! unreadable.

mod client;
mod event;
mod line_reader;
mod writer;

pub(crate) use client::PendingCommand;
pub use client::{Qmp, QmpError, QmpState};
pub use event::{MachineEvent, ShutdownCause};
