//! Link to QEMU: its stream socket, or the packet socket of its tap device.
//!
//! A stream carries frames after their lengths, and makes QEMU wait while it is not read. A packet socket
//! carries packets, which are frames after a header of offloads, one at a time; what is not read in time is
//! dropped, as by a switch. In both directions they wait here in the form of the stream.

use super::Step;
use crate::{
    FRAME_MAX,
    frame_buffer::FrameBuffer,
    framing::{Decoder, LENGTH},
    offload::HEADER,
    packet_socket::PacketSocket,
    tap,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with},
};
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use thiserror::Error;

/// Interval of connection attempts to QEMU. A failed one costs a few microseconds.
const RETRY: Duration = Duration::from_millis(20);
/// Most packets of one read, so that callers do not wait long for the port.
const PACKETS_PER_READ: usize = 64;
/// Most packets that wait in QEMU's device: its queue (`txqueuelen`) has 1,000.
const UNREAD_MAX: usize = 4096;
/// Most frames at once that must not be lost: the queue of QEMU's device has four times the room.
const BURST_MAX: usize = 256;

/// Cause of a lost link.
#[derive(Debug, Error)]
pub(super) enum Lost {
    #[error("it closed the connection")]
    Closed,
    #[error(transparent)]
    Failed(#[from] Errno),
}

/// QEMU's end of the link.
pub(crate) enum GuestEnd {
    /// Stream socket on which QEMU listens.
    Stream(PathBuf),
    /// Packet socket of QEMU's tap device, and the device itself as QEMU has it.
    Tap { socket: PacketSocket, device: Option<File> },
}

pub(super) struct GuestLink {
    state: State,
    /// Tap device as QEMU has it.
    device: Option<File>,
    /// Frames since its queue was seen empty.
    burst: usize,
    /// What the guest has sent and nobody has taken.
    pub(super) received: Decoder,
    /// What QEMU is to get.
    pub(super) unsent: FrameBuffer,
}

enum State {
    Down {
        path: PathBuf,
        retry_at: Instant,
    },
    Stream {
        path: PathBuf,
        socket: Arc<OwnedFd>,
    },
    Tap(Arc<PacketSocket>),
    /// The tap device is gone, and QEMU with it.
    Gone,
}

/// Descriptor to poll, which outlives the lock of the forwarder.
pub(super) enum Polled {
    Stream(Arc<OwnedFd>),
    Tap(Arc<PacketSocket>),
}

impl GuestLink {
    pub(super) fn new(end: GuestEnd) -> Self {
        match end {
            GuestEnd::Stream(path) => Self::in_state(State::Down { path, retry_at: Instant::now() }, None),
            GuestEnd::Tap { socket, device } => Self::in_state(State::Tap(Arc::new(socket)), device),
        }
    }

    /// Link of a stream that is connected already.
    pub(super) fn connected(path: PathBuf, socket: OwnedFd) -> Self {
        Self::in_state(State::Stream { path, socket: Arc::new(socket) }, None)
    }

    /// Link to a QEMU with a tap device that is gone.
    pub(super) fn gone() -> Self {
        Self::in_state(State::Gone, None)
    }

    fn in_state(state: State, device: Option<File>) -> Self {
        Self { state, device, burst: 0, received: Decoder::new(), unsent: FrameBuffer::new() }
    }

    /// Whether its frames have headers of offloads.
    pub(super) fn has_offloads(&self) -> bool {
        matches!(self.state, State::Tap(_) | State::Gone)
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(self.state, State::Stream { .. } | State::Tap(_))
    }

