//! Filter of the frames that a guest sends. Pure; frames are untrusted input.
//!
//! A guest may speak for itself only: its own hardware address, no DHCP server, no router. The network of the
//! host trusts neither ARP nor router advertisements to anybody, so any guest could divert the traffic of
//! others. IP sources are not checked, because the configuration of a machine names none.
//!
//! VLAN tags, SNAP and IPv6 extension headers are skipped, up to a bound; what cannot be read to its end is
//! refused. Only a first fragment has ports and an ICMPv6 type: it must contain the whole chain of headers
//! (RFC 7112), so a later one can add none (RFC 5722 forbids overlaps). Sources: RFC 826, 8200, 6105 and IEEE
//! 802.1Q.

use crate::Mac;
use serde::{Deserialize, Serialize};
use thiserror::Error;

const VLAN_TAGS: [[u8; 2]; 3] = [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]];
/// Most VLAN tags of a frame: a service tag and a customer tag.
const VLAN_TAGS_MAX: usize = 2;
/// Most extension headers; RFC 8200 section 4.1 lists seven that each occur once.
const EXTENSIONS_MAX: usize = 8;
/// LLC and SNAP header before an EtherType (RFC 1042).
const SNAP: [u8; 6] = [0xaa, 0xaa, 3, 0, 0, 0];
/// Values below it are lengths, not types (IEEE 802.3).
const FIRST_TYPE: u16 = 0x600;
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const REVERSE_ARP: u16 = 0x8035;
const IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const DHCP_SERVER: u16 = 67;
const DHCPV6_SERVER: u16 = 547;
const ROUTER_ADVERTISEMENT: u8 = 134;
const REDIRECT: u8 = 137;

/// Frames that a guest may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortFilter {
    /// Every frame: the guest routes or bridges for others.
    Off,
    /// Frames of the station with this address.
    Only(Mac),
}

/// Reason why a frame of a guest was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Dropped {
    /// Frame that is truncated, contradicts itself, or has more headers than are read.
    #[error("the frame is malformed")]
    Malformed,
    /// Frame whose source is not the address of the port.
    #[error("the source address is not the port's")]
    Source,
    /// Frame with ARP for another hardware address.
    #[error("the ARP sender is not the port's address")]
    ArpSender,
    /// Frame from the port of a DHCP server.
    #[error("the guest acts as a DHCP server")]
    DhcpServer,
    /// Frame with an IPv6 router advertisement or a redirect.
    #[error("the guest acts as an IPv6 router")]
    Router,
}

/// Frames that a filter dropped, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FilterCounters {
    /// Frames dropped as [`Dropped::Malformed`].
    pub malformed: u64,
    /// Frames dropped as [`Dropped::Source`].
    pub source: u64,
    /// Frames dropped as [`Dropped::ArpSender`].
    pub arp_sender: u64,
    /// Frames dropped as [`Dropped::DhcpServer`].
    pub dhcp_server: u64,
    /// Frames dropped as [`Dropped::Router`].
    pub router: u64,
}

impl FilterCounters {
    /// Counts a frame. The first of each reason is logged, because a guest that needs the filter off looks
    /// like a broken network otherwise.
    pub(crate) fn count(&mut self, reason: Dropped, filter: PortFilter) {
        let counter = match reason {
            Dropped::Malformed => &mut self.malformed,
            Dropped::Source => &mut self.source,
            Dropped::ArpSender => &mut self.arp_sender,
            Dropped::DhcpServer => &mut self.dhcp_server,
            Dropped::Router => &mut self.router,
        };
        *counter += 1;
        if *counter == 1 {
            tracing::warn!(%reason, ?filter, "a frame of a guest was dropped; later ones are only counted");
        }
    }
}

/// Whether a guest behind `filter` may send `frame`. Reads a bounded number of headers.
pub fn allowed(frame: &[u8], filter: PortFilter) -> Result<(), Dropped> {
    let PortFilter::Only(Mac(own)) = filter else { return Ok(()) };
    let (_destination, rest) = cut::<6>(frame)?;
    let (source, rest) = cut::<6>(rest)?;
    if *source != own {
        return Err(Dropped::Source);
    }
    let (kind, payload) = network_layer(rest)?;
    match kind {
        ARP | REVERSE_ARP => arp(payload, own),
        IPV4 => ipv4(payload),
        IPV6 => ipv6(payload),
        _ => Ok(()),
    }
}

