//! Errors of a client of the pool.

use crate::protocol::{BenefactorAddress, ChunkId, code};
use std::{io, path::PathBuf, sync::Arc};
use whimbrel_wire::{CallError, Code, ConnectError, PublicKey, Refusal};

/// Failure of a call on the pool. Cheap to clone, because every waiter of a write gets it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PoolError {
    /// The manager or a benefactor refused the request.
    #[error("the request was refused")]
    Refused {
        /// The refusal that was received.
        source: Refusal,
    },
    /// No manager could be reached before the timeout.
    #[error("no manager can be reached")]
    ManagerUnreachable {
        /// Cause of the last attempt.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A benefactor does not trust this client's key.
    #[error(
        "the benefactor at {address} does not know our key {ours}: admit it on every manager (`whimbrel pool admit`); \
         a benefactor of another manager learns of it within seconds"
    )]
    NotAdmitted {
        /// Address of the benefactor.
        address: String,
        /// The key to admit.
        ours: PublicKey,
    },
    /// A benefactor could not be reached.
    #[error("the benefactor at {address} cannot be reached")]
    BenefactorUnreachable {
        /// Address of the benefactor.
        address: String,
        /// Cause reported by the transport.
        source: Arc<ConnectError>,
    },
    /// A call failed for another reason.
    #[error("a call failed")]
    Call {
        /// Cause reported by the connection.
        source: Arc<CallError>,
    },
    /// No reachable benefactor has an intact copy.
    #[error("no copy of chunk {chunk} can be read")]
    Unreadable {
        /// Number of the chunk.
        chunk: ChunkId,
        /// Cause of a failed read, if a benefactor was asked.
        #[source]
        because: Option<Arc<PoolError>>,
    },
    /// Too few pieces of a chunk can be read.
    #[error("chunk {chunk} needs {needed} of its pieces, and only {found} can be read")]
    TooFewPieces {
        /// Number of the chunk.
        chunk: ChunkId,
        /// Pieces that were read.
        found: usize,
        /// Pieces that are needed.
        needed: usize,
        /// Cause of a failed read, if a benefactor was asked.
        #[source]
        because: Option<Arc<PoolError>>,
    },
    /// The client and the writer of the chunk do not have the same secret, or one of them has none.
    #[error("chunk {chunk} is not encrypted with the secret of this client, or it has none")]
    WrongSecret {
        /// Number of the chunk.
        chunk: ChunkId,
    },
    /// The chunk map of a version has another seal than its writer gave it, or was sealed with another
    /// secret.
    #[error(
        "version {version} is not as its writer sealed it: either this client has another secret, or somebody \
         without the secret changed what the manager has of it"
    )]
    WrongSeal {
        /// Number of the version in the pool.
        version: u64,
    },
    /// A file has another name than the one under which it was sealed.
    #[error(
        "{name} was sealed under the name {sealed}, and somebody without the secret renamed or exchanged it: \
         rename it to {sealed} to read it"
    )]
    OtherName {
        /// Present name of the file.
        name: String,
        /// Name under which a holder of the secret wrote it.
        sealed: String,
    },
    /// No benefactor is left to write to, or written chunks were lost.
    #[error("{lost} chunks could not be written")]
    Unwritten {
        /// Number of chunks.
        lost: usize,
        /// Cause for which one of the benefactors was excluded.
        #[source]
        because: Option<Arc<PoolError>>,
    },
    /// A local file operation failed.
    #[error("cannot {action}")]
    Local {
        /// The failed operation.
        action: &'static str,
        /// Cause reported by the kernel.
        source: Arc<io::Error>,
    },
    /// A closed file in the spool folder cannot be sent.
    #[error("{} is not sent: {why}", path.display())]
    LeftFile {
        /// Path of the local file, which stays.
        path: PathBuf,
        /// Reason, for people.
        why: &'static str,
    },
    /// An answer violates the protocol.
    #[error("the answer has an invalid {what}")]
    Answer {
        /// Description of the invalid part.
        what: &'static str,
    },
    /// The writer died or abandoned the write.
    #[error("the write was abandoned")]
    Abandoned,
}

/// Result of calls on the pool.
pub type Result<T> = std::result::Result<T, PoolError>;

impl PoolError {
    /// The code, if this is a refusal.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { source } => Some(source.code),
            _ => None,
        }
    }

    /// Whether the pool or a benefactor is full.
    pub fn is_full(&self) -> bool {
        self.code() == Some(code::FULL)
    }

    pub(crate) fn unreached(place: &BenefactorAddress, error: ConnectError) -> Self {
        let address = place.address.clone();
        match error {
            ConnectError::NotTrusted { ours } => Self::NotAdmitted { address, ours },
            other => Self::BenefactorUnreachable { address, source: Arc::new(other) },
        }
    }

    pub(crate) fn local(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Local { action, source: Arc::new(source) }
    }
}

impl From<CallError> for PoolError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { source } => Self::Refused { source },
            other => Self::Call { source: Arc::new(other) },
        }
    }
}

impl From<ConnectError> for PoolError {
    fn from(error: ConnectError) -> Self {
        Self::ManagerUnreachable { source: Arc::new(error) }
    }
}
