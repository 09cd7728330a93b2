//! What QEMU reports by itself, as a type. Pure.
//!
//! Events and reasons that are not known here arrive as text, so a newer QEMU never breaks the stream of
//! events.

use serde_json::Value;

/// Something that happened to a machine.
#[derive(Debug, Clone, PartialEq)]
pub enum MachineEvent {
    /// The machine was switched off. QEMU stays, paused, until it is told to quit.
    Shutdown(ShutdownCause),
    /// The machine was reset.
    Reset {
        /// Whether the guest asked for it (otherwise the host did).
        guest: bool,
        /// QEMU's word for the reason, `guest-reset`, …
        reason: String,
    },
    /// The virtual CPUs stopped.
    Stopped,
    /// The virtual CPUs run again.
    Resumed,
    /// A disk could not be read or written.
    BlockIoError {
        /// Device id, `disk0`, …
        device: String,
        /// `read` or `write`.
        operation: String,
        /// `stop` (the machine was paused), `report` or `ignore`.
        action: String,
        /// The system's words.
        reason: String,
    },
    /// The guest's kernel panicked.
    GuestPanicked {
        /// What QEMU did about it: `run`, `pause`, …
        action: String,
    },
    /// A transfer of state entered another phase: `setup`, `active`, `completed`, `failed`, …
    Migration {
        /// QEMU's word for the phase.
        status: String,
    },
    /// The guest changed the size of its balloon.
    BalloonChanged {
        /// Bytes of memory the guest has now.
        actual: u64,
    },
    /// The connection ended: QEMU died or quit. Nothing follows.
    Disconnected,
    /// Any other event.
    Other {
        /// Its QMP name.
        name: String,
        /// Its data, null if it has none.
        data: Value,
    },
}

/// Who switched a machine off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShutdownCause {
    /// The guest, by itself or when asked to; QEMU's word, `guest-shutdown`, `guest-panic`, …
    Guest(String),
    /// The host; QEMU's word, `host-qmp-quit`, `host-signal`, …
    Host(String),
}

impl MachineEvent {
    /// The event of a QMP message, if it is one.
    pub(super) fn from_message(message: &Value) -> Option<Self> {
        let name = message.get("event")?.as_str()?;
        let data = message.get("data").unwrap_or(&Value::Null);
        let text = |key: &str| data.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let guest = || data.get("guest").and_then(Value::as_bool).unwrap_or(false);
        Some(match name {
            "SHUTDOWN" if guest() => Self::Shutdown(ShutdownCause::Guest(text("reason"))),
            "SHUTDOWN" => Self::Shutdown(ShutdownCause::Host(text("reason"))),
            "RESET" => Self::Reset { guest: guest(), reason: text("reason") },
            "STOP" => Self::Stopped,
            "RESUME" => Self::Resumed,
            "BLOCK_IO_ERROR" => Self::BlockIoError {
                device: text("device"),
                operation: text("operation"),
                action: text("action"),
                reason: text("reason"),
            },
            "GUEST_PANICKED" => Self::GuestPanicked { action: text("action") },
            "MIGRATION" => Self::Migration { status: text("status") },
            "BALLOON_CHANGE" => {
                Self::BalloonChanged { actual: data.get("actual").and_then(Value::as_u64).unwrap_or(0) }
            }
            _ => Self::Other { name: name.to_owned(), data: data.clone() },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_of_a_newer_qemu_is_kept_as_text() {
        let event = |message| MachineEvent::from_message(&message);
        let data = json!({"guest": true, "reason": "guest-novelty"});
        assert_eq!(
            event(json!({"event": "SHUTDOWN", "data": data})),
            Some(MachineEvent::Shutdown(ShutdownCause::Guest("guest-novelty".into())))
        );
        assert_eq!(
            event(json!({"event": "NEWS"})),
            Some(MachineEvent::Other { name: "NEWS".into(), data: Value::Null })
        );
        assert_eq!(event(json!({"return": {}})), None);
        assert_eq!(event(json!({"event": 7})), None);
    }
}
