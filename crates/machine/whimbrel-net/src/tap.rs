//! Tap device: a network interface whose frames this process reads and writes. One of two
//! modules of this crate with `unsafe`; the other is `packet_socket`.
//!
//! Linux Documentation/networking/tuntap.rst. The device is not persistent: it ends when the last descriptor
//! is closed, so nothing remains however the process ends. It is created in the network namespace of the
//! calling thread and stays there.

use crate::{NetError, TapConfig, netlink};
use nix::net::if_::if_nametoindex;
use std::{
    fs::{File, OpenOptions},
    hash::{BuildHasher, RandomState},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

const IFF_TUN: i16 = 0x0001;
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;
/// Frames for this process may lack their checksum, and be larger than the wire carries: TCP over IPv4 and
/// IPv6, also with ECN (linux/if_tun.h, `TUN_F_CSUM`, `TUN_F_TSO4`, …).
const OFFLOADS: i32 = 1 | 2 | 4 | 8;
/// Bytes of an interface name with its final zero.
const NAME_SIZE: usize = 16;

/// C layout of `struct ifreq` for TUNSETIFF: a name, flags, the rest of the union unused.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_SIZE],
    flags: i16,
    unused: [u8; 22],
}

nix::ioctl_readwrite_bad!(
    /// Ioctl TUNSETIFF; the kernel writes back the name that it chose.
    set_interface,
    0x4004_54ca,
    InterfaceRequest
);

nix::ioctl_write_int_bad!(
    /// Tells the device which offloads its reader accepts (TUNSETOFFLOAD).
    set_offloads,
    0x4004_54d0
);

nix::ioctl_read_bad!(
    /// Reads the size of the header before each frame (TUNGETVNETHDRSZ).
    get_header_size,
    nix::request_code_read!(b'T', 0xd7, size_of::<i32>()),
    i32
);

/// Creates a tap device, brings it up, and joins its bridge. Reads and writes do not block. Returns the
/// device and its name.
///
/// With `offloads` every frame has a header of them in front, in both directions.
pub(crate) fn open(config: &TapConfig, offloads: bool) -> Result<(File, String), NetError> {
    let failed = |action| move |source| NetError::Tap { action, name: config.name.clone(), source };
    let kind = if offloads { IFF_TAP | IFF_VNET_HDR } else { IFF_TAP };
    let (device, name) = create(&config.name, kind).map_err(failed("create"))?;
    if offloads {
        take_offloads(&device).map_err(failed("set the offloads of"))?;
    }
    let index = if_nametoindex(name.as_str()).map_err(|errno| failed("find")(errno.into()))?;
    netlink::set_address(index, high_address()).map_err(failed("name"))?;
    if let Some(bridge) = &config.bridge {
        let joined = if_nametoindex(bridge.as_str()).map_err(io::Error::from);
        let joined = joined.and_then(|master| netlink::set_master(index, master));
        joined.map_err(|source| NetError::Bridge { bridge: bridge.clone(), source })?;
    }
    netlink::set_up(index).map_err(failed("bring up"))?;
    Ok((device, name))
}

/// Creates a tap device for QEMU, with headers; QEMU says what of the offloads its guest takes.
pub(crate) fn create_with_offloads(name: &str) -> io::Result<File> {
    create(name, IFF_TAP | IFF_VNET_HDR).map(|(device, _)| device)
}

/// Bytes of the header before each frame of a device; its guest may have made them 12 (Virtual I/O Device
/// 1.2, section 5.1.6).
pub(crate) fn header_size(device: &File) -> io::Result<usize> {
    let mut size = 0;
    // SAFETY: the descriptor is open, and `size` is a live integer that the kernel writes.
    unsafe { get_header_size(device.as_raw_fd(), &raw mut size) }?;
    usize::try_from(size).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn take_offloads(device: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open; the argument is a number, no address.
    unsafe { set_offloads(device.as_raw_fd(), OFFLOADS) }?;
    Ok(())
}

/// Random address that is higher than any of a network card. A bridge takes the lowest address of its ports
/// as its own. With a low one here, the address of the host would change with every machine that comes or
/// goes, and its peers would not reach it for a while.
fn high_address() -> [u8; 6] {
    let random = RandomState::new().hash_one(0).to_le_bytes();
    [0xfe, random[0], random[1], random[2], random[3], random[4]]
}

/// Creates a TUN device, which carries IP packets instead of frames. Reads and writes do not block.
pub fn open_tun(name: &str) -> io::Result<File> {
    create(name, IFF_TUN).map(|(device, _)| device)
}

fn create(name: &str, kind: i16) -> io::Result<(File, String)> {
    let mut request = InterfaceRequest { name: [0; NAME_SIZE], flags: kind | IFF_NO_PI, unused: [0; 22] };
    if name.len() >= NAME_SIZE || name.bytes().any(|byte| byte == 0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let device = options.open("/dev/net/tun")?;
    // SAFETY: the descriptor is open; `request` is an exclusive, live value with the size (40 bytes) and
    // layout of the kernel's `struct ifreq`, and its name ends with a zero byte (checked above).
    unsafe { set_interface(device.as_raw_fd(), &mut request) }?;
    let chosen = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok((device, String::from_utf8_lossy(chosen).into_owned()))
}
