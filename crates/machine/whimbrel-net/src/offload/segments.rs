//! Cuts a large frame into the segments that the wire carries. Pure.

use super::{Cut, Kind, headers};

/// FIN and PSH, which only the last segment has; CWR, which only the first has.
const LAST_ONLY: u8 = 0x01 | 0x08;
const FIRST_ONLY: u8 = 0x80;

/// Segments of a frame that [`super::parse`] has checked.
pub(super) fn cut(frame: &[u8], cut: Cut) -> Vec<Vec<u8>> {
    let (before, data) = frame.split_at(cut.headers);
    let pieces = data.len().div_ceil(cut.size).max(1);
    let piece = |index: usize| {
        let from = index * cut.size;
        let data = &data[from..(from + cut.size).min(data.len())];
        let mut segment = [before, data].concat();
        number(&mut segment, cut, index, from as u32, index + 1 == pieces);
        headers::transport_checksum(&mut segment, cut.layers, frame.len() - cut.layers.transport);
        segment
    };
    (0..pieces).map(piece).collect()
}

/// Gives a segment its own numbers: the one with this index, whose data begins at `from`.
fn number(segment: &mut [u8], cut: Cut, index: usize, from: u32, is_last: bool) {
    let Cut { layers, kind, .. } = cut;
    let length = segment.len();
    if layers.is_ipv6 {
        let payload = (length - layers.network - 40) as u16;
        segment[layers.network + 4..][..2].copy_from_slice(&payload.to_be_bytes());
    } else {
        let header = &mut segment[layers.network..layers.transport];
        header[2..4].copy_from_slice(&((length - layers.network) as u16).to_be_bytes());
        let identification = u16::from_be_bytes([header[4], header[5]]).wrapping_add(index as u16);
        header[4..6].copy_from_slice(&identification.to_be_bytes());
        headers::ipv4_checksum(header);
    }
    let header = &mut segment[layers.transport..];
    match kind {
        Kind::Udp => header[4..6].copy_from_slice(&((length - layers.transport) as u16).to_be_bytes()),
        Kind::Tcp4 | Kind::Tcp6 => {
            let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
            header[4..8].copy_from_slice(&sequence.wrapping_add(from).to_be_bytes());
            header[13] &= if is_last { u8::MAX } else { !LAST_ONLY };
            header[13] &= if index == 0 { u8::MAX } else { !FIRST_ONLY };
        }
    }
}
