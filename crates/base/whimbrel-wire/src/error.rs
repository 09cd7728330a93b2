//! Why an identity, a trust file, a connection or a call failed. One enum for each family.

use crate::{HelloError, PublicKey, Refusal, WireFrameError};
use std::{error::Error, io, path::PathBuf, process::ExitStatus, sync::Arc, time::Duration};
use whimbrel_core::HostName;

/// The identity of this host cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file operation failed.
    #[error("cannot {action} the identity {path}")]
    File {
        /// `create` or `read`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others can read the secret.
    #[error("the secret key {path} has mode {mode:o}, others can read it: expected 600")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file holds no ed25519 key.
    #[error("{path} holds no ed25519 key")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rcgen::Error,
    },
    /// The key could not be made or used.
    #[error("cannot make a key")]
    Key {
        /// Why.
        source: rcgen::Error,
    },
    /// A key of another kind.
    #[error("the key is not an ed25519 key")]
    NotEd25519,
}

/// The trust file cannot be used as asked.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    File {
        /// `read`, `lock` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no trust file.
    #[error("{path} is damaged")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// The file is larger than any trust file.
    #[error("{path} is too large for a trust file")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The new content cannot be written as TOML.
    #[error("cannot encode {path}")]
    Encode {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<toml::ser::Error>,
    },
    /// Name or key are there already.
    #[error("name or key are trusted already, as {name}")]
    Known {
        /// The name of the entry.
        name: HostName,
    },
    /// Nothing would vouch for the host.
    #[error("{name} has no key: only a host that is reached over ssh does without")]
    NoKey {
        /// The name of the entry.
        name: HostName,
    },
    /// No such entry.
    #[error("no trusted host is called {name}")]
    Unknown {
        /// The name asked for.
        name: HostName,
    },
}

/// How far a connection came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectStep {
    /// TCP connection.
    Dial,
    /// TLS handshake.
    Tls,
    /// First message.
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

/// No connection came about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Input or output failed.
    #[error("connection failed during {stage}")]
    Io {
        /// When.
        stage: ConnectStep,
        /// Why.
        source: io::Error,
    },
    /// The peer was silent for too long.
    #[error("the peer did not finish {stage} within {after:?}")]
    Timeout {
        /// When.
        stage: ConnectStep,
        /// The deadline.
        after: Duration,
    },
    /// Somebody else answers there.
    #[error("the peer presented the key {presented}, not the pinned {expected}")]
    WrongKey {
        /// Pinned.
        expected: PublicKey,
        /// Presented.
        presented: PublicKey,
    },
    /// Somebody we do not trust called.
    #[error("a stranger with the key {key} is not trusted here")]
    Stranger {
        /// The key to put into the trust file, should it be trusted.
        key: PublicKey,
    },
    /// The peer does not trust us, or pinned another key.
    #[error("the peer does not trust our key {ours}")]
    NotTrusted {
        /// The key the peer would have to trust.
        ours: PublicKey,
    },
    /// TLS failed.
    #[error("TLS failed")]
    Tls {
        /// Why.
        source: rustls::Error,
    },
    /// The trust file cannot be used.
    #[error("cannot tell whom to trust")]
    Trust {
        /// Why.
        source: Arc<TrustError>,
    },
    /// The first message is none, or no version is common.
    #[error("the hosts cannot talk")]
    Hello {
        /// Why.
        source: HelloError,
    },
    /// The ssh child ended early.
    #[error("ssh to {destination} ended ({status}): {}", on_one_line(stderr))]
    Ssh {
        /// Where to.
        destination: String,
        /// Its status.
        status: ExitStatus,
        /// The end of what it said.
        stderr: String,
    },
    /// A destination that ssh would read as an option.
    #[error("{destination:?} is not an ssh destination")]
    Destination {
        /// What was given.
        destination: String,
    },
}

fn on_one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Why a connection ended.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CloseReason {
    /// This side closed it.
    #[error("closed by this side")]
    Local,
    /// The peer said goodbye.
    #[error("closed by the peer{}{reason}", if reason.is_empty() { "" } else { ": " })]
    Peer {
        /// Why, if it said so (at most 200 characters).
        reason: String,
    },
    /// The stream ended without a goodbye.
    #[error("the connection was cut")]
    Cut,
    /// Input or output failed.
    #[error("the connection failed")]
    Io {
        /// Why.
        source: Arc<io::Error>,
    },
    /// Nothing was heard, or could be written, for too long.
    #[error("the peer is dead: no progress for {silent:?}")]
    Dead {
        /// How long.
        silent: Duration,
    },
    /// The peer broke the protocol.
    #[error("the peer broke the protocol")]
    Protocol {
        /// How.
        source: WireFrameError,
    },
}

/// A call brought no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The peer answered no.
    #[error("refused by the peer")]
    Refused {
        /// What it said.
        source: Refusal,
    },
    /// The connection ended first. Whether the request was carried out is unknown.
    #[error("no reply")]
    Closed {
        /// Why it ended.
        source: CloseReason,
    },
    /// The request is over the limits, or of a kind the wire keeps to itself, and was not sent.
    #[error("the request cannot be sent")]
    Unsendable {
        /// Why not.
        source: WireFrameError,
    },
    /// A header could not be encoded or decoded.
    #[error("cannot {action} the header of kind {kind:#06x}")]
    Header {
        /// `encode` or `decode`.
        action: &'static str,
        /// Kind of the request.
        kind: u16,
        /// Why.
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
