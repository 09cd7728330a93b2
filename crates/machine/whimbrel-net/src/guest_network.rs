//! Network of a QEMU: a namespace with a tap device for each port of its machine, and nobody else in it.
//!
//! A tap device is the only network back end of QEMU 7.2 that knows headers of offloads. In a namespace of
//! its own it reaches nothing but its packet socket: it has no address, and no other device is there. The
//! namespace ends with QEMU and the packet sockets.

use crate::{NetError, netlink, packet_socket::PacketSocket, tap};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns, unshare},
};
use std::{
    fs::{self, File},
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    thread,
};

/// Largest unit of a tap device: the kernel refuses frames that are neither shorter nor to be cut.
const LARGEST_UNIT: u32 = 65_521;

/// A namespace with tap devices, for a QEMU that starts in it.
#[derive(Debug)]
pub struct GuestNetwork {
    /// Descriptor of the namespace.
    pub namespace: OwnedFd,
    /// Tap device of each port, in their order.
    pub taps: Vec<OwnedFd>,
}

impl GuestNetwork {
    /// Creates a network for a machine with so many ports.
    pub fn create(ports: usize) -> Result<Self, NetError> {
        let made = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let namespace = File::open("/proc/thread-self/ns/net")?.into();
            let taps = (0..ports).map(|port| open_tap(&device_name(port))).collect::<io::Result<_>>()?;
            Ok(Self { namespace, taps })
        });
        made.map_err(|source| NetError::GuestNetwork { action: "create", source })
    }

    /// Makes the tap device of one more port in a namespace, which a descriptor of it or of a process in it
    /// names. Refused in the namespace of this process: a guest gets no device of its host's network.
    pub fn add_tap(namespace: BorrowedFd<'_>, port: usize) -> Result<OwnedFd, NetError> {
        let own = || Ok::<_, io::Error>(fs::metadata("/proc/thread-self/ns/net")?.ino());
        let made = on_own_thread(|| {
            let before = own()?;
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            match own()? == before {
                true => Err(io::Error::other("its qemu has no network of its own")),
                false => open_tap(&device_name(port)),
            }
        });
        made.map_err(|source| NetError::GuestNetwork { action: "add a port to", source })
    }
}

/// Name of a port's tap device in the namespace of its QEMU.
fn device_name(port: usize) -> String {
    format!("net{port}")
}

fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let device = tap::create_with_offloads(name)?;
    let index = if_nametoindex(name)?;
    // The host itself has nothing to say to the guest: no address means no frame of its own. Without IPv6
    // there is nothing to switch off.
    let _ = netlink::set_no_link_local_address(index);
    netlink::set_largest_unit(index, LARGEST_UNIT)?;
    netlink::set_up(index)?;
    Ok(device.into())
}

/// Packet socket of a port, in the namespace that a descriptor of it or of a process in it names.
pub(crate) fn connect(namespace: BorrowedFd, port: usize) -> Result<PacketSocket, NetError> {
    let opened = on_own_thread(|| {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        PacketSocket::open(&device_name(port))
    });
    opened.map_err(|source| NetError::GuestNetwork { action: "connect to", source })
}

/// Works on a thread that may change its namespace, because it ends then.
fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("guest-network".to_owned()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of a network panicked")))
    })
}
