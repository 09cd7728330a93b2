//! Stream remainder: the part of a device state still to be sent to a QEMU that may have read a stream
//! header. Pure.
//!
//! Usually that header is the state's own, and only the devices remain. If a small block has changed since,
//! the memory sections are sent again: QEMU accepts them any number of times (migration/savevm.c,
//! `qemu_loadvm_state_main`), and the last ones count. The start of a stream is sent once; a QEMU that has
//! read another one cannot load this state.

use super::{
    device_stream::StateError,
    stream_header::{FULL, SplitStream, StreamHeader},
};

/// Remaining parts of a state, `sections` before `devices`.
#[derive(Debug)]
pub(crate) struct StreamRemainder<'a> {
    /// Header of the state; none if it is the one that was read.
    pub(crate) head: Option<StreamHeader>,
    pub(crate) sections: &'a [u8],
    pub(crate) devices: &'a [u8],
}

impl<'a> StreamRemainder<'a> {
    /// Parts of `state` that a QEMU lacks, which has read the header `read`, or nothing yet.
    pub(crate) fn of(state: &'a [u8], read: Option<&StreamHeader>) -> Result<Self, StateError> {
        let known = read.and_then(|read| state.strip_prefix(read.as_bytes()));
        // Only if devices follow is it the complete header, and not the beginning of a longer one.
        if let Some(devices) = known.filter(|devices| devices.first() == Some(&FULL)) {
            return Ok(Self { head: None, sections: &[], devices });
        }
        let cut = SplitStream::parse(state)?;
        if !cut.has_devices(state) {
            return Err(StateError::NoDevices);
        }
        let (head, devices) = state.split_at_checked(cut.devices()).ok_or(StateError::NoDevices)?;
        let sections = match read {
            Some(read) if read.opening() != cut.head.opening() => return Err(StateError::OtherMachine),
            Some(read) => head.get(read.opening().len()..).unwrap_or_default(),
            None => head,
        };
        Ok(Self { head: Some(cut.head), sections, devices })
    }
}
