//! Tap device: a network interface whose frames this process reads and writes. The only `unsafe` of this
//! crate.
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

/// Creates a tap device, brings it up, and joins its bridge. Reads and writes do not block. Returns the
/// device and its name.
pub(crate) fn open(config: &TapConfig) -> Result<(File, String), NetError> {
    let failed = |action| move |source| NetError::Tap { action, name: config.name.clone(), source };
    let (device, name) = create(&config.name, IFF_TAP).map_err(failed("create"))?;
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
