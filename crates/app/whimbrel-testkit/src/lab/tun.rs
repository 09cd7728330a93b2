//! TUN device: a network interface whose packets a program reads and writes. All `unsafe` of the lab's
//! devices is here.
//!
//! Linux Documentation/networking/tuntap.rst.

use super::LabError;
use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

const IFF_TUN: i16 = 0x0001;
const IFF_NO_PI: i16 = 0x1000;

/// C layout of `struct ifreq` for TUNSETIFF: a name, flags, the rest of the union unused.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: i16,
    unused: [u8; 22],
}

nix::ioctl_readwrite_bad!(
    /// Ioctl TUNSETIFF; the kernel writes back the name that it chose.
    set_interface,
    0x4004_54ca,
    InterfaceRequest
);

/// Creates the device `name` in the namespace of the calling thread. It ends when the file is closed. Reads
/// do not block.
pub(super) fn open(name: &str) -> Result<File, LabError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let device = options.open("/dev/net/tun").map_err(LabError::system("open /dev/net/tun"))?;
    let mut request = InterfaceRequest { name: [0; 16], flags: IFF_TUN | IFF_NO_PI, unused: [0; 22] };
    if name.len() >= request.name.len() {
        let source = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(LabError::System { action: "name a TUN device", source });
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the descriptor is open; `request` is an exclusive, live value with the size (40 bytes) and
    // layout of the kernel's `struct ifreq`, and its name ends with a zero byte (checked above).
    unsafe { set_interface(device.as_raw_fd(), &mut request) }
        .map_err(LabError::system("make a TUN device"))?;
    Ok(device)
}
