//! Fake QEMU with a tap device: its packets are frames after a header of offloads.

use super::PATIENCE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};
use whimbrel_net::{Gates, GuestNetwork, GuestSide, Port, PortConfig, PortFilter, TapConfig, Uplink};
use whimbrel_testkit::lab::Namespace;

/// Bytes of the header.
const HEADER: usize = 10;

pub(crate) struct TapQemu {
    device: File,
    namespace: OwnedFd,
}

impl TapQemu {
    pub(crate) fn new() -> Self {
        let GuestNetwork { namespace, mut taps } = GuestNetwork::create(1).unwrap();
        Self { device: File::from(taps.remove(0)), namespace }
    }

    /// Port over this QEMU.
    pub(crate) fn port(&self, namespace: &Namespace, uplink: Uplink, filter: PortFilter) -> Port {
        let device = Some(self.device.try_clone().unwrap().into());
        let guest = GuestSide::Tap { namespace: self.namespace.try_clone().unwrap(), device, port: 0 };
        let config = PortConfig { guest, uplink, gates: Gates::OPEN, filter };
        let port = namespace.run(|| Port::open(config)).unwrap();
        namespace.wait_forwarding().unwrap();
        port
    }

    /// Sends a frame that needs nothing.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.send_packet(&[&[0; HEADER], frame].concat());
    }

    pub(crate) fn send_packet(&mut self, packet: &[u8]) {
        assert_eq!(self.device.write(packet).unwrap(), packet.len());
    }

    /// Next frame from a station of the tests; others on the bridge, which the kernel sends, are skipped.
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        let deadline = Instant::now() + PATIENCE;
        let mut room = vec![0; 1 << 17];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut places = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
            let left = PollTimeout::try_from(left).unwrap();
            assert_eq!(poll(&mut places, left).unwrap(), 1, "no frame came");
            let len = self.device.read(&mut room).unwrap();
            if room[HEADER + 6..HEADER + 11] == [2, 0, 0, 0, 0] {
                return room[HEADER..len].to_vec();
            }
        }
    }
}

/// A port with a fake QEMU at its end, its tap on `br0` of `namespace`.
pub(crate) fn with_offloads(namespace: &Namespace, tap: &str, filter: PortFilter) -> (Port, TapQemu) {
    let qemu = TapQemu::new();
    let tap = TapConfig { name: tap.to_owned(), bridge: Some("br0".to_owned()) };
    let port = qemu.port(namespace, Uplink::Tap(tap), filter);
    (port, qemu)
}

/// Packet of station `from` with so many bytes of TCP data over IPv6 if `v6`, to be cut into pieces of `size`
/// bytes, after these VLAN tags.
pub(crate) fn large(from: u8, v6: bool, data: usize, size: u16, tags: &[u8]) -> Vec<u8> {
    let network = 14 + tags.len();
    let transport = network + if v6 { 40 } else { 20 };
    let mut packet = vec![1, if v6 { 4 } else { 1 }];
    for word in [transport as u16 + 20, size, transport as u16, 16] {
        packet.extend(word.to_ne_bytes());
    }
    packet.extend([0xff; 6]);
    packet.extend([2, 0, 0, 0, 0, from]);
    packet.extend(tags);
    let length = 20 + data as u16;
    let addresses = if v6 {
        packet.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        packet.extend(length.to_be_bytes());
        packet.extend([6, 64]);
        let address = |last: u8| [&[0xfd, 0][..], &[0; 13], &[last]].concat();
        [address(1), address(2)].concat()
    } else {
        let mut header = vec![0x45, 0];
        header.extend((20 + length).to_be_bytes());
        header.extend([0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        let sum = !sum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend([8, 0]);
        packet.extend(&header[..12]);
        header[12..].to_vec()
    };
    packet.extend(&addresses);
    let pseudo = sum(&[&addresses[..], &[0, 6], &length.to_be_bytes()].concat());
    packet.extend([0, 80, 0x0f, 0xa0, 0, 0, 0, 9, 0, 0, 0, 1, 0x50, 0x19, 1, 0]);
    packet.extend(pseudo.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend((0..data).map(|byte| (byte * 7) as u8));
    packet
}

/// One's complement sum of big-endian words.
fn sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
