//! Packet socket: the host's end of a tap device that QEMU has. One of two modules of this crate with
//! `unsafe`; the other is `tap`.
//!
//! packet(7), linux/if_packet.h. It receives what QEMU writes to the device and sends what QEMU is to read,
//! each frame after a header of offloads (`PACKET_VNET_HDR`). What the guest cannot take whole, the kernel
//! cuts and computes. The kernel takes VLAN tags out of received frames and tells of them beside; they are
//! put back.

use crate::offload::HEADER;
use libc::{SOL_PACKET, c_int, c_void, socklen_t};
use nix::{net::if_::if_nametoindex, sys::socket};
use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// Bytes of frames that wait for the port; more are dropped. A TCP connection with the largest window of
/// Linux (`net.ipv4.tcp_wmem`) fits.
const QUEUE: c_int = 8 << 20;
/// Places in a packet where a tag goes and what it is long.
const TAG_AT: usize = HEADER + 12;
pub(crate) const TAG: usize = 4;
const PACKET_IGNORE_OUTGOING: c_int = 23;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;
const CUSTOMER_TAG: u16 = 0x8100;

/// `struct tpacket_auxdata` (linux/if_packet.h).
#[repr(C)]
#[derive(Clone, Copy)]
struct BesideFrame {
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    tag: u16,
    tag_protocol: u16,
}

/// Socket of one device.
#[derive(Debug)]
pub(crate) struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// Socket of the device with this name in the network namespace of the calling thread.
    pub(crate) fn open(device: &str) -> io::Result<Self> {
        let index = if_nametoindex(device)?;
        let flags = socket::SockFlag::SOCK_CLOEXEC | socket::SockFlag::SOCK_NONBLOCK;
        // Without a protocol it receives nothing yet, and nothing of other devices.
        let new = socket::socket(socket::AddressFamily::Packet, socket::SockType::Raw, flags, None)?;
        let new = Self(new);
        new.set(SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        new.set(SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
        new.set(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        new.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, QUEUE)?;
        new.bind(index)?;
        Ok(new)
    }

    /// Socket that another process has passed.
    pub(crate) fn from_fd(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }

    fn set(&self, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
        let (place, length) = ((&raw const value).cast::<c_void>(), mem::size_of::<c_int>() as socklen_t);
        // SAFETY: `place` is a live integer of `length` bytes, which the kernel only reads.
        done(unsafe { libc::setsockopt(self.0.as_raw_fd(), level, option, place, length) })
    }

    fn bind(&self, index: u32) -> io::Result<()> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: index as c_int,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let (place, length) = ((&raw const address).cast(), mem::size_of_val(&address) as socklen_t);
        // SAFETY: `place` is a live address of `length` bytes, which the kernel only reads.
        done(unsafe { libc::bind(self.0.as_raw_fd(), place, length) })
    }

    /// Receives a packet: a header and a frame. `room` has space for the largest, and for a tag.
    pub(crate) fn receive(&self, room: &mut [u8]) -> io::Result<usize> {
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let mut beside = [0u64; 8];
        // SAFETY: all fields of `struct msghdr` may be zero.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = beside.as_mut_ptr().cast();
        // C libraries differ in the type.
        message.msg_controllen = mem::size_of_val(&beside) as _;
        // SAFETY: `message` points to one live part and to live, aligned space of the length that it says.
        let received = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let length = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        match tag_of(&message) {
            Some(tag) if length >= TAG_AT && length + TAG <= room.len() => {
                insert_tag(room, length, tag);
                Ok(length + TAG)
            }
            _ => Ok(length),
        }
    }

    /// Sends a packet.
    pub(crate) fn send(&self, packet: &[u8]) -> rustix::io::Result<()> {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        rustix::net::send(&self.0, packet, flags).map(drop)
    }

    /// Frames that were dropped since the last call, because the port did not take them.
    pub(crate) fn take_dropped(&self) -> u64 {
        // `struct tpacket_stats`: frames that came, and those of them that were dropped.
        let mut counts = [0u32; 2];
        let mut length = mem::size_of_val(&counts) as socklen_t;
        let place = counts.as_mut_ptr().cast::<c_void>();
        let fd = self.0.as_raw_fd();
        // SAFETY: `place` is live space of `length` bytes, more than which the kernel does not write.
        let asked =
            unsafe { libc::getsockopt(fd, SOL_PACKET, libc::PACKET_STATISTICS, place, &raw mut length) };
        if asked == 0 { u64::from(counts[1]) } else { 0 }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn done(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Tag that was taken out of a received frame: protocol and value.
fn tag_of(message: &libc::msghdr) -> Option<[u16; 2]> {
    // SAFETY: `message` was filled by recvmsg, and its space for control messages is live.
    let first = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    let whole = mem::size_of::<libc::cmsghdr>() + mem::size_of::<BesideFrame>();
    if first.cmsg_level != SOL_PACKET
        || first.cmsg_type != libc::PACKET_AUXDATA
        || (first.cmsg_len as u64) < whole as u64
    {
        return None;
    }
    // SAFETY: the message has the kind and the length of this structure, which any bytes are valid for.
    let beside = unsafe { libc::CMSG_DATA(first).cast::<BesideFrame>().read_unaligned() };
    let protocol = match beside.status & TP_STATUS_VLAN_TPID_VALID {
        0 => CUSTOMER_TAG,
        _ => beside.tag_protocol,
    };
    (beside.status & TP_STATUS_VLAN_VALID != 0).then_some([protocol, beside.tag])
}

/// Puts a tag into the packet of `length` bytes, and moves the places that its header names.
fn insert_tag(room: &mut [u8], length: usize, [protocol, tag]: [u16; 2]) {
    room.copy_within(TAG_AT..length, TAG_AT + TAG);
    room[TAG_AT..TAG_AT + 2].copy_from_slice(&protocol.to_be_bytes());
    room[TAG_AT + 2..TAG_AT + TAG].copy_from_slice(&tag.to_be_bytes());
    crate::offload::shift(room, TAG as u16);
}