    /// Time of the next connection attempt.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Down { retry_at, .. } => Some(retry_at),
            State::Stream { .. } | State::Tap(_) | State::Gone => None,
        }
    }

    pub(super) fn polled(&self) -> Option<Polled> {
        match &self.state {
            State::Stream { socket, .. } => Some(Polled::Stream(Arc::clone(socket))),
            State::Tap(socket) => Some(Polled::Tap(Arc::clone(socket))),
            State::Down { .. } | State::Gone => None,
        }
    }

    /// Path of the stream socket, if it is one.
    pub(super) fn path(&self) -> Option<&Path> {
        match &self.state {
            State::Down { path, .. } | State::Stream { path, .. } => Some(path),
            State::Tap(_) | State::Gone => None,
        }
    }

    /// Takes the descriptor, if nobody polls it.
    pub(super) fn take(&mut self) -> Option<OwnedFd> {
        let next = match self.path() {
            Some(path) => State::Down { path: path.to_owned(), retry_at: Instant::now() },
            None => State::Gone,
        };
        match std::mem::replace(&mut self.state, next) {
            State::Stream { socket, .. } => Arc::into_inner(socket),
            State::Tap(socket) => Arc::into_inner(socket).map(PacketSocket::into_fd),
            State::Down { .. } | State::Gone => None,
        }
    }

    /// Takes the device as QEMU has it.
    pub(super) fn take_device(&mut self) -> Option<File> {
        self.device.take()
    }

    /// Packets that QEMU has not read, and never will, because it is paused for good.
    pub(super) fn take_unread(&self) -> Vec<Vec<u8>> {
        let Some(device) = &self.device else { return Vec::new() };
        let Ok(header) = tap::header_size(device) else { return Vec::new() };
        let (mut packets, mut room) = (Vec::new(), vec![0; header + FRAME_MAX]);
        while packets.len() < UNREAD_MAX
            && let Ok(len) = rustix::io::read(device, &mut room)
        {
            // A longer header counts the guest's buffers in its end, which the guest would have done itself.
            if let Some(frame) = room[..len].get(header..).filter(|_| header >= HEADER) {
                packets.push([&room[..HEADER], frame].concat());
            }
        }
        packets
    }

    /// Whether QEMU has room for a frame that must not be lost. A stream makes the port wait by itself.
    pub(super) fn takes_more(&mut self) -> bool {
        let Some(device) = &self.device else { return true };
        if self.burst >= BURST_MAX {
            let mut places = [PollFd::new(device, PollFlags::IN)];
            let is_empty = poll(&mut places, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0);
            if self.unsent.is_pending() || !is_empty {
                return false;
            }
            self.burst = 0;
        }
        true
    }

    /// Adds a frame that must not be lost.
    pub(super) fn push(&mut self, header: &[u8], frame: &[u8]) {
        self.burst += 1;
        self.unsent.push(header, frame);
    }

    pub(super) fn connect_if_due(&mut self) {
        let now = Instant::now();
        let State::Down { path, retry_at } = &mut self.state else { return };
        if now < *retry_at {
            return;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let address = SocketAddrUnix::new(&*path);
        let connected = socket.and_then(|socket| connect(&socket, &address?).map(|()| socket));
        match connected {
            Ok(socket) => {
                self.state = State::Stream { path: std::mem::take(path), socket: Arc::new(socket) };
            }
            // QEMU is not ready yet, or busy: indistinguishable, so retry.
            Err(_) => *retry_at = now + RETRY,
        }
    }

    /// Closes the link; returns the number of frames that QEMU does not get.
    pub(super) fn disconnect(&mut self, reason: &dyn std::fmt::Display) -> u64 {
        tracing::debug!(socket = ?self.path(), %reason, "QEMU left the port");
        drop(self.take());
        self.received = Decoder::new();
        let dropped = self.unsent.remove_unsent(|_| {});
        self.unsent.clear();
        dropped
    }

    /// Reads once; done if there is nothing. There must be space.
    pub(super) fn receive(&mut self) -> Result<Step, Lost> {
        match &self.state {
            State::Stream { socket, .. } => match rustix::io::read(socket, self.received.space()) {
                Ok(0) => Err(Lost::Closed),
                Ok(count) => {
                    self.received.filled(count);
                    Ok(Step::More)
                }
                Err(Errno::AGAIN | Errno::INTR) => Ok(Step::Done),
                Err(errno) => Err(errno.into()),
            },
            State::Tap(socket) => receive_packets(socket, &mut self.received),
            State::Down { .. } | State::Gone => Ok(Step::Done),
        }
    }

    /// Sends to QEMU what it takes; returns the number of frames that it never will.
    pub(super) fn flush(&mut self) -> Result<u64, Lost> {
        match &self.state {
            State::Stream { socket, .. } if self.unsent.is_pending() => {
                match send(socket, self.unsent.rest(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                    Ok(count) => self.unsent.advance(count),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                Ok(0)
            }
            State::Tap(socket) => send_packets(socket, &mut self.unsent),
            State::Stream { .. } | State::Down { .. } | State::Gone => Ok(0),
        }
    }

    /// Frames that the kernel has dropped since the last call, because they were not read in time.
    pub(super) fn take_dropped(&self) -> u64 {
        match &self.state {
            State::Tap(socket) => socket.take_dropped(),
            State::Stream { .. } | State::Down { .. } | State::Gone => 0,
        }
    }
}

fn receive_packets(socket: &PacketSocket, received: &mut Decoder) -> Result<Step, Lost> {
    let mut step = Step::Done;
    for _ in 0..PACKETS_PER_READ {
        let space = received.space();
        if space.len() < LENGTH + FRAME_MAX {
            break;
        }
        let (before, room) = space.split_at_mut(LENGTH);
        match socket.receive(room).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
            // Nothing that Ethernet has; the length of the stream cannot say it.
            Ok(0) => {}
            Ok(len) => {
                before.copy_from_slice(&(len as u32).to_be_bytes());
                received.filled(LENGTH + len);
            }
            Err(Errno::AGAIN | Errno::INTR) => break,
            // A frame whose offloads no header can say; the kernel has dropped it.
            Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
        step = Step::More;
    }
    Ok(step)
}

fn send_packets(socket: &PacketSocket, unsent: &mut FrameBuffer) -> Result<u64, Lost> {
    let mut dropped = 0;
    while let Some(packet) = unsent.next() {
        let len = packet.len();
        match socket.send(packet) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => break,
            Err(errno @ (Errno::NETDOWN | Errno::NXIO | Errno::NODEV)) => return Err(errno.into()),
            // The queue of the device is full, or the frame is one that it does not take.
            Err(_) => dropped += 1,
        }
        unsent.advance(LENGTH + len);
    }
    Ok(dropped)
}

impl AsFd for Polled {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Polled::Stream(socket) => socket.as_fd(),
            Polled::Tap(socket) => socket.as_fd(),
        }
    }
}
