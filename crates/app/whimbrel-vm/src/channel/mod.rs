//! Channel between two processes of one machine: packets with descriptors, over a socket of this host.
//!
//! A packet has at most [`MAX_PACKET`] bytes and [`MAX_DESCRIPTORS`] descriptors (SOCK_SEQPACKET and
//! SCM_RIGHTS, `unix(7)`); what is larger travels in a sealed file of memory ([`seal`]). Both ends take
//! packets only of a process of their own user, or of root. A packet that was cut, or has more descriptors
//! than allowed, is an error, and its descriptors are closed.

mod peer;
mod sealed;

pub use peer::Peer;
pub use sealed::{seal, unseal};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use std::{
    fs, io,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

/// Most bytes of a packet.
pub const MAX_PACKET: usize = 64 << 10;
/// Most descriptors of a packet.
pub const MAX_DESCRIPTORS: usize = 16;

/// Cause of a channel that cannot be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The operating system returned an error.
    #[error("cannot {action} the other process")]
    Io {
        /// Verb of the operation: `reach`, `send to`, …
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// A process of another user is at the other end.
    #[error("the other process is of user {uid}")]
    Stranger {
        /// User of the other process.
        uid: u32,
    },
    /// A packet is larger than allowed, or has too many descriptors.
    #[error("a packet of {bytes} bytes and {descriptors} descriptors is too large")]
    TooLarge {
        /// Bytes of the packet.
        bytes: usize,
        /// Descriptors of the packet.
        descriptors: usize,
    },
    /// Nothing came in time.
    #[error("the other process was silent for {after:?}")]
    Silent {
        /// Time waited for a packet.
        after: Duration,
    },
    /// Nothing comes any more: that process has ended.
    #[error("the other process has ended")]
    Ended,
}

/// Packet of bytes and descriptors.
#[derive(Debug, Default)]
pub struct Packet {
    /// Content of the packet.
    pub bytes: Vec<u8>,
    /// Descriptors, in the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Socket on which another process connects.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// Connection to another process.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    peer: Peer,
}

impl Listener {
    /// Listens on `path`, which only this user may connect to. A socket that is there is replaced.
    pub fn bind(path: &Path) -> Result<Self, ChannelError> {
        match fs::remove_file(path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(ChannelError::Io { action: "make a socket for", source });
            }
            _ => {}
        }
        let make = || -> io::Result<OwnedFd> {
            let socket = new_socket()?;
            // The name gets the mode that the socket has before (net/unix/af_unix.c, `unix_bind_bsd`).
            rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
            bind(&socket, &SocketAddrUnix::new(path)?)?;
            listen(&socket, 1)?;
            Ok(socket)
        };
        make().map(Self).map_err(failed("make a socket for"))
    }

    /// Waits for a process to connect, at most for `patience`.
    pub fn accept(&self, patience: Duration) -> Result<Channel, ChannelError> {
        if !wait(&[self.0.as_fd()], Instant::now() + patience)? {
            return Err(ChannelError::Silent { after: patience });
        }
        let accepted = accept_with(&self.0, SocketFlags::CLOEXEC).map_err(io::Error::from);
        Channel::over(accepted.map_err(failed("reach"))?)
    }
}

/// Waits for a process to connect to one of `listeners`, however long that takes, and returns which one it
/// is. None once `ended` can be read.
pub fn accept_first<const N: usize>(
    listeners: [&Listener; N],
    ended: BorrowedFd<'_>,
) -> Result<Option<(usize, Channel)>, ChannelError> {
    loop {
        let all = listeners.iter().map(|listener| listener.0.as_fd()).chain([ended]);
        let mut events: Vec<_> = all.map(|one| PollFd::from_borrowed_fd(one, PollFlags::IN)).collect();
        match poll(&mut events, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed("wait for")(errno.into())),
        }
        let mut is_ready = events.iter().map(|event| !event.revents().is_empty());
        match is_ready.position(|ready| ready) {
            _ if !events[N].revents().is_empty() => return Ok(None),
            Some(index) => {
                return listeners[index].accept(Duration::ZERO).map(|channel| Some((index, channel)));
            }
            None => {}
        }
    }
}

