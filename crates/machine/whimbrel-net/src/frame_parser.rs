//! Frame parser: finds the addresses that the sender of a frame claims. Pure; frames are untrusted input.
//!
//! Sources: RFC 826 (ARP), RFC 4861 (neighbour discovery: sections 4.1, 4.3, 4.4 and the hop limit of 255
//! that proves a message was not routed), IEEE 802.3.

use crate::Mac;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const ARP: [u8; 2] = [0x08, 0x06];
const IPV6: [u8; 2] = [0x86, 0xdd];
/// Hardware type Ethernet, protocol type IPv4, address lengths 6 and 4.
const ARP_ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ICMPV6: u8 = 58;
const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// Station, and an address that it claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressClaim {
    pub(crate) mac: Mac,
    pub(crate) address: Option<IpAddr>,
}

/// Claim of the sender of `frame`; none if it is no valid frame.
pub(crate) fn claim(frame: &[u8]) -> Option<AddressClaim> {
    let (_destination, rest) = frame.split_first_chunk::<6>()?;
    let (source, rest) = rest.split_first_chunk::<6>()?;
    let (kind, payload) = rest.split_first_chunk::<2>()?;
    let address = match *kind {
        ARP => arp_sender(payload, source).map(IpAddr::V4),
        IPV6 => discovered(payload).map(IpAddr::V6),
        _ => None,
    };
    Some(AddressClaim { mac: Mac(*source), address })
}

/// Protocol address of the sender, if the hardware address matches.
fn arp_sender(packet: &[u8], source: &[u8; 6]) -> Option<Ipv4Addr> {
    let rest = packet.strip_prefix(&ARP_ETHERNET_IPV4)?;
    let (_operation, rest) = rest.split_first_chunk::<2>()?;
    let (hardware, rest) = rest.split_first_chunk::<6>()?;
    let (address, rest) = rest.split_first_chunk::<4>()?;
    (hardware == source && rest.len() >= 10).then(|| Ipv4Addr::from(*address))
}

/// Address that a neighbour discovery message claims.
fn discovered(packet: &[u8]) -> Option<Ipv6Addr> {
    let (header, message) = packet.split_first_chunk::<40>()?;
    let (next_header, hop_limit) = (header[6], header[7]);
    if header[0] >> 4 != 6 || next_header != ICMPV6 || hop_limit != 255 {
        return None;
    }
    let source = Ipv6Addr::from(*header[8..24].first_chunk::<16>()?);
    match *message.first()? {
        // From the unspecified address (used while a station checks a new address) they claim nothing.
        ROUTER_SOLICITATION | NEIGHBOUR_SOLICITATION => Some(source),
        NEIGHBOUR_ADVERTISEMENT => Some(Ipv6Addr::from(*message.get(8..24)?.first_chunk::<16>()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Addresses, Station, announcements};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hostile_frames_are_read_without_harm(mut frame in prop::collection::vec(any::<u8>(), 0..120), kind in 0..3) {
            if let Some(place) = frame.get_mut(12..14) {
                match kind { 0 => place.copy_from_slice(&ARP), 1 => place.copy_from_slice(&IPV6), _ => {} }
            }
            let mut addresses = Addresses::default();
            addresses.record(&frame);
            for station in addresses.stations() {
                prop_assert!(station.mac.is_station());
            }
        }
    }

    #[test]
    fn what_is_announced_is_learnt_again_and_cut_frames_are_not() {
        let station = Station {
            mac: Mac([0x52, 0x54, 0, 1, 2, 3]),
            ipv4: vec![Ipv4Addr::new(10, 77, 0, 100)],
            ipv6: vec!["fe80::5054:ff:fe01:203".parse().unwrap()],
        };
        let mut learnt = Addresses::default();
        let frames = announcements(&station);
        frames.iter().for_each(|frame| learnt.record(frame));
        assert_eq!(learnt.stations(), [station]);
        let mut cut = Addresses::default();
        frames.iter().for_each(|frame| cut.record(&frame[..30]));
        assert!(cut.stations().iter().all(|station| station.ipv4.is_empty() && station.ipv6.is_empty()));
    }

    #[test]
    fn a_routed_packet_claims_nothing() {
        let mut frame = announcements(&Station {
            mac: Mac([2; 6]),
            ipv4: Vec::new(),
            ipv6: vec!["2001:db8::1".parse().unwrap()],
        })
        .remove(1);
        assert!(claim(&frame).unwrap().address.is_some());
        frame[14 + 7] = 254;
        assert_eq!(claim(&frame).unwrap().address, None);
    }
}
