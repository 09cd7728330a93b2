//! Events of a host: what happens to its machines and operations, in order.

use crate::OperationKind;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::MachineName;

/// Something that happened on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostEvent {
    /// Number of the event. Later events have greater numbers, also after a restart of the daemon.
    pub number: u64,
    /// Time of the event.
    pub time_ms: u64,
    /// Name of the machine, capsule or schedule that it is about; empty for the host.
    pub subject: String,
    /// Kind of the event.
    #[serde(flatten)]
    pub kind: EventKind,
    /// Details in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EventKind {
    /// State of a machine has changed; the text is the new state.
    Machine,
    /// Machine is gone from this host.
    MachineRemoved,
    /// Settings of a machine were changed.
    Settings,
    /// Machine was taken over from another host.
    Takeover,
    /// Machine was started by itself, or could not be.
    SelfStart,
    /// Run of a schedule has ended; the text is its outcome.
    Schedule,
    /// Operation has begun.
    OperationStarted {
        /// Kind of the operation.
        operation: OperationKind,
    },
    /// Operation has ended; the text is its outcome.
    OperationEnded {
        /// Kind of the operation.
        operation: OperationKind,
    },
    /// Earlier events that the caller does not know are no longer known.
    Missed,
}

impl HostEvent {
    /// Machine that the event is about, if it is about one.
    pub fn machine(&self) -> Option<MachineName> {
        match self.kind {
            EventKind::OperationStarted { .. }
            | EventKind::OperationEnded { .. }
            | EventKind::Schedule
            | EventKind::Missed => None,
            _ => self.subject.parse().ok(),
        }
    }
}
