//! Packet socket: sends complete Ethernet frames.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

/// Socket that only sends frames.
pub(crate) struct Packets(OwnedFd);

impl Packets {
    /// Opens the socket, which needs CAP_NET_RAW.
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: the call has no pointer arguments.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn send(&self, interface: i32, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the structure has only integers, for which zero is valid.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = interface;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: both pointers are to live values with the lengths that are passed.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                len,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
