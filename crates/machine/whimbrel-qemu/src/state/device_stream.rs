//! Putting a device state together from the head and the device sections. Pure.

use super::stream_header::{END_OF_STREAM, FULL, MAGIC, StreamError};
use crate::qmp::QmpError;
use std::{io, time::Duration};

/// Taking or loading device state failed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The machine runs; its state would not belong to one instant.
    #[error("the machine is not paused")]
    NotPaused,
    /// There is no head: a machine with private memory can only use the one it was loaded with.
    #[error("a machine with private memory needs the head of the state it came from")]
    NoHead,
    /// The small blocks of a machine with private memory are not where they were found, or have another size
    /// now.
    #[error("the small memory blocks of qemu cannot be read")]
    Unwatched,
    /// A head alone was given to load.
    #[error("the state has no devices")]
    NoDevices,
    /// It begins otherwise than what was given ahead of it.
    #[error("the state is not of the machine that was expected")]
    OtherMachine,
    /// QEMU's control socket failed.
    #[error("qemu cannot be asked")]
    Qmp(#[from] QmpError),
    /// A state is not what it should be.
    #[error("the state is malformed")]
    Malformed(#[from] StreamError),
    /// A file or socket for the state failed.
    #[error("cannot {action} the state")]
    Io {
        /// `read`, `write`, …
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// QEMU could not save or load it.
    #[error("qemu cannot {action} the state: {words}")]
    Refused {
        /// `save` or `load`.
        action: &'static str,
        /// QEMU's own words.
        words: String,
    },
    /// It took too long.
    #[error("qemu did not {action} the state within {after:?}")]
    TimedOut {
        /// `save` or `load`.
        action: &'static str,
        /// How long was waited.
        after: Duration,
    },
}

/// A device state in its two parts: one that hardly ever changes, one that always does.
///
/// One after the other (see [`compose`]) they are the stream that [`crate::Qemu::load`] takes. A stream of
/// epochs need send the head only when it changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState<'a> {
    /// The head, as [`crate::Head::as_bytes`].
    pub head: &'a [u8],
    /// Whether the head differs from the one of the state before.
    pub head_changed: bool,
    /// The device sections and the end of the stream.
    pub devices: Vec<u8>,
}

/// The stream of `head` and `devices`.
pub fn compose(head: &[u8], devices: &[u8]) -> Vec<u8> {
    [head, devices].concat()
}

/// An empty description of the stream. Targets try to read one after the end of the stream.
const NO_DESCRIPTION: [u8; 7] = [0x06, 0, 0, 0, 2, b'{', b'}'];

/// The device sections of what `xen-save-devices-state` wrote, made to follow a head.
pub(crate) fn device_sections(mut blob: Vec<u8>) -> Result<Vec<u8>, StreamError> {
    if !blob.starts_with(&MAGIC) {
        return Err(StreamError::Magic);
    }
    match (blob.get(MAGIC.len()), blob.last()) {
        (Some(&FULL), Some(&END_OF_STREAM)) => {}
        (Some(&other), Some(&END_OF_STREAM)) => {
            let at = MAGIC.len() as u64;
            return Err(StreamError::Unexpected { what: "section", value: other.into(), at });
        }
        _ => return Err(StreamError::CutOff { at: blob.len() as u64 }),
    }
    blob.drain(..MAGIC.len());
    blob.extend(NO_DESCRIPTION);
    Ok(blob)
}
