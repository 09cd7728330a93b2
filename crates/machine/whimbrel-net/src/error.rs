//! Errors of network ports.

use std::io;

/// Cause of a port that could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The tap device could not be created.
    #[error("cannot {action} tap device {name:?}")]
    Tap {
        /// Verb of the operation: `create`, `bring up`, …
        action: &'static str,
        /// Name of the device.
        name: String,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The bridge does not exist or does not accept the tap device.
    #[error("cannot join bridge {bridge:?}")]
    Bridge {
        /// Name of the bridge.
        bridge: String,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The namespace of a QEMU, or a device in it, could not be created or opened.
    #[error("cannot {action} the network of qemu")]
    GuestNetwork {
        /// Verb of the operation: `create` or `connect to`.
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The port's thread could not be started or woken.
    #[error("cannot {action} the port's thread")]
    Thread {
        /// Verb of the operation: `start`, `wake`, …
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// Output is held, or inputs are recorded or replayed.
    #[error("the port of a protected machine cannot be passed on")]
    Protected,
    /// The state that was passed is not one that a port leaves.
    #[error("the state of a port is invalid")]
    InvalidState,
    /// The operation needs an output buffer, and the port has none.
    #[error("the port has no output buffer")]
    NotBuffering,
}
