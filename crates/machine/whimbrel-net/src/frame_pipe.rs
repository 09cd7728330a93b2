//! Frame pipe: transfers frames inside this process. Each end receives what the other sends, frame by frame;
//! frames that do not fit are lost, as on a tap device. It replaces a tap device if the port is connected to
//! a tunnel.
//!
//! Two sockets of `SOCK_SEQPACKET` (unix(7)): they preserve frame boundaries and bound the queue in the
//! kernel.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::{fs::File, io, os::fd::OwnedFd};

/// One end of a frame pipe.
#[derive(Debug)]
pub struct FramePipeEnd(pub(crate) File);

/// Creates a pipe; neither end ever blocks.
pub fn frame_pipe() -> io::Result<(FramePipeEnd, FramePipeEnd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let end = |socket: OwnedFd| FramePipeEnd(File::from(socket));
    Ok((end(near), end(far)))
}