fn cut<const N: usize>(bytes: &[u8]) -> Result<(&[u8; N], &[u8]), Dropped> {
    bytes.split_first_chunk::<N>().ok_or(Dropped::Malformed)
}

/// EtherType after the tags, and what follows it.
fn network_layer(mut rest: &[u8]) -> Result<(u16, &[u8]), Dropped> {
    for _ in 0..=VLAN_TAGS_MAX {
        let (kind, payload) = cut::<2>(rest)?;
        if VLAN_TAGS.contains(kind) {
            rest = cut::<2>(payload)?.1;
            continue;
        }
        let kind = u16::from_be_bytes(*kind);
        return match payload.strip_prefix(&SNAP) {
            Some(inner) if kind < FIRST_TYPE => {
                let (kind, payload) = cut::<2>(inner)?;
                Ok((u16::from_be_bytes(*kind), payload))
            }
            _ => Ok((kind, payload)),
        };
    }
    Err(Dropped::Malformed)
}

fn arp(packet: &[u8], own: [u8; 6]) -> Result<(), Dropped> {
    let (header, rest) = cut::<8>(packet)?;
    let (sender, rest) = cut::<6>(rest)?;
    // Lengths of the addresses: 6 and 4. The sender's and the target's protocol address still follow.
    if header[4..6] != [6, 4] || rest.len() < 14 {
        return Err(Dropped::Malformed);
    }
    if *sender == own { Ok(()) } else { Err(Dropped::ArpSender) }
}

fn ipv4(packet: &[u8]) -> Result<(), Dropped> {
    let (header, _) = cut::<20>(packet)?;
    let (start, end) =
        (usize::from(header[0] & 15) * 4, usize::from(u16::from_be_bytes([header[2], header[3]])));
    if header[0] >> 4 != 4 || start < 20 {
        return Err(Dropped::Malformed);
    }
    let payload = packet.get(start..end).ok_or(Dropped::Malformed)?;
    let is_first = u16::from_be_bytes([header[6], header[7]]) & 0x1fff == 0;
    if is_first && header[9] == UDP { udp(payload, DHCP_SERVER) } else { Ok(()) }
}

fn ipv6(packet: &[u8]) -> Result<(), Dropped> {
    let (header, rest) = cut::<40>(packet)?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 {
        return Err(Dropped::Malformed);
    }
    // A length of zero is that of a jumbogram, which is in an extension header (RFC 2675).
    let mut rest = if length == 0 { rest } else { rest.get(..length).ok_or(Dropped::Malformed)? };
    let (mut next, mut fragmented) = (header[6], false);
    for _ in 0..=EXTENSIONS_MAX {
        let length = match next {
            UDP => return udp(rest, DHCPV6_SERVER),
            ICMPV6 => return icmpv6(rest),
            44 if fragmented => return Err(Dropped::Malformed),
            44 => {
                let (fragment, _) = cut::<8>(rest)?;
                if u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 != 0 {
                    return Ok(());
                }
                fragmented = true;
                8
            }
            // Authentication header, in units of 4 bytes (RFC 4302).
            51 => (usize::from(cut::<2>(rest)?.0[1]) + 2) * 4,
            // Hop-by-hop, routing, destination options, mobility, HIP, shim6, experiments (RFC 7045).
            0 | 43 | 60 | 135 | 139 | 140 | 253 | 254 => (usize::from(cut::<2>(rest)?.0[1]) + 1) * 8,
            _ => return Ok(()),
        };
        next = *rest.first().ok_or(Dropped::Malformed)?;
        rest = rest.get(length..).ok_or(Dropped::Malformed)?;
    }
    Err(Dropped::Malformed)
}

fn udp(datagram: &[u8], server: u16) -> Result<(), Dropped> {
    let (header, _) = cut::<8>(datagram)?;
    if u16::from_be_bytes([header[0], header[1]]) == server { Err(Dropped::DhcpServer) } else { Ok(()) }
}

fn icmpv6(message: &[u8]) -> Result<(), Dropped> {
    match cut::<4>(message)?.0[0] {
        ROUTER_ADVERTISEMENT | REDIRECT => Err(Dropped::Router),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "port_filter_tests.rs"]
mod tests;
