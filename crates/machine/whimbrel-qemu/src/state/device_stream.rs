//! Device state as a stream: composes the stream header and the device sections. Pure.

use super::stream_header::{END_OF_STREAM, FULL, MAGIC, StreamError};
use crate::qmp::QmpError;
use std::{io, time::Duration};

/// Cause of a device state that could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The machine runs, so its state would not belong to one instant.
    #[error("the machine is not paused")]
    NotPaused,
    /// A device state is being loaded or saved.
    #[error("a device state is being loaded or saved")]
    Busy,
    /// There is no stream header: a machine with private memory can only use the one it was loaded with.
    #[error("a machine with private memory needs the stream header of the state it was loaded from")]
    NoHeader,
    /// The small blocks of a machine with private memory have moved, or changed their size.
    #[error("the small memory blocks of qemu cannot be read")]
    BlocksNotFound,
    /// The state has only a stream header.
    #[error("the state has no devices")]
    NoDevices,
    /// The state begins differently from the header that was sent ahead.
    #[error("the state belongs to another machine than expected")]
    OtherMachine,
    /// A command on QEMU's control socket failed.
    #[error("a command to qemu failed")]
    Qmp(#[from] QmpError),
    /// The state is no valid stream.
    #[error("the state is malformed")]
    Malformed(#[from] StreamError),
    /// A file or socket for the state failed.
    #[error("cannot {action} the state")]
    Io {
        /// Verb of the operation: `read`, `write`, …
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// QEMU could not save or load the state.
    #[error("qemu cannot {action} the state: {words}")]
    Refused {
        /// Verb of the operation: `save` or `load`.
        action: &'static str,
        /// Error text of QEMU.
        words: String,
    },
    /// QEMU exceeded the time limit.
    #[error("qemu did not {action} the state within {after:?}")]
    TimedOut {
        /// Verb of the operation: `save` or `load`.
        action: &'static str,
        /// Time waited for QEMU.
        after: Duration,
    },
}

/// Device state in two parts: one that hardly ever changes, one that always does.
///
/// Concatenated (see [`compose`]) they are the stream that [`crate::Qemu::load`] reads. A series of epochs
/// needs the header only when it changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState<'a> {
    /// Stream header, as [`crate::StreamHeader::as_bytes`].
    pub head: &'a [u8],
    /// Whether the header differs from that of the previous state.
    pub head_changed: bool,
    /// Device sections and the end of the stream.
    pub devices: Vec<u8>,
}

/// Concatenates `head` and `devices` to a stream.
pub fn compose(head: &[u8], devices: &[u8]) -> Vec<u8> {
    [head, devices].concat()
}

/// Empty description of the stream. Targets try to read one after the end of the stream.
const NO_DESCRIPTION: [u8; 7] = [0x06, 0, 0, 0, 2, b'{', b'}'];

/// Device sections from the output of `xen-save-devices-state`, prepared to follow a stream header.
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
