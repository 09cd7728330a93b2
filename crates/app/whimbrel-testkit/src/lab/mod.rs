//! A laboratory on one machine: hosts in network namespaces, links between them, probes that watch a guest.

mod datagram_probe;
mod delay_line;
mod link;
mod namespace;
mod process;
mod stream_probe;
mod topology;
mod tun;

pub use datagram_probe::{Probe, ProbeReport};
pub use delay_line::{DelayLine, LinkConfig};
pub use link::LinkEmulator;
pub use namespace::Namespace;
pub use process::Process;
pub use stream_probe::{StreamEnd, StreamProbe, StreamReport};
pub use topology::{Host, Lab};

use std::io;

/// Why a laboratory could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The operating system refused.
    #[error("cannot {action}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `ip` or `tc` refused.
    #[error("{command} failed: {errors}")]
    Command {
        /// The command line.
        command: String,
        /// What it wrote to standard error.
        errors: String,
    },
}

impl LabError {
    /// For `map_err`: an error of the operating system while doing `action`.
    pub(crate) fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { action, source: source.into() }
    }
}
