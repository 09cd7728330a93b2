//! Headers of a frame that is cut, and their checksums (RFC 1071). Pure.

use super::ETHERNET;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
/// Places of the checksums in their headers.
pub(super) const TCP_CHECKSUM: usize = 16;
pub(super) const UDP_CHECKSUM: usize = 6;
const VLAN_TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];
const VLAN_TAGS_MAX: usize = 2;
const EXTENSIONS_MAX: usize = 8;
const IPV6: usize = 40;

/// Where the headers of an IP packet are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layers {
    pub(super) is_ipv6: bool,
    /// Start of the IP header.
    pub(super) network: usize,
    /// Start of the header after it, and after IPv6 extensions.
    pub(super) transport: usize,
    pub(super) protocol: u8,
}

impl Layers {
    /// Layers of a frame with a whole IP header; none of another one.
    pub(super) fn of(frame: &[u8]) -> Option<Self> {
        let mut at = ETHERNET - 2;
        for _ in 0..VLAN_TAGS_MAX {
            if VLAN_TAGS.contains(frame.get(at..)?.first_chunk::<2>()?) {
                at += 4;
            }
        }
        let network = at + 2;
        match *frame.get(at..)?.first_chunk::<2>()? {
            [0x08, 0x00] => {
                let header = frame.get(network..)?.first_chunk::<20>()?;
                let length = usize::from(header[0] & 15) * 4;
                let is_whole = header[0] >> 4 == 4 && length >= 20 && frame.len() >= network + length;
                let (transport, protocol) = (network + length, header[9]);
                is_whole.then_some(Self { is_ipv6: false, network, transport, protocol })
            }
            [0x86, 0xdd] => {
                let header = frame.get(network..)?.first_chunk::<IPV6>()?;
                let (protocol, transport) = after_extensions(frame, header[6], network + IPV6)?;
                (header[0] >> 4 == 6).then_some(Self { is_ipv6: true, network, transport, protocol })
            }
            _ => None,
        }
    }
}

/// Protocol and start of the header after hop-by-hop, routing and destination options (RFC 8200).
fn after_extensions(frame: &[u8], mut next: u8, mut at: usize) -> Option<(u8, usize)> {
    for _ in 0..EXTENSIONS_MAX {
        if !matches!(next, 0 | 43 | 60) {
            return Some((next, at));
        }
        let [following, length] = *frame.get(at..)?.first_chunk::<2>()?;
        (next, at) = (following, at + (usize::from(length) + 1) * 8);
    }
    None
}

/// Bytes of the transport's header, which is whole.
pub(super) fn transport_length(frame: &[u8], layers: Layers) -> Option<usize> {
    let header = frame.get(layers.transport..)?;
    let length = match layers.protocol {
        TCP => usize::from(*header.get(12)? >> 4) * 4,
        _ => 8,
    };
    let least = if layers.protocol == TCP { 20 } else { 8 };
    (length >= least && header.len() >= length).then_some(length)
}

/// Computes a checksum over the bytes from `start` on; at its place `at` is the sum of what is before them.
pub(super) fn complete_checksum(frame: &mut [u8], start: usize, at: usize) {
    // Zero would mean that there is none (RFC 768); both are the same number.
    let sum = match !folded(sum(&frame[start..])) {
        0 => u16::MAX,
        sum => sum,
    };
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Computes the checksum of the transport in a segment. At its place is the sum of the pseudo header of the
/// whole frame, whose transport was `whole` bytes long: only the length in it differs.
pub(super) fn transport_checksum(segment: &mut [u8], layers: Layers, whole: usize) {
    let place = if layers.protocol == TCP { TCP_CHECKSUM } else { UDP_CHECKSUM };
    let at = layers.transport + place;
    let sum = u64::from(u16::from_be_bytes([segment[at], segment[at + 1]]));
    let length = (segment.len() - layers.transport) as u64;
    let sum = sum + u64::from(!folded(whole as u64)) + length;
    segment[at..at + 2].copy_from_slice(&folded(sum).to_be_bytes());
    complete_checksum(segment, layers.transport, at);
}

/// Computes the checksum of an IPv4 header.
pub(super) fn ipv4_checksum(header: &mut [u8]) {
    header[10..12].fill(0);
    let sum = !folded(sum(header));
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn sum(bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |last| u64::from(*last) << 8);
    pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum::<u64>() + last
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
