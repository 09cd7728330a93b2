//! A line: a wire of frames inside this process. What one end sends the other receives, frame by frame, and
//! what does not fit is lost, as on a tap device. It stands in for one where a port's far side is a tunnel.
//!
//! Two sockets of `SOCK_SEQPACKET` (unix(7)): they keep the bounds of frames and bound what waits in the
//! kernel.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::{fs::File, io, os::fd::OwnedFd};

/// One end of a line.
#[derive(Debug)]
pub struct FramePipeEnd(pub(crate) File);

/// Makes a line; neither of its ends ever waits.
pub fn frame_pipe() -> io::Result<(FramePipeEnd, FramePipeEnd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let end = |socket: OwnedFd| FramePipeEnd(File::from(socket));
    Ok((end(near), end(far)))
}
