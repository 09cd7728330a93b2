//! Frames of a hostile guest, plain and hidden behind tags and headers.

use super::*;
use crate::{Station, announcements};
use proptest::prelude::*;

const OWN: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
const OTHER: [u8; 6] = [0x52, 0x54, 0, 9, 9, 9];
const FILTER: PortFilter = PortFilter::Only(Mac(OWN));

fn frame(tags: &[[u8; 2]], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [[0xff; 6], OWN].concat();
    tags.iter().for_each(|tag| frame.extend([tag[0], tag[1], 0, 7]));
    frame.extend(kind.to_be_bytes());
    frame.extend(payload);
    frame
}

fn udp_from(port: u16) -> Vec<u8> {
    [&port.to_be_bytes()[..], &[0, 68, 0, 12, 0, 0, 1, 2, 3, 4]].concat()
}

fn v4(options: usize, offset: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 20 + options * 4];
    packet[0] = 0x45 + options as u8;
    packet[2..4].copy_from_slice(&((20 + options * 4 + payload.len()) as u16).to_be_bytes());
    packet[6..8].copy_from_slice(&offset.to_be_bytes());
    packet[9] = UDP;
    packet.extend(payload);
    packet
}

fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    packet[0] = 0x60;
    packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    packet[6] = next;
    packet.extend(payload);
    packet
}

/// Extension header of 16 bytes before `rest`.
fn extended(next: u8, rest: &[u8]) -> Vec<u8> {
    [&[next, 1][..], &[0; 14], rest].concat()
}

fn arp_of(sender: [u8; 6]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, 2][..], &sender, &[10, 0, 0, 1], &[0; 10]].concat()
}

/// Hostile packets with the reason why each is dropped.
fn hostile() -> Vec<(u16, Vec<u8>, Dropped)> {
    let advertisement = [ROUTER_ADVERTISEMENT, 0, 0, 0, 64, 0, 0, 0];
    let redirect = [REDIRECT, 0, 0, 0, 0, 0, 0, 0];
    let first_fragment = [&[ICMPV6, 0, 0, 1, 0, 0, 0, 1][..], &advertisement].concat();
    let mut many = advertisement.to_vec();
    for depth in 0..=EXTENSIONS_MAX {
        many = extended(if depth == 0 { ICMPV6 } else { 60 }, &many);
    }
    vec![
        (ARP, arp_of(OTHER), Dropped::ArpSender),
        (REVERSE_ARP, arp_of(OTHER), Dropped::ArpSender),
        (IPV4, v4(0, 0, &udp_from(67)), Dropped::DhcpServer),
        (IPV4, v4(10, 0x2000, &udp_from(67)), Dropped::DhcpServer),
        (IPV4, v4(0, 0x2000, &[0, 67]), Dropped::Malformed),
        (IPV6, v6(UDP, &udp_from(547)), Dropped::DhcpServer),
        (IPV6, v6(0, &extended(60, &extended(UDP, &udp_from(547)))), Dropped::DhcpServer),
        (IPV6, v6(ICMPV6, &advertisement), Dropped::Router),
        (IPV6, v6(ICMPV6, &redirect), Dropped::Router),
        (IPV6, v6(43, &extended(ICMPV6, &advertisement)), Dropped::Router),
        (IPV6, v6(51, &[&[ICMPV6, 2][..], &[0; 14], &advertisement].concat()), Dropped::Router),
        (IPV6, v6(44, &first_fragment), Dropped::Router),
        // Headers that are cut, so that a second fragment would have the message.
        (IPV6, v6(44, &[60, 0, 0, 1, 0, 0, 0, 1, ICMPV6, 9, 0, 0, 0, 0, 0, 0]), Dropped::Malformed),
        (IPV6, v6(60, &many), Dropped::Malformed),
    ]
}

#[test]
fn neither_tags_nor_headers_hide_what_a_guest_must_not_send() {
    for (kind, packet, reason) in hostile() {
        for tags in [&[][..], &[[0x81, 0]], &[[0x88, 0xa8], [0x81, 0]]] {
            let frame = frame(tags, kind, &packet);
            assert_eq!(allowed(&frame, FILTER), Err(reason), "{tags:?} {frame:02x?}");
            assert_eq!(allowed(&frame, PortFilter::Off), Ok(()));
        }
        let snap = [&SNAP[..], &kind.to_be_bytes(), &packet].concat();
        assert_eq!(allowed(&frame(&[], 8 + packet.len() as u16, &snap), FILTER), Err(reason));
        assert_eq!(allowed(&frame(&[[0x81, 0]; 3], kind, &packet), FILTER), Err(Dropped::Malformed));
    }
}

#[test]
fn a_guest_that_speaks_for_itself_is_not_disturbed() {
    let station =
        Station { mac: Mac(OWN), ipv4: vec![[10, 0, 0, 7].into()], ipv6: vec!["fe80::7".parse().unwrap()] };
    for frame in announcements(&station) {
        assert_eq!(allowed(&frame, FILTER), Ok(()), "{frame:02x?}");
    }
    let later = [17, 0, 0, 8, 0, 0, 0, 1, 2, 35, 0, 0];
    let good = [
        (ARP, arp_of(OWN)),
        (IPV4, v4(0, 0, &udp_from(68))),
        // A later fragment has no ports: these bytes are content.
        (IPV4, v4(0, 1, &udp_from(67))),
        (IPV6, v6(44, &later)),
        (IPV6, v6(UDP, &udp_from(546))),
        (IPV6, v6(0, &extended(ICMPV6, &[143, 0, 0, 0]))),
        (0x88b5, Vec::new()),
    ];
    for (kind, packet) in good {
        // Ethernet pads short frames with zeros.
        let padded = [&frame(&[[0x81, 0]], kind, &packet)[..], &[0; 46]].concat();
        assert_eq!(allowed(&padded, FILTER), Ok(()), "{padded:02x?}");
    }
}

#[test]
fn a_packet_that_is_cut_anywhere_is_dropped() {
    let whole =
        [(ARP, arp_of(OWN)), (IPV4, v4(2, 0, &udp_from(68))), (IPV6, v6(60, &extended(17, &udp_from(546))))];
    for (kind, packet) in whole {
        let whole = frame(&[[0x81, 0]], kind, &packet);
        assert_eq!(allowed(&whole, FILTER), Ok(()));
        for length in 0..whole.len() {
            assert_eq!(allowed(&whole[..length], FILTER), Err(Dropped::Malformed), "{kind:x} {length}");
        }
    }
}

proptest! {
    #[test]
    fn a_frame_of_another_station_is_always_dropped(mut frame in prop::collection::vec(any::<u8>(), 12..200)) {
        prop_assume!(frame[6..12] != OWN);
        prop_assert_eq!(allowed(&frame, FILTER), Err(Dropped::Source));
        frame[6..12].copy_from_slice(&OTHER);
        prop_assert_eq!(allowed(&frame, FILTER), Err(Dropped::Source));
    }

    #[test]
    fn random_packets_are_read_without_harm(
        kind in prop::sample::select(vec![ARP, REVERSE_ARP, IPV4, IPV6, 0x8100, 0x88a8, 40]),
        start in prop::sample::select(vec![0x45u8, 0x4f, 0x60, 0xaa, 0]),
        next in any::<u8>(),
        mut packet in prop::collection::vec(any::<u8>(), 0..160),
    ) {
        packet.first_mut().into_iter().for_each(|byte| *byte = start);
        packet.get_mut(6).into_iter().for_each(|byte| *byte = next);
        let _ = allowed(&frame(&[], kind, &packet), FILTER);
        let _ = allowed(&packet, FILTER);
    }
}
