//! How a migration fails, on either side.

use crate::{handover::Target, page_batch::PageBatchError, protocol::HandoverId, target::HostError};

/// Why the target could not do what a message asked.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The machine cannot come here.
    #[error("the target refuses the machine")]
    Refused {
        /// Why.
        #[source]
        source: HostError,
    },
    /// No such handover is under way here.
    #[error("no handover {handover} is under way")]
    Unknown {
        /// Which one was named.
        handover: HandoverId,
    },
    /// The message does not fit the state of the handover.
    #[error("the message does not fit a handover that is {state:?}")]
    State {
        /// Its state.
        state: Target,
    },
    /// A sound source would not send this.
    #[error("the source sent {what}")]
    Invalid {
        /// What it sent.
        what: &'static str,
    },
    /// The header is garbage.
    #[error("the message header cannot be read")]
    Header {
        /// Why.
        #[source]
        source: postcard::Error,
    },
    /// The pages are garbage.
    #[error("the pages cannot be read")]
    Batch(#[from] PageBatchError),
    /// No message has this kind.
    #[error("message kind {kind:#06x} is not one of a migration")]
    Kind {
        /// The kind.
        kind: u16,
    },
    /// Pages or blobs could not be stored.
    #[error("cannot store what arrived")]
    Write {
        /// Why.
        #[source]
        source: HostError,
    },
    /// The machine did not load.
    #[error("the machine does not load on the target")]
    Prepare {
        /// Why.
        #[source]
        source: HostError,
    },
    /// The machine is loaded but did not start.
    #[error("the machine is loaded but cannot be started")]
    Run {
        /// Why.
        #[source]
        source: HostError,
    },
}

impl TargetError {
    pub(crate) fn write(source: HostError) -> Self {
        Self::Write { source }
    }
}
