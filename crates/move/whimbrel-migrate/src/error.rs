//! Error of the target of a migration.

use crate::{handover::Target, page_batch::PageBatchError, protocol::HandoverId, target::HostError};

/// Error of a message that the target could not carry out.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The target cannot accept the machine.
    #[error("the target refuses the machine")]
    Refused {
        /// Reason of the target host.
        source: HostError,
    },
    /// No such handover is in progress here.
    #[error("no handover {handover} is under way")]
    Unknown {
        /// Id in the message.
        handover: HandoverId,
    },
    /// The message is not allowed in the state of the handover.
    #[error("the message does not match the state of the handover, {state:?}")]
    State {
        /// State of the handover.
        state: Target,
    },
    /// The message is one that a correct source never sends.
    #[error("the source sent {what}")]
    Invalid {
        /// Description of the invalid content.
        what: &'static str,
    },
    /// The header cannot be decoded.
    #[error("cannot decode the message header")]
    Header {
        /// Cause reported by the decoder.
        source: postcard::Error,
    },
    /// The pages cannot be decoded.
    #[error("cannot decode the pages")]
    Batch(#[from] PageBatchError),
    /// The message kind does not belong to a migration.
    #[error("message kind {kind:#06x} does not belong to a migration")]
    Kind {
        /// Number of the kind.
        kind: u16,
    },
    /// Pages or boot files could not be stored.
    #[error("cannot store the received data")]
    Write {
        /// Cause reported by the host.
        source: HostError,
    },
    /// The machine could not be loaded.
    #[error("cannot load the machine on the target")]
    Prepare {
        /// Cause reported by the host.
        source: HostError,
    },
    /// The machine is loaded but did not start.
    #[error("the machine is loaded but cannot be started")]
    Run {
        /// Cause reported by the host.
        source: HostError,
    },
    /// The machine never ran, and that could not be recorded.
    #[error("the machine cannot be given back")]
    Return {
        /// Cause reported by the host.
        source: HostError,
    },
}

impl TargetError {
    pub(crate) fn write(source: HostError) -> Self {
        Self::Write { source }
    }
}
