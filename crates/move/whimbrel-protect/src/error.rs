//! Errors of a protection, on the primary and on the standby.

use crate::codec::sections::DamagedEpochPages;
use std::error::Error;
use whimbrel_capture::CaptureError;
use whimbrel_machine::{MachineError, PageError};
use whimbrel_migrate::{compatibility::Incompatibility, link::LinkError};

/// Any error of the daemon.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Reasons why the primary stopped replicating. Its machine runs, and no dirty page is forgotten.
#[derive(Debug, thiserror::Error)]
pub enum PrimaryError {
    /// The standby refused the start request.
    #[error("the standby refused the machine")]
    Start(#[source] LinkError),
    /// The standby host lacks something that the machine needs.
    #[error("the machine does not fit the standby")]
    Incompatible(#[source] Incompatibility),
    /// A boot file could not be read or sent.
    #[error("cannot send the machine's boot files to the standby")]
    Blob(#[source] BoxError),
    /// The link is lost, or the standby refused a message.
    #[error("replication to the standby failed")]
    Link(#[from] LinkError),
    /// Seeding failed or was cancelled.
    #[error("seeding the standby did not finish")]
    Seeding(#[source] CaptureError),
    /// Pages could not be read or scanned.
    #[error(transparent)]
    Pages(#[from] PageError),
    /// The machine could not be paused, saved or unpaused.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// More is dirty than an epoch may hold.
    #[error("{bytes} bytes are dirty, more than an epoch may hold")]
    EpochTooLarge {
        /// Bytes of dirty pages.
        bytes: u64,
    },
    /// A reply of the standby cannot be decoded.
    #[error("cannot decode the reply of the standby")]
    Answer(#[source] postcard::Error),
    /// The standby got a page wrong although it was sent again.
    #[error("the standby got page {page} of array {array} wrong although all of it was sent")]
    WrongPage {
        /// Index of the array.
        array: u32,
        /// Number of the page.
        page: u64,
    },
    /// The codec reported an error.
    #[error("cannot encode pages")]
    Encode(#[source] std::io::Error),
}

/// Reasons why the standby rejected a message.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// The standby host refused the machine.
    #[error("the standby refuses the machine")]
    Refused(#[source] BoxError),
    /// A message that a sound primary would not send now.
    #[error("the primary sent {what}")]
    Invalid {
        /// Description of the message.
        what: &'static str,
    },
    /// The standby has taken over, is about to, or has ended.
    #[error("the standby no longer takes part in this protection")]
    Ended,
    /// Received epoch pages are damaged.
    #[error(transparent)]
    Damaged(#[from] DamagedEpochPages),
    /// The header cannot be decoded.
    #[error("the message header cannot be read")]
    Header(#[source] postcard::Error),
    /// Pages or files could not be stored.
    #[error("cannot store what arrived")]
    Write(#[source] BoxError),
    /// The machine did not load or start.
    #[error("the machine cannot be started from its last epoch")]
    TakeOver(#[source] BoxError),
}
