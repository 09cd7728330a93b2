//! How a protection fails, on either side.

use crate::codec::sections::DamagedEpochPages;
use std::error::Error;
use whimbrel_capture::CaptureError;
use whimbrel_machine::{MachineError, PageError};
use whimbrel_migrate::{compatibility::Incompatibility, link::LinkError};

/// Any error of the host.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Why the primary could not go on. Its machine runs, with every page accounted for.
#[derive(Debug, thiserror::Error)]
pub enum PrimaryError {
    /// The standby does not take the machine.
    #[error("the standby does not take the machine")]
    Begin(#[source] LinkError),
    /// The machine does not fit the standby.
    #[error("the machine does not fit the standby")]
    Misfit(#[source] Incompatibility),
    /// A boot file could not be read or sent.
    #[error("cannot bring the machine's boot files to the standby")]
    Blob(#[source] BoxError),
    /// The standby is lost, or did not take something.
    #[error("the standby does not follow any more")]
    Link(#[from] LinkError),
    /// The first copy failed or was cancelled.
    #[error("the first copy did not finish")]
    Copy(#[source] CaptureError),
    /// Pages could not be read or scanned.
    #[error(transparent)]
    Pages(#[from] PageError),
    /// The machine could not be paused, described or let go on.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// More is dirty than an epoch may hold.
    #[error("{bytes} bytes are dirty, more than an epoch may hold")]
    TooMuch {
        /// How much.
        bytes: u64,
    },
    /// The standby's answer makes no sense.
    #[error("the standby sent an answer that cannot be read")]
    Answer(#[source] postcard::Error),
    /// The standby did not get a page right, twice.
    #[error("the standby did not assemble page {page} of array {array} although all of it was sent")]
    NeverRight {
        /// Of which array.
        array: u32,
        /// Which page.
        page: u64,
    },
    /// The codec failed.
    #[error("cannot encode pages")]
    Encode(#[source] std::io::Error),
}

/// Why the standby could not do what a message asked.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// It does not take the machine.
    #[error("the standby refuses the machine")]
    Refused(#[source] BoxError),
    /// A message that a sound primary would not send now.
    #[error("the primary sent {what}")]
    Invalid {
        /// What it sent.
        what: &'static str,
    },
    /// It has taken over, or is about to.
    #[error("the standby does not follow this protection any more")]
    NotFollowing,
    /// A piece is damaged.
    #[error(transparent)]
    Damaged(#[from] DamagedEpochPages),
    /// The header is garbage.
    #[error("the message header cannot be read")]
    Header(#[source] postcard::Error),
    /// Pages or files could not be stored.
    #[error("cannot store what arrived")]
    Write(#[source] BoxError),
    /// The codec could not be set up.
    #[error("cannot set up the codec")]
    Codec(#[source] std::io::Error),
    /// The machine did not load or start.
    #[error("the machine cannot be started from its last epoch")]
    TakeOver(#[source] BoxError),
}
