//! Errors of an identity, a trust list, a connection or a call, one enum for each.

use crate::{HelloError, PeerIdentity, PublicKey, Refusal, WireFrameError};
use std::{error::Error, io, path::PathBuf, process::ExitStatus, sync::Arc, time::Duration};
use whimbrel_core::HostName;

/// Failure to load or create the identity of this host.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file operation failed.
    #[error("cannot {action} the identity {path}")]
    File {
        /// `create` or `read`.
        action: &'static str,
        /// Path of the key file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// Other users can read the secret.
    #[error("the secret key {path} has mode {mode:o}, others can read it: expected 600")]
    Exposed {
        /// Path of the key file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// The file holds no ed25519 key.
    #[error("{path} holds no ed25519 key")]
    Damaged {
        /// Path of the key file.
        path: PathBuf,
        /// Cause reported by the parser.
        source: rcgen::Error,
    },
    /// The key could not be generated or used.
    #[error("cannot generate or use a key")]
    Key {
        /// Cause reported by the cryptographic library.
        source: rcgen::Error,
    },
    /// The key is of another kind.
    #[error("the key is not an ed25519 key")]
    NotEd25519,
}

/// Failure to use or change the trust list.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    File {
        /// `read`, `lock` or `write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The file is not a trust list.
    #[error("{path} is damaged")]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Place and cause of the error.
        source: Box<toml::de::Error>,
    },
    /// The file is larger than any trust list.
    #[error("{path} is too large for a trust list")]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// The new content cannot be written as TOML.
    #[error("cannot encode {path}")]
    Encode {
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the encoder.
        source: Box<toml::ser::Error>,
    },
    /// The name or the key is in the list already.
    #[error("the name or the key is already trusted, as {name}")]
    AlreadyTrusted {
        /// The name of the entry.
        name: HostName,
    },
    /// The entry has neither a key nor an ssh address.
    #[error("{name} has no key: only hosts that are reached over ssh need none")]
    NoKey {
        /// The name of the entry.
        name: HostName,
    },
    /// The list has no such entry.
    #[error("no trusted host is called {name}")]
    NotListed {
        /// The name that was looked up.
        name: HostName,
    },
}

/// A step of connecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectStep {
    /// The TCP connection.
    Dial,
    /// The TLS handshake.
    Tls,
    /// The exchange of hellos.
    Hello,
}

impl std::fmt::Display for ConnectStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ConnectStep::Dial => "dialling",
            ConnectStep::Tls => "the TLS handshake",
            ConnectStep::Hello => "the hello",
        })
    }
}

/// Failure to connect to a peer, or to accept one.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Input or output failed.
    #[error("connection failed during {step}")]
    Io {
        /// Step that failed.
        step: ConnectStep,
        /// Cause reported by the transport.
        source: io::Error,
    },
    /// A step took longer than its timeout.
    #[error("the peer did not finish {stage} within {after:?}")]
    Timeout {
        /// Step that timed out.
        stage: ConnectStep,
        /// The timeout that was exceeded.
        after: Duration,
    },
    /// The peer presented another key than the pinned one.
    #[error("the peer presented the key {presented}, not the pinned {expected}")]
    WrongKey {
        /// The pinned key.
        expected: PublicKey,
        /// The presented key.
        presented: PublicKey,
    },
    /// An untrusted peer tried to connect.
    #[error("the peer's key {key} is not trusted here")]
    UntrustedKey {
        /// The key to add to the trust list to trust the peer.
        key: PublicKey,
    },
    /// The peer does not trust this host's key, or pinned another.
    #[error("the peer does not trust our key {ours}")]
    NotTrusted {
        /// The key that the peer would have to trust.
        ours: PublicKey,
    },
    /// A dialled peer has no entry in the trust list, whatever its transport says.
    #[error("the trust list has no entry for {identity:?}")]
    Unlisted {
        /// What the transport has authenticated.
        identity: PeerIdentity,
    },
    /// The TLS library reported an error.
    #[error("TLS failed")]
    Tls {
        /// Cause reported by the TLS library.
        source: rustls::Error,
    },
    /// The trust list cannot be read.
    #[error("cannot read the trust list")]
    Trust {
        /// Cause from the trust list.
        source: Arc<TrustError>,
    },
    /// The peer's hello is invalid or has no version in common with ours.
    #[error("the exchange of hellos failed")]
    Hello {
        /// Problem with the hello.
        source: HelloError,
    },
    /// The ssh process exited early.
    #[error("ssh to {destination} ended ({status}): {}", on_one_line(stderr))]
    Ssh {
        /// Destination given to ssh.
        destination: String,
        /// Exit status of ssh.
        status: ExitStatus,
        /// The end of its standard error.
        stderr: String,
    },
    /// A destination that is empty, or that ssh would read as an option.
    #[error("{destination:?} is not an ssh destination")]
    Destination {
        /// The rejected destination.
        destination: String,
    },
}

fn on_one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The reason why a connection ended.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CloseReason {
    /// Closed by this side.
    #[error("closed by this side")]
    Local,
    /// The peer sent a goodbye.
    #[error("closed by the peer{}{reason}", if reason.is_empty() { "" } else { ": " })]
    Peer {
        /// The peer's reason, at most 200 characters; may be empty.
        reason: String,
    },
    /// The stream ended without a goodbye.
    #[error("the connection was lost")]
    Lost,
    /// Input or output failed.
    #[error("the connection failed")]
    Io {
        /// Cause reported by the transport.
        source: Arc<io::Error>,
    },
    /// Nothing was received, or a write made no progress, for too long.
    #[error("the peer does not respond: no progress for {silent:?}")]
    Dead {
        /// Time without progress.
        silent: Duration,
    },
    /// The peer's entry in the trust list was changed or removed.
    #[error("the trust in the peer was changed here")]
    TrustChanged,
    /// The peer violated the protocol.
    #[error("the peer violated the protocol")]
    Protocol {
        /// The violation that was found.
        source: WireFrameError,
    },
}

/// Failure of a call.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The peer refused the request.
    #[error("refused by the peer")]
    Refused {
        /// The peer's refusal.
        source: Refusal,
    },
    /// The connection ended before the reply. Whether the request was carried out is unknown.
    #[error("no reply")]
    Closed {
        /// The reason why the connection ended.
        source: CloseReason,
    },
    /// The request exceeds the limits, or its kind belongs to the connection; it was not sent.
    #[error("the request cannot be sent")]
    Unsendable {
        /// The limit that is exceeded.
        source: WireFrameError,
    },
    /// A header could not be encoded or decoded.
    #[error("cannot {action} the header of kind {kind:#06x}")]
    Header {
        /// `encode` or `decode`.
        action: &'static str,
        /// Kind of the request.
        kind: u16,
        /// Cause reported by the encoding.
        source: Arc<dyn Error + Send + Sync>,
    },
}

impl CallError {
    /// Whether the same call may succeed later, perhaps over a new connection.
    pub fn is_retryable(&self) -> bool {
        match self {
            CallError::Refused { source } => source.retryable,
            CallError::Closed { .. } => true,
            CallError::Unsendable { .. } | CallError::Header { .. } => false,
        }
    }
}