impl Channel {
    /// Connects to the process that listens on `path`.
    pub fn connect(path: &Path) -> Result<Self, ChannelError> {
        Self::connect_as_told(path, None)
    }

    /// Connects to the process that listens on `path`, unless that takes longer than `patience`: it hangs,
    /// and others wait already.
    pub fn connect_within(path: &Path, patience: Duration) -> Result<Self, ChannelError> {
        Self::connect_as_told(path, Some(patience))
    }

    fn connect_as_told(path: &Path, patience: Option<Duration>) -> Result<Self, ChannelError> {
        let connected = || -> io::Result<OwnedFd> {
            let socket = new_socket()?;
            set_socket_timeout(&socket, Timeout::Send, patience)?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        Self::over(connected().map_err(failed("reach"))?)
    }

    fn over(socket: OwnedFd) -> Result<Self, ChannelError> {
        let peer = Peer::of(&socket)?;
        Ok(Self { socket, peer })
    }

    /// Process at the other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Sends a packet with copies of `descriptors`. Does not wait: an unread channel takes the few packets
    /// of a swap.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        if bytes.len() > MAX_PACKET || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ChannelError::TooLarge { bytes: bytes.len(), descriptors: descriptors.len() });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ChannelError::TooLarge { bytes: bytes.len(), descriptors: descriptors.len() });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            Ok(_) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(ChannelError::Ended),
            Err(errno) => Err(failed("send to")(errno.into())),
        }
    }

    /// Next packet, or the end of the other process, at most after `patience`. Packets that it sent before
    /// its end come first.
    pub fn receive(&self, patience: Duration) -> Result<Packet, ChannelError> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(packet) = self.try_receive()? {
                return Ok(packet);
            }
            // A packet may have come just before the end.
            let has_ended = self.peer.has_ended(Duration::ZERO);
            if has_ended || self.is_closed() {
                if let Some(packet) = self.try_receive()? {
                    return Ok(packet);
                }
                // One that has closed its end and still lives may yet act: only its end is certain.
                let left = deadline.saturating_duration_since(Instant::now());
                let ended = has_ended || self.peer.has_ended(left);
                return Err(if ended {
                    ChannelError::Ended
                } else {
                    ChannelError::Silent { after: patience }
                });
            }
            if !wait(&[self.socket.as_fd(), self.peer.pidfd()], deadline)? {
                return Err(ChannelError::Silent { after: patience });
            }
        }
    }

    fn is_closed(&self) -> bool {
        let mut events = [PollFd::new(&self.socket, PollFlags::empty())];
        poll(&mut events, Some(&Timespec::default())).is_ok() && events[0].revents().contains(PollFlags::HUP)
    }

    /// Packet that is there; none also at the end of the channel.
    fn try_receive(&self) -> Result<Option<Packet>, ChannelError> {
        // One byte more than allowed shows what is too long.
        let mut bytes = vec![0; MAX_PACKET + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
        {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => return Ok(None),
            Err(errno) => return Err(failed("receive from")(errno.into())),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        if received.bytes == 0 && descriptors.is_empty() {
            return Ok(None);
        }
        let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        if is_cut || received.bytes > MAX_PACKET || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ChannelError::TooLarge { bytes: received.bytes, descriptors: descriptors.len() });
        }
        bytes.truncate(received.bytes);
        Ok(Some(Packet { bytes, descriptors }))
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Waits until one of the descriptors is readable; false at the deadline.
fn wait(descriptors: &[BorrowedFd<'_>], deadline: Instant) -> Result<bool, ChannelError> {
    let mut events: Vec<_> =
        descriptors.iter().map(|one| PollFd::from_borrowed_fd(*one, PollFlags::IN)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut events, Timespec::try_from(left).ok().as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed("wait for")(errno.into())),
        }
    }
}

pub(crate) fn failed(action: &'static str) -> impl Fn(io::Error) -> ChannelError {
    move |source| ChannelError::Io { action, source }
}

#[cfg(test)]
mod tests;
