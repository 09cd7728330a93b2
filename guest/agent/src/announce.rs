//! Network announcement of the guest agent, for every address of every interface that is up.
//!
//! Sends gratuitous ARP (RFC 5227 section 3) and unsolicited neighbour advertisements (RFC 4861 section
//! 7.2.6). The host announces too, from frames that it has seen. The guest knows all of its addresses,
//! including those that never sent a frame.

use crate::sys::{
    interfaces::{self, Interface},
    packet::Packets,
};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr},
};

const BROADCAST: [u8; 6] = [0xff; 6];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ICMPV6: u8 = 58;

/// Sends all announcements; returns the number of frames.
pub(crate) fn now() -> io::Result<u32> {
    let packets = Packets::open()?;
    let mut sent = 0;
    for interface in interfaces::all()? {
        for frame in frames(&interface) {
            packets.send(interface.index, &frame)?;
            sent += 1;
        }
    }
    Ok(sent)
}

fn frames(interface: &Interface) -> Vec<Vec<u8>> {
    let mac = interface.mac;
    // An ARP request and an ARP reply: some systems learn from only one of the two.
    let v4 = interface.v4.iter().flat_map(|address| [arp(mac, *address, 1), arp(mac, *address, 2)]);
    let v6 = interface.v6.iter().map(|address| advertisement(mac, *address));
    v4.chain(v6).collect()
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes()].concat()
}

fn arp(mac: [u8; 6], address: Ipv4Addr, operation: u8) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, 0x0806);
    frame.extend([0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(mac);
    frame.extend(address.octets());
    frame.extend(if operation == 1 { [0; 6] } else { BROADCAST });
    frame.extend(address.octets());
    frame.resize(60, 0);
    frame
}

fn advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    // Type, code, checksum, flags (override), target, option 2: the hardware address of the target.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    message.extend([2, 1]);
    message.extend(mac);
    let sum = checksum(address, &message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    let mut frame = ethernet(ALL_NODES_MAC, mac, 0x86dd);
    frame.extend([0x60, 0, 0, 0, 0, message.len() as u8, ICMPV6, 255]);
    frame.extend(address.octets());
    frame.extend(ALL_NODES.octets());
    frame.extend(message);
    frame
}

/// Checksum over the pseudo header and the message (RFC 8200 section 8.1).
fn checksum(from: Ipv6Addr, message: &[u8]) -> u16 {
    let (from, to) = (from.octets(), ALL_NODES.octets());
    let rest = [0, 0, 0, message.len() as u8, 0, 0, 0, ICMPV6];
    let bytes = from.iter().chain(&to).chain(&rest).chain(message).copied().collect::<Vec<u8>>();
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !(((folded & 0xffff) + (folded >> 16)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];

    #[test]
    fn each_address_is_announced() {
        let v6 = vec![Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 9)];
        let interface = Interface { index: 2, mac: MAC, v4: vec![Ipv4Addr::new(10, 0, 0, 7)], v6 };
        let frames = frames(&interface);
        assert_eq!(frames.len(), 3);
        assert_eq!(frames[0].len(), 60, "no shorter than Ethernet allows");
        assert_eq!(frames[0][..14], [255, 255, 255, 255, 255, 255, 0x52, 0x54, 0, 1, 2, 3, 8, 6]);
        assert_eq!(frames[0][28..32], frames[0][38..42], "about itself");
    }

    #[test]
    fn the_checksum_of_an_advertisement_makes_the_sum_all_ones() {
        let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe01, 0x203);
        let frame = advertisement(MAC, address);
        assert_eq!(checksum(address, &frame[54..]), 0, "a sum with itself in it");
        assert_eq!(frame[21], 255, "another hop limit is not believed");
    }
}
