//! Parts of a port, for another process that goes on with it: its descriptors, and what is left in the
//! middle of both directions.

use super::{Forwarder, Link};
use crate::{
    Addresses, Gates, NetError, PortCounters, PortFilter, frame_buffer::FrameBuffer, framing::Decoder,
};
use serde::{Deserialize, Serialize};
use std::{fs::File, io, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Instant};

/// Descriptors of a port.
#[derive(Debug)]
pub struct PortDescriptors {
    /// Tap device, or end of a frame pipe; none if the port is isolated.
    pub uplink: Option<OwnedFd>,
    /// Connection to QEMU; none if it was down.
    pub stream: Option<OwnedFd>,
}

/// State of a port that ended between two frames, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortState {
    /// Socket on which QEMU listens.
    pub stream_socket: PathBuf,
    /// Name of the tap device, if it has one.
    pub tap_name: Option<String>,
    /// Gates of both directions.
    pub gates: Gates,
    /// Frames that the guest may send.
    pub filter: PortFilter,
    /// Learned addresses of the guest.
    pub addresses: Addresses,
    /// Bytes of the guest that are no complete frame yet.
    pub received: Vec<u8>,
    /// Bytes of frames, with their lengths, that QEMU has not accepted yet.
    pub unsent: Vec<u8>,
    /// Frames that arrived for a paused guest.
    pub late_frames: Vec<Vec<u8>>,
    /// Whether frames for the guest become late frames.
    pub buffers_late_frames: bool,
    /// Whether the guest was being announced.
    pub announces: bool,
    /// Counters of the port so far.
    pub counters: PortCounters,
}

impl PortDescriptors {
    /// Copies of the descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let copy = |one: &Option<OwnedFd>| one.as_ref().map(OwnedFd::try_clone).transpose();
        Ok(Self { uplink: copy(&self.uplink)?, stream: copy(&self.stream)? })
    }
}

impl Forwarder {
    /// Forwarder that goes on where another one was left.
    pub(crate) fn from_parts(descriptors: PortDescriptors, state: PortState) -> Result<Self, NetError> {
        let PortDescriptors { uplink, stream } = descriptors;
        let mut new = Self::new(state.stream_socket, uplink.map(File::from), state.gates, state.filter);
        if let Some(stream) = stream {
            new.link = Link::Up(Arc::new(stream));
            new.decoder = Decoder::begun(&state.received).ok_or(NetError::InvalidState)?;
            new.batch = FrameBuffer::begun(&state.unsent).ok_or(NetError::InvalidState)?;
        }
        new.addresses.merge(&state.addresses);
        new.counters = state.counters;
        new.add_late_frames(state.late_frames.iter().map(AsRef::as_ref));
        if state.buffers_late_frames {
            new.late_frames.start_buffering();
        }
        if state.announces {
            new.start_announcing();
        }
        Ok(new)
    }

    /// Whether nothing here belongs to protection.
    pub(crate) fn can_be_passed(&self) -> bool {
        self.output_buffer.is_none() && self.inputs.is_none() && self.replay.is_none()
    }

    /// Takes the parts; this forwarder has no descriptors afterwards.
    pub(crate) fn take_parts(&mut self, tap_name: Option<String>) -> (PortDescriptors, PortState) {
        let link = std::mem::replace(&mut self.link, Link::Down { retry_at: Instant::now() });
        let stream = match link {
            Link::Up(stream) => Arc::into_inner(stream),
            Link::Down { .. } => None,
        };
        let uplink = self.tap.take().and_then(Arc::into_inner).map(OwnedFd::from);
        let buffers_late_frames = self.late_frames.is_buffering();
        let state = PortState {
            stream_socket: self.path.clone(),
            tap_name,
            gates: self.gates,
            filter: self.filter,
            addresses: self.addresses.clone(),
            received: self.decoder.rest().to_vec(),
            unsent: self.batch.rest().to_vec(),
            late_frames: self.late_frames.take().into_iter().map(Vec::from).collect(),
            buffers_late_frames,
            announces: self.announcing.is_some(),
            counters: self.counters,
        };
        (PortDescriptors { uplink, stream }, state)
    }
}
