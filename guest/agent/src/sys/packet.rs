//! Whole Ethernet frames, sent as they are.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

/// A socket for frames that go out; it receives none.
pub(crate) struct Packets(OwnedFd);

impl Packets {
    /// Opens it. Needs the right to.
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made, and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sends a frame out of the interface of this number.
    pub(crate) fn send(&self, interface: i32, frame: &[u8]) -> io::Result<()> {
        // SAFETY: a structure of plain integers, for which zero is a value.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = interface;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: both pointers are to live values of the lengths that go with them.
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
