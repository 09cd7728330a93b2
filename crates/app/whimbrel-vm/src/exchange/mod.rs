//! Passing a machine on, and taking it: what the two sides of [`crate::swap`] do.

mod give;
mod offer;
mod take;

pub use give::{Given, give, give_offered};
pub use offer::offer_for_later;
pub use take::{FindPlace, Taken, take};

use crate::{
    RunningError,
    channel::{Channel, ChannelError},
    message::{Message, MessageError, encode_message},
};
use rustix::time::{ClockId, clock_gettime};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};
use whimbrel_machine::PageError;

/// Times after which the old process gives up on the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapLimits {
    /// For all that is prepared while the guest runs.
    pub ready: Duration,
    /// From the state to *prepared*, while the guest stands still.
    pub prepared: Duration,
    /// From *yours* to *running*.
    pub running: Duration,
    /// For a client of a disk to finish a request that it began, which a stopped QEMU has done already.
    pub drain: Duration,
}

impl Default for SwapLimits {
    fn default() -> Self {
        Self {
            ready: Duration::from_secs(30),
            prepared: Duration::from_secs(1),
            running: Duration::from_secs(5),
            drain: Duration::from_millis(100),
        }
    }
}

impl PassError {
    /// Whether the other process speaks another version of the messages.
    pub fn is_other_version(&self) -> bool {
        matches!(self, Self::Message(MessageError::Version { .. }))
    }
}

/// Step of a swap that one side has just made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The old one has sent all descriptors.
    Offered,
    /// The old one has stopped the guest.
    Stopped,
    /// The old one has sent the state.
    StateSent,
    /// The old one has said *yours*.
    Gave,
    /// The new one has the descriptors, and is about to say *ready*.
    Received,
    /// The new one has said *ready*.
    Ready,
    /// The new one has said *prepared*.
    Prepared,
    /// The new one serves the disks.
    Serving,
    /// The new one has continued the guest, and not said so.
    Continued,
}

/// Cause of a swap that did not come about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    /// The channel to the other process failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A message could not be read or written.
    #[error("the other process sent, or would have got, {0}")]
    Message(#[from] MessageError),
    /// A part of the machine could not be opened or used.
    #[error(transparent)]
    Machine(#[from] RunningError),
    /// A page array failed.
    #[error(transparent)]
    Pages(#[from] PageError),
    /// QEMU could not be paused or continued.
    #[error("cannot {action} the machine")]
    Qemu {
        /// Operation: `stop`, …
        action: &'static str,
        /// Cause reported by QEMU or its driver.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The description of the machine could not be written or read.
    #[error("cannot read or write the description of the machine")]
    Description {
        /// Cause reported by the parser.
        source: serde_json::Error,
    },
    /// The memory could not be used.
    #[error("cannot use the memory of the machine")]
    Memory(#[from] whimbrel_memory::AttachError),
    /// The process that the machine is to pass to has no place for it.
    #[error("there is no place for the machine")]
    Place(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The console could not be used.
    #[error("cannot use the console of the machine")]
    Console(#[source] std::io::Error),
    /// Pages of its memory are under way from a slow place.
    #[error("a page of the memory did not come within {after:?}")]
    PagesUnderWay {
        /// Time waited while the guest stood still.
        after: Duration,
    },
    /// A descriptor could not be copied.
    #[error("cannot copy a descriptor")]
    Descriptors(#[source] std::io::Error),
    /// The machine is in a state that cannot be passed on.
    #[error("a machine with {what} cannot be passed on")]
    Unsupported {
        /// What it has.
        what: &'static str,
    },
    /// A process sent a message out of turn, or with other descriptors than it must have.
    #[error("the other process sent {what} out of turn")]
    Unexpected {
        /// Kind of the message.
        what: &'static str,
    },
    /// The old process goes on with the machine.
    #[error("the old process goes on with the machine")]
    Withdrawn,
    /// The new process refuses.
    #[error("the new process refuses: {reason}")]
    Refused {
        /// Words of the new process.
        reason: String,
    },
}

fn qemu<E: Into<Box<dyn std::error::Error + Send + Sync>>>(action: &'static str) -> impl Fn(E) -> PassError {
    move |source| PassError::Qemu { action, source: source.into() }
}

fn send(channel: &Channel, message: &Message, descriptors: &[OwnedFd]) -> Result<(), PassError> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    Ok(channel.send(&encode_message(message)?, &descriptors)?)
}

/// Microseconds of the clock that all processes of this host share.
fn clock() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}
