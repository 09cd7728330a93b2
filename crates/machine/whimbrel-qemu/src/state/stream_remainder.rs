//! What is left to send of a device state to a QEMU that may have read a head before it. Pure.
//!
//! Most often that head is the state's own, and its devices are all. If a small block has changed since, the
//! sections of memory go again: QEMU takes them any number of times (migration/savevm.c,
//! `qemu_loadvm_state_main`), and the last ones count. How a stream opens goes once; a QEMU that has read
//! another opening is of no use for this state.

use super::{
    device_stream::StateError,
    stream_header::{FULL, SplitStream, StreamHeader},
};

/// What of a state is still to be sent, `sections` before `devices`.
#[derive(Debug)]
pub(crate) struct StreamRemainder<'a> {
    /// The head of the state; none if it is the one that was read.
    pub(crate) head: Option<StreamHeader>,
    pub(crate) sections: &'a [u8],
    pub(crate) devices: &'a [u8],
}

impl<'a> StreamRemainder<'a> {
    /// What of `state` a QEMU lacks that has read the head `read`, or nothing yet.
    pub(crate) fn of(state: &'a [u8], read: Option<&StreamHeader>) -> Result<Self, StateError> {
        let known = read.and_then(|read| state.strip_prefix(read.as_bytes()));
        // Only where devices follow is it the whole head, and not the beginning of a longer one.
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
