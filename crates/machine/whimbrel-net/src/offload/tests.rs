//! Tests of offload headers: what the kernel would make of a frame, and headers that lie.

use super::*;
use proptest::prelude::*;

/// Packet with a TCP segment over IPv4 that is to be cut; the sum of its pseudo header is at the checksum.
fn tcp4(data: usize, size: u16) -> Vec<u8> {
    let mut packet = vec![NEEDS_CHECKSUM, 1];
    for word in [54, size, 34, 16] {
        packet.extend(word.to_ne_bytes());
    }
    packet.extend([2; 12]);
    packet.extend([8, 0, 0x45, 0]);
    packet.extend((40 + data as u16).to_be_bytes());
    packet.extend([0xff, 0xff, 0x40, 0, 64, headers::TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let addresses = &packet[HEADER + 26..HEADER + 34];
    let pseudo = sum(&[addresses, &[0, headers::TCP], &(20 + data as u16).to_be_bytes()].concat());
    packet.extend([0, 80, 0x0f, 0xa0, 0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 1, 0x50, 0x99, 1, 0]);
    packet.extend(pseudo.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend((0..data).map(|byte| byte as u8));
    packet
}

/// One's complement sum of big-endian words; 0xffff for bytes with a right checksum in them.
fn sum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn segments_have_their_own_numbers_and_checksums_and_lose_no_byte() {
    let packet = tcp4(3001, 1400);
    let segments = plain(&packet);
    assert_eq!(segments.iter().map(|segment| segment.len() - 54).collect::<Vec<_>>(), [1400, 1400, 201]);
    let mut data: Vec<u8> = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        let (ip, tcp) = (&segment[14..34], &segment[34..]);
        assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), segment.len() - 14);
        assert_eq!(u16::from_be_bytes([ip[4], ip[5]]), 0xffff_u16.wrapping_add(index as u16));
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        assert_eq!(sequence, 0xffff_fff0_u32.wrapping_add(1400 * index as u32));
        // CWR, ACK, PSH and FIN were set.
        assert_eq!(tcp[13], [0x90, 0x10, 0x19][index]);
        assert_eq!(sum(ip), 0xffff, "IP checksum of segment {index}");
        let pseudo = [&ip[12..20], &[0, 6], &(tcp.len() as u16).to_be_bytes(), tcp].concat();
        assert_eq!(sum(&pseudo), 0xffff, "TCP checksum of segment {index}");
        data.extend(&tcp[20..]);
    }
    assert_eq!(data, packet[HEADER + 54..]);
}

#[test]
fn a_frame_that_needs_nothing_stays_as_it_is() {
    let packet = [&NOTHING_LEFT[..], &[7; 60]].concat();
    assert_eq!(check(&packet), Ok(()));
    assert_eq!(plain(&packet), [Cow::Borrowed(&[7; 60][..])]);
}

#[test]
fn a_checksum_that_was_left_is_computed() {
    let mut packet = [&NOTHING_LEFT[..], &[9; 61]].concat();
    packet[0] = NEEDS_CHECKSUM;
    packet[6..8].copy_from_slice(&14u16.to_ne_bytes());
    packet[8..10].copy_from_slice(&6u16.to_ne_bytes());
    let before = sum(&packet[HEADER + 14..]);
    let [frame] = &plain(&packet)[..] else { panic!("it was cut") };
    assert_eq!(frame[20..22], (!before).to_be_bytes());
    assert_eq!((&frame[..20], &frame[22..]), (&packet[HEADER..HEADER + 20], &packet[HEADER + 22..]));
}

#[test]
fn a_header_that_does_not_fit_its_frame_is_refused() {
    let refused = |change: fn(&mut Vec<u8>)| {
        let mut packet = tcp4(3000, 1400);
        assert_eq!(check(&packet), Ok(()));
        change(&mut packet);
        assert_eq!(check(&packet), Err(Dropped::Malformed), "{:?}", &packet[..HEADER]);
        assert!(plain(&packet).is_empty());
    };
    refused(|packet| packet.truncate(9));
    refused(|packet| packet.truncate(HEADER + 13));
    refused(|packet| packet.truncate(HEADER + 50));
    refused(|packet| packet[0] = 0);
    refused(|packet| packet[0] |= 8);
    // IPv6, UDP fragments, UDP, and a kind that nobody knows.
    refused(|packet| packet[1] = 4);
    refused(|packet| packet[1] = 3);
    refused(|packet| packet[1] = 5);
    refused(|packet| packet[1] = 9);
    // Segments without data, and more than any system sends.
    refused(|packet| packet[4..6].fill(0));
    refused(|packet| packet[4..6].copy_from_slice(&2u16.to_ne_bytes()));
    // A checksum elsewhere than in TCP's header, or beyond the frame.
    refused(|packet| packet[6..8].copy_from_slice(&20u16.to_ne_bytes()));
    refused(|packet| packet[8..10].copy_from_slice(&6u16.to_ne_bytes()));
    refused(|packet| packet[8..10].fill(0xff));
    // Other protocols, and headers that are longer than the frame.
    refused(|packet| packet[HEADER + 23] = headers::UDP);
    refused(|packet| packet[HEADER + 12..HEADER + 14].copy_from_slice(&[8, 6]));
    refused(|packet| packet[HEADER + 14] = 0x4f);
    refused(|packet| packet[HEADER + 46] = 0x10);
}

#[test]
fn a_tag_before_the_places_of_a_header_moves_them() {
    let mut packet = tcp4(3000, 1400);
    let frames = plain(&packet).len();
    packet.splice(HEADER + 12..HEADER + 12, [0x81, 0, 0, 7]);
    assert_eq!(check(&packet), Err(Dropped::Malformed));
    shift(&mut packet, 4);
    assert_eq!(plain(&packet).len(), frames);
}

proptest! {
    #[test]
    fn hostile_packets_are_read_without_harm(
        header in prop::collection::vec(any::<u8>(), HEADER),
        changes in prop::collection::vec((0..90usize, any::<u8>()), 0..8),
        data in 0..4000usize,
        keep in any::<bool>(),
        cut in 0..4200usize,
    ) {
        let mut packet = tcp4(data, 700);
        if !keep { packet[..HEADER].copy_from_slice(&header) }
        changes.iter().for_each(|(at, byte)| if let Some(place) = packet.get_mut(*at) { *place = *byte });
        packet.truncate(cut);
        let frames = plain(&packet);
        prop_assert_eq!(frames.is_empty(), check(&packet).is_err());
        prop_assert!(frames.len() <= SEGMENTS_MAX);
        prop_assert!(frames.iter().all(|frame| frame.len() <= packet.len()));
    }
}
