//! Offloads of a frame: what its sender has left to the next device, a checksum or the cutting of a large
//! segment. Pure; frames are untrusted input.
//!
//! A frame between QEMU and the host has a header of ten bytes in front, `struct virtio_net_hdr`
//! (linux/virtio_net.h; Virtual I/O Device 1.2, section 5.1.6), in the byte order of the host. [`check`]
//! refuses a header that does not fit its frame, before the frame reaches a device of the host. [`plain`]
//! does what was left, for whoever knows no headers: other hosts and logs.
//!
//! A device adds the same to every segment: its sequence number (RFC 9293), length, identification,
//! checksums. The flags FIN and PSH are in the last segment only, CWR in the first (RFC 3168, section 6.1.2).

mod headers;
mod segments;

use crate::Dropped;
use headers::Layers;
use std::borrow::Cow;

/// Bytes of the header before a frame.
pub(crate) const HEADER: usize = 10;
/// Header of a frame that needs nothing.
pub(crate) const NOTHING_LEFT: [u8; HEADER] = [0; HEADER];

/// The checksum is to be computed.
const NEEDS_CHECKSUM: u8 = 1;
/// The checksum was verified already.
const CHECKSUM_VALID: u8 = 2;
/// Segments tell of congestion (RFC 3168); a bit beside the kind.
const WITH_ECN: u8 = 0x80;
/// Most segments of a frame: of the smallest that Linux sends, 48 bytes of data, it has 1,365.
const SEGMENTS_MAX: usize = 1400;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Kind of a frame that is to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tcp4,
    Tcp6,
    Udp,
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// Where the bytes of the checksum begin and where it is put, if it is to be computed.
    checksum: Option<(usize, usize)>,
    /// Kind and bytes of data of each segment, if the frame is to be cut.
    cut: Option<(Kind, usize)>,
}

/// The frame after its header; empty if there is no whole header.
pub(crate) fn frame_of(packet: &[u8]) -> &[u8] {
    packet.get(HEADER..).unwrap_or_default()
}

/// Moves the places that the header of `packet` names, because so many bytes were inserted before them.
pub(crate) fn shift(packet: &mut [u8], by: u16) {
    let moved = |packet: &mut [u8], at: usize| {
        let place = u16::from_ne_bytes([packet[at], packet[at + 1]]).saturating_add(by);
        packet[at..at + 2].copy_from_slice(&place.to_ne_bytes());
    };
    if packet.len() >= HEADER && packet[0] & NEEDS_CHECKSUM != 0 {
        moved(packet, 2);
        moved(packet, 6);
    }
}

/// Whether the header of `packet` fits its frame.
pub fn check(packet: &[u8]) -> Result<(), Dropped> {
    parse(packet).map(drop).ok_or(Dropped::Malformed)
}

/// Frames without headers that say the same as `packet`; none if its header does not fit.
pub fn plain(packet: &[u8]) -> Vec<Cow<'_, [u8]>> {
    let frame = frame_of(packet);
    match parse(packet) {
        None => Vec::new(),
        Some((Header { checksum: None, .. }, _)) => vec![Cow::Borrowed(frame)],
        Some((Header { checksum: Some((start, at)), .. }, None)) => {
            let mut frame = frame.to_vec();
            headers::complete_checksum(&mut frame, start, at);
            vec![Cow::Owned(frame)]
        }
        Some((_, Some(cut))) => segments::cut(frame, cut).into_iter().map(Cow::Owned).collect(),
    }
}

/// How a frame is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    kind: Kind,
    layers: Layers,
    /// Bytes of all headers.
    headers: usize,
    /// Bytes of data of each segment.
    size: usize,
}

/// Header of a packet, and how its frame is cut, if it is; none if the header does not fit.
fn parse(packet: &[u8]) -> Option<(Header, Option<Cut>)> {
    let (bytes, frame) = packet.split_first_chunk::<HEADER>()?;
    let header = Header::parse(bytes)?;
    if frame.len() < ETHERNET {
        return None;
    }
    if let Some((start, at)) = header.checksum {
        (start >= ETHERNET && at + 2 <= frame.len()).then_some(())?;
    }
    let cut = match header.cut {
        None => None,
        Some((kind, size)) => Some(cut_of(frame, header.checksum?, kind, size)?),
    };
    Some((header, cut))
}

/// How `frame` is cut, if its headers are those of the kind and its checksum is the one of the transport.
fn cut_of(frame: &[u8], (start, at): (usize, usize), kind: Kind, size: usize) -> Option<Cut> {
    let layers = Layers::of(frame)?;
    let (protocol, place) = match kind {
        Kind::Tcp4 | Kind::Tcp6 => (headers::TCP, headers::TCP_CHECKSUM),
        Kind::Udp => (headers::UDP, headers::UDP_CHECKSUM),
    };
    let is_family = match kind {
        Kind::Tcp4 => !layers.is_ipv6,
        Kind::Tcp6 => layers.is_ipv6,
        Kind::Udp => true,
    };
    if !is_family || layers.protocol != protocol || layers.transport != start || at != start + place {
        return None;
    }
    let headers = start + headers::transport_length(frame, layers)?;
    let data = frame.len().checked_sub(headers)?;
    let is_bounded = size > 0 && data.div_ceil(size) <= SEGMENTS_MAX;
    is_bounded.then_some(Cut { kind, layers, headers, size })
}

impl Header {
    /// Header with values that are known; its places are not compared with a frame yet.
    fn parse(bytes: &[u8; HEADER]) -> Option<Self> {
        let [flags, kind, ..] = *bytes;
        if flags & !(NEEDS_CHECKSUM | CHECKSUM_VALID) != 0 {
            return None;
        }
        let word = |at: usize| usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        let (size, start, offset) = (word(4), word(6), word(8));
        let checksum = (flags & NEEDS_CHECKSUM != 0).then_some((start, start + offset));
        let kind = match kind {
            0 => return Some(Self { checksum, cut: None }),
            kind if kind & !WITH_ECN == 1 => Kind::Tcp4,
            kind if kind & !WITH_ECN == 4 => Kind::Tcp6,
            5 => Kind::Udp,
            // UDP fragments (3) are switched off in the devices of machines.
            _ => return None,
        };
        Some(Self { checksum, cut: Some((kind, size)) })
    }
}

#[cfg(test)]
mod tests;
