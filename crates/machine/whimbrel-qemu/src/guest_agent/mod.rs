//! qemu-ga, the guest agent that distributions have: its protocol (QEMU's `qga/qapi-schema.json`), spoken
//! over the virtio port `org.qemu.guest_agent.0`.
//!
//! `message` and `answers` are pure. The guest is not trusted: every answer is bounded before it is kept, and
//! what is no answer is an error. `client` has the connection. A guest without the program never answers, so
//! every wait has a limit.

mod answers;
mod client;
mod message;

pub use answers::{ExecStatus, FileChunk, GuestInterface};
pub use client::{QemuGa, QemuGaSession};
pub use message::{AgentAnswer, AnswerDecoder, request, sync_request};

use std::{io, time::Duration};

/// Name of the port, as the guest sees it in `/sys/class/virtio-ports/*/name`.
pub const QEMU_GA_PORT: &str = "org.qemu.guest_agent.0";

/// Cause of a failed command to qemu-ga.
#[derive(Debug, thiserror::Error)]
pub enum QemuGaError {
    /// Nothing answers in the guest.
    #[error("qemu-ga in the guest does not answer within {after:?}")]
    Silent {
        /// Time that it had.
        after: Duration,
    },
    /// Another command is being carried out.
    #[error("qemu-ga in the guest is busy with another command")]
    Busy,
    /// qemu-ga refuses, or failed.
    #[error("qemu-ga in the guest refuses {command}: {words}")]
    Refused {
        /// Name of the command.
        command: &'static str,
        /// Words of qemu-ga, cut and without control characters.
        words: String,
    },
    /// The answer is none, or too long.
    #[error("the answer of qemu-ga in the guest to {command} is invalid")]
    Malformed {
        /// Name of the command.
        command: &'static str,
    },
    /// The port cannot be reached: QEMU has ended.
    #[error("the port of qemu-ga cannot be used")]
    Port(#[source] io::Error),
}
