//! Announcement frames: tell a network where a machine is now. Pure.
//!
//! A RARP for each hardware address, as QEMU sends (`net/announce.c`), updates switches. A gratuitous ARP
//! (RFC 5227 section 2.3) and an unsolicited neighbour advertisement (RFC 4861 section 7.2.6) update
//! neighbours.

use crate::{Mac, Station};
use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

/// Time between announcements: the first is sent at once, then five more, as QEMU does by default.
pub const ANNOUNCE_GAPS: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(250),
    Duration::from_millis(350),
    Duration::from_millis(450),
];

/// Shortest Ethernet frame, without its checksum.
const FRAME_MIN: usize = 60;

/// Frames that announce one station: a RARP, then one for each of its addresses.
pub fn announcements(station: &Station) -> Vec<Vec<u8>> {
    let mut frames = vec![rarp(station.mac)];
    frames.extend(station.ipv4.iter().map(|address| gratuitous_arp(station.mac, *address)));
    frames.extend(station.ipv6.iter().map(|address| neighbour_advertisement(station.mac, *address)));
    frames
}

/// RARP request for the own address, which no host answers but every switch sees.
fn rarp(mac: Mac) -> Vec<u8> {
    let mut frame = ethernet(Mac::BROADCAST, mac, [0x80, 0x35]);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 3]);
    frame.extend(mac.0);
    frame.extend([0; 4]);
    frame.extend(mac.0);
    frame.extend([0; 4]);
    pad(frame)
}

/// ARP request of a station for its own address.
fn gratuitous_arp(mac: Mac, address: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(Mac::BROADCAST, mac, [0x08, 0x06]);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(mac.0);
    frame.extend(address.octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    pad(frame)
}

/// Neighbour advertisement to all nodes, with the override flag.
fn neighbour_advertisement(mac: Mac, address: Ipv6Addr) -> Vec<u8> {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const OVERRIDE: u8 = 0x20;
    let mut message = vec![136, 0, 0, 0, OVERRIDE, 0, 0, 0];
    message.extend(address.octets());
    // Option: target link-layer address, one unit of eight bytes.
    message.extend([2, 1]);
    message.extend(mac.0);
    let checksum = icmpv6_checksum(address, ALL_NODES, &message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());

    let mut frame = ethernet(Mac([0x33, 0x33, 0, 0, 0, 1]), mac, [0x86, 0xdd]);
    frame.extend([0x60, 0, 0, 0, 0, message.len() as u8, 58, 255]);
    frame.extend(address.octets());
    frame.extend(ALL_NODES.octets());
    frame.extend(message);
    pad(frame)
}

fn ethernet(to: Mac, from: Mac, kind: [u8; 2]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_MIN.max(86));
    frame.extend(to.0);
    frame.extend(from.0);
    frame.extend(kind);
    frame
}

fn pad(mut frame: Vec<u8>) -> Vec<u8> {
    frame.resize(frame.len().max(FRAME_MIN), 0);
    frame
}

/// Internet checksum over pseudo-header and message (RFC 4443 section 2.3). The message has even length.
fn icmpv6_checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let words = |bytes: &[u8]| {
        bytes.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair))).sum::<u32>()
    };
    let mut sum = words(&from.octets()) + words(&to.octets()) + message.len() as u32 + 58 + words(message);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);

    fn hex(frame: &[u8]) -> String {
        frame.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_rarp_is_the_one_qemu_sends() {
        let expected = "ffffffffffff5254001234568035000108000604000352540012345600000000525400123456";
        assert_eq!(hex(&rarp(MAC)), format!("{expected:0<120}"));
    }

    #[test]
    fn a_gratuitous_arp_names_the_address_twice() {
        let expected = "ffffffffffff525400123456080600010800060400015254001234560a4d00640000000000000a4d0064";
        assert_eq!(hex(&gratuitous_arp(MAC, Ipv4Addr::new(10, 77, 0, 100))), format!("{expected:0<120}"));
    }

    #[test]
    fn an_advertisement_has_the_bytes_of_the_rfc_and_a_checksum_that_adds_up() {
        let address: Ipv6Addr = "fe80::5054:ff:fe12:3456".parse().unwrap();
        let frame = neighbour_advertisement(MAC, address);
        let (head, message) = (&frame[..54], &frame[54..]);
        let expected = "33330000000152540012345686dd6000000000203aff\
                        fe80000000000000505400fffe123456ff020000000000000000000000000001";
        assert_eq!(hex(head), expected);
        assert_eq!(hex(&message[4..]), "20000000fe80000000000000505400fffe1234560201525400123456");
        // With the checksum in place, the sum over everything is all ones.
        assert_eq!(icmpv6_checksum(address, "ff02::1".parse().unwrap(), message), 0);
    }
}
