//! Machine events that QEMU reports. Pure.
//!
//! Unknown events and reasons are text, so a newer QEMU never breaks the stream of events.

use serde_json::Value;

/// Event of a machine.
#[derive(Debug, Clone, PartialEq)]
pub enum MachineEvent {
    /// The machine was switched off. QEMU stays, paused, until the command to quit.
    Shutdown(ShutdownCause),
    /// The machine was reset.
    Reset {
        /// Whether the guest requested it (otherwise the host did).
        guest: bool,
        /// QEMU's name of the reason: `guest-reset`, …
        reason: String,
    },
    /// The virtual CPUs stopped.
    Stopped,
    /// The virtual CPUs run again.
    Resumed,
    /// A disk could not be read or written.
    BlockIoError {
        /// Id of the device: `disk0`, …
        device: String,
        /// Operation that failed: `read` or `write`.
        operation: String,
        /// Reaction of QEMU: `stop` (the machine was paused), `report` or `ignore`.
        action: String,
        /// Error text of the host system.
        reason: String,
    },
    /// The guest's kernel panicked.
    GuestPanicked {
        /// Reaction of QEMU: `run`, `pause`, …
        action: String,
    },
    /// A transfer of state entered another phase: `setup`, `active`, `completed`, `failed`, …
    Migration {
        /// QEMU's name of the phase.
        status: String,
    },
    /// The guest changed the size of its balloon.
    BalloonChanged {
        /// Present memory size of the guest in bytes.
        actual: u64,
    },
    /// The connection ended: QEMU died or quit. The last event.
    Disconnected,
    /// Any other event.
    Other {
        /// Name of the event in QMP.
        name: String,
        /// Data of the event, null if it has none.
        data: Value,
    },
}

/// Origin of a shutdown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShutdownCause {
    /// The guest, with QEMU's name of the reason: `guest-shutdown`, `guest-panic`, …
    Guest(String),
    /// The host, with QEMU's name of the reason: `host-qmp-quit`, `host-signal`, …
    Host(String),
}

impl MachineEvent {
    /// Event of a QMP message, if it is one.
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
