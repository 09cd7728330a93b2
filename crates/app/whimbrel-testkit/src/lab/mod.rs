//! Network lab on one computer: hosts in network namespaces, links between them, probes that watch a guest.

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

/// Cause of a lab that could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The operating system returned an error.
    #[error("cannot {action}")]
    System {
        /// Action that failed.
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The command `ip` or `tc` failed.
    #[error("{command} failed: {errors}")]
    Command {
        /// Command line of the failed command.
        command: String,
        /// Standard error of the command.
        errors: String,
    },
}

impl LabError {
    /// Makes an error of the operating system for `action`, for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { action, source: source.into() }
    }
}
