//! Parts of a port, for another process that goes on with it: its descriptors, and what is left in the
//! middle of both directions.

use super::{
    Forwarder,
    guest_link::{GuestEnd, GuestLink},
    uplink::NetworkSide,
};
use crate::{
    Addresses, Gates, NetError, PortCounters, PortFilter, frame_buffer::FrameBuffer, framing::Decoder,
    packet_socket::PacketSocket,
};
use serde::{Deserialize, Serialize};
use std::{fs::File, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

/// Descriptors of a port.
#[derive(Debug)]
pub struct PortDescriptors {
    /// Tap device, or end of a frame pipe; none if the port is isolated.
    pub uplink: Option<OwnedFd>,
    /// Connection to QEMU, or packet socket of its tap device; none if it was down.
    pub guest: Option<OwnedFd>,
    /// Tap device as QEMU has it, if it is known.
    pub device: Option<OwnedFd>,
}

/// State of a port that ended between two frames, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortState {
    /// Socket on which QEMU listens; none if it has a tap device, and frames have headers of offloads.
    pub stream_socket: Option<PathBuf>,
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
        Ok(Self { uplink: copy(&self.uplink)?, guest: copy(&self.guest)?, device: copy(&self.device)? })
    }
}

impl Forwarder {
    /// Forwarder that goes on where another one was left.
    pub(crate) fn from_parts(descriptors: PortDescriptors, state: PortState) -> Result<Self, NetError> {
        let PortDescriptors { uplink, guest, device } = descriptors;
        // The device of a port with offloads has them; a pipe never does, and has no name.
        let has_offloads = state.stream_socket.is_none() && state.tap_name.is_some();
        let uplink = uplink.map(|uplink| NetworkSide { file: Arc::new(File::from(uplink)), has_offloads });
        let is_connected = guest.is_some();
        let link = match (state.stream_socket, guest) {
            (Some(path), Some(socket)) => GuestLink::connected(path, socket),
            (Some(path), None) => GuestLink::new(GuestEnd::Stream(path)),
            (None, Some(socket)) => {
                let (socket, device) = (PacketSocket::from_fd(socket), device.map(File::from));
                GuestLink::new(GuestEnd::Tap { socket, device })
            }
            (None, None) => GuestLink::gone(),
        };
        let mut new = Self::over(link, uplink, state.gates, state.filter);
        if is_connected {
            new.link.received = Decoder::begun(&state.received).ok_or(NetError::InvalidState)?;
            new.link.unsent = FrameBuffer::begun(&state.unsent).ok_or(NetError::InvalidState)?;
            // A stream may be in the middle of a frame; packets are sent whole.
            if new.has_offloads() && !new.link.unsent.is_whole() {
                return Err(NetError::InvalidState);
            }
        }
        new.addresses.merge(&state.addresses);
        new.counters = state.counters;
        state.late_frames.iter().for_each(|packet| new.add_late_packet(packet));
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
        let stream_socket = self.link.path().map(ToOwned::to_owned);
        let (guest, device) = (self.link.take(), self.link.take_device().map(OwnedFd::from));
        let uplink = self.tap.take().and_then(|tap| Arc::into_inner(tap.file)).map(OwnedFd::from);
        let buffers_late_frames = self.late_frames.is_buffering();
        let state = PortState {
            stream_socket,
            tap_name,
            gates: self.gates,
            filter: self.filter,
            addresses: self.addresses.clone(),
            received: self.link.received.rest().to_vec(),
            unsent: self.link.unsent.rest().to_vec(),
            late_frames: self.late_frames.take().into_iter().map(Vec::from).collect(),
            buffers_late_frames,
            announces: self.announcing.is_some(),
            counters: self.counters,
        };
        (PortDescriptors { uplink, guest, device }, state)
    }
}
