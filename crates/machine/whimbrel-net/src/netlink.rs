//! Netlink requests: bring an interface up, make it a port of a bridge, set its address and largest unit.
//!
//! One request and one acknowledgement each (rtnetlink(7), netlink(7)); numbers are in native byte order.
//! Acts in the network namespace of the calling thread.

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use std::{io, os::fd::AsRawFd};

const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const IFLA_ADDRESS: u16 = 1;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const AF_INET6: u16 = 10;
/// Generates no address (linux/if_link.h, `IN6_ADDR_GEN_MODE_NONE`).
const NO_ADDRESS: u8 = 1;
const IFF_UP: u32 = 1;

/// Brings interface number `index` up.
pub(crate) fn set_up(index: u32) -> io::Result<()> {
    transact(&new_link(index, IFF_UP, &[]))
}

/// Makes interface number `index` a port of the bridge number `master`.
pub(crate) fn set_master(index: u32, master: u32) -> io::Result<()> {
    transact(&new_link(index, 0, &attribute(IFLA_MASTER, &master.to_ne_bytes())))
}

/// Sets the hardware address of interface number `index`.
pub(crate) fn set_address(index: u32, address: [u8; 6]) -> io::Result<()> {
    transact(&new_link(index, 0, &attribute(IFLA_ADDRESS, &address)))
}

/// Sets the largest unit of interface number `index`: bytes of a frame after its Ethernet header.
pub(crate) fn set_largest_unit(index: u32, bytes: u32) -> io::Result<()> {
    transact(&new_link(index, 0, &attribute(IFLA_MTU, &bytes.to_ne_bytes())))
}

/// Lets interface number `index` have no link-local IPv6 address, so that the host sends nothing there.
pub(crate) fn set_no_link_local_address(index: u32) -> io::Result<()> {
    let mode = attribute(IFLA_INET6_ADDR_GEN_MODE, &[NO_ADDRESS]);
    transact(&new_link(index, 0, &attribute(IFLA_AF_SPEC, &attribute(AF_INET6, &mode))))
}

/// Encodes a `struct rtattr`, its value and padding to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut attribute = Vec::with_capacity(4 + value.len().next_multiple_of(4));
    attribute.extend((4 + value.len() as u16).to_ne_bytes());
    attribute.extend(kind.to_ne_bytes());
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// Encodes a `struct nlmsghdr`, a `struct ifinfomsg` and attributes. Only flags set in `up` change.
fn new_link(index: u32, up: u32, attributes: &[u8]) -> Vec<u8> {
    let mut body = vec![0, 0, 0, 0];
    for word in [index, up, up] {
        body.extend(word.to_ne_bytes());
    }
    body.extend(attributes);
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend((16 + body.len() as u32).to_ne_bytes());
    message.extend(RTM_NEWLINK.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn transact(message: &[u8]) -> io::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    // A netlink socket without a destination sends to the kernel.
    send(socket.as_raw_fd(), message, MsgFlags::empty())?;
    let mut answer = [0; 512];
    let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    acknowledged(&answer[..len])
}

fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
