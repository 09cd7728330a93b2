//! Why the pool did not do what was asked.

use crate::protocol::{BenefactorAddress, ChunkId, code};
use std::{io, sync::Arc};
use whimbrel_wire::{CallError, Code, ConnectError, PublicKey, Refusal};

/// Why a call on the pool failed. Cheap to copy, since everybody who waits for a write hears of it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PoolError {
    /// The manager or a benefactor said no.
    #[error("refused")]
    Refused {
        /// What it said.
        #[source]
        source: Refusal,
    },
    /// No manager could be reached for as long as we wait.
    #[error("no manager can be reached")]
    Away {
        /// The last reason.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A benefactor does not know us.
    #[error(
        "the benefactor at {address} does not know our key {ours}: have it admitted on every manager (`whimbrel pool admit`); \
         a benefactor that reports to another manager than ours hears of it within seconds"
    )]
    NotAdmitted {
        /// Where it is.
        address: String,
        /// The key that has to be admitted.
        ours: PublicKey,
    },
    /// A benefactor could not be reached.
    #[error("the benefactor at {address} cannot be reached")]
    Unreached {
        /// Where it is.
        address: String,
        /// Why.
        #[source]
        source: Arc<ConnectError>,
    },
    /// A call failed for another reason.
    #[error("a call failed")]
    Call {
        /// Why.
        #[source]
        source: Arc<CallError>,
    },
    /// No benefactor that can be reached has a right copy.
    #[error("no copy of chunk {chunk} can be read")]
    Unreadable {
        /// Which.
        chunk: ChunkId,
        /// Why one of those who should have it did not give it, if one was asked.
        #[source]
        because: Option<Arc<PoolError>>,
    },
    /// The chunk was sealed with a secret, which is not ours.
    #[error("chunk {chunk} is sealed with another secret than ours")]
    Sealed {
        /// Which.
        chunk: ChunkId,
    },
    /// Nobody is left to write to, or what was written is gone again.
    #[error("{lost} chunks could not be written")]
    Unwritten {
        /// How many.
        lost: usize,
        /// Why one of those who were left out was.
        #[source]
        because: Option<Arc<PoolError>>,
    },
    /// A local file failed.
    #[error("cannot {action}")]
    Local {
        /// What.
        action: &'static str,
        /// Why.
        #[source]
        source: Arc<io::Error>,
    },
    /// An answer makes no sense.
    #[error("the answer has an impossible {what}")]
    Answer {
        /// What.
        what: &'static str,
    },
    /// The writer died, or gave up.
    #[error("the write was given up")]
    GivenUp,
}

/// What calls on the pool return.
pub type Result<T> = std::result::Result<T, PoolError>;

impl PoolError {
    /// The code of a refusal.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { source } => Some(source.code),
            _ => None,
        }
    }

    /// The pool is full.
    pub fn is_full(&self) -> bool {
        self.code() == Some(code::FULL)
    }

    /// A benefactor that cannot be connected to.
    pub(crate) fn unreached(place: &BenefactorAddress, error: ConnectError) -> Self {
        let address = place.address.clone();
        match error {
            ConnectError::NotTrusted { ours } => Self::NotAdmitted { address, ours },
            other => Self::Unreached { address, source: Arc::new(other) },
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
        Self::Away { source: Arc::new(error) }
    }
}
