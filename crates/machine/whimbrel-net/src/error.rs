//! Why a port could not be opened.

use std::io;

/// Why a port could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The tap device could not be made.
    #[error("cannot {action} tap device {name:?}")]
    Tap {
        /// `create`, `bring up`, …
        action: &'static str,
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The bridge is not there or does not take the tap device.
    #[error("cannot join bridge {bridge:?}")]
    Bridge {
        /// Its name.
        bridge: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The port's thread could not be started or woken.
    #[error("cannot {action} the port's thread")]
    Thread {
        /// `start`, `wake`, …
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The operation is about held frames, and none are held.
    #[error("the port does not hold frames back")]
    NotHolding,
}
