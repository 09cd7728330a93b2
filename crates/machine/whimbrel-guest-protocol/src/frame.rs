//! Frames of the guest protocol, and a decoder for a stream that may begin in the middle of one.
//!
//! Either end of a port may close and reopen while the other one writes, and a migration cuts the stream
//! anywhere. So a frame begins with four bytes to search for and ends with a checksum; other bytes are
//! skipped one by one. A decoder buffers at most one frame.

use crate::VERSION;

/// First bytes of a frame.
const MAGIC: [u8; 4] = *b"\x01wMb";
/// Bytes of magic, version, kind, two zero bytes, session, id and length of the payload.
const HEADER: usize = 20;
/// Bytes of the checksum after the payload.
const TRAILER: usize = 4;
/// Most bytes of a payload.
pub const PAYLOAD_MAX: usize = 64 << 10;

/// Message that is not decoded yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Type of the message.
    pub kind: u8,
    /// Random number that the guest agent chose at its start; it ignores commands for another session.
    pub session: u32,
    /// Id that the sender of a command or request chose and the answer repeats.
    pub id: u32,
    /// Encoded content of the message.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Encodes the frame. If the payload is too long, receivers ignore the frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len() + TRAILER);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, self.kind, 0, 0]);
        bytes.extend(self.session.to_le_bytes());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend((self.payload.len() as u32).to_le_bytes());
        bytes.extend(&self.payload);
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }
}

/// FNV-1a, which detects accidents, not attacks.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Finds frames in a stream.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    done: usize,
    /// Version of a valid frame that was skipped because it is another one.
    other_version: Option<u8>,
}

impl Decoder {
    /// Adds more bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.done);
        self.done = 0;
        self.bytes.extend(bytes);
    }

    /// Version of a frame that was skipped because it is another one; reported once.
    pub fn other_version(&mut self) -> Option<u8> {
        self.other_version.take()
    }

    fn u32_at(&self, at: usize) -> u32 {
        let bytes = &self.bytes[self.done + at..self.done + at + 4];
        bytes.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    /// Next frame, if all of it has arrived.
    pub fn next_frame(&mut self) -> Option<Frame> {
        loop {
            self.skip_to_magic();
            let here = self.bytes.len() - self.done;
            if here < HEADER {
                return None;
            }
            let len = self.u32_at(16) as usize;
            if len > PAYLOAD_MAX {
                self.done += 1;
                continue;
            }
            let whole = HEADER + len + TRAILER;
            if here < whole {
                return None;
            }
            if checksum(&self.bytes[self.done..self.done + whole - TRAILER]) != self.u32_at(whole - TRAILER) {
                self.done += 1;
                continue;
            }
            let frame = self.frame(len);
            let version = self.bytes[self.done + 4];
            self.done += whole;
            if version == VERSION {
                return Some(frame);
            }
            self.other_version = Some(version);
        }
    }

    fn frame(&self, len: usize) -> Frame {
        let start = self.done + HEADER;
        Frame {
            kind: self.bytes[self.done + 5],
            session: self.u32_at(8),
            id: self.u32_at(12),
            payload: self.bytes[start..start + len].to_vec(),
        }
    }

    /// Skips bytes that cannot start a frame.
    fn skip_to_magic(&mut self) {
        let rest = &self.bytes[self.done..];
        let begins = |at: &usize| rest[*at..].iter().zip(MAGIC).all(|(byte, magic)| *byte == magic);
        self.done += (0..rest.len()).find(begins).unwrap_or(rest.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let payload = prop::collection::vec(any::<u8>(), 0..200);
        (any::<u8>(), any::<u32>(), any::<u32>(), payload).prop_map(|(kind, session, id, payload)| Frame {
            kind,
            session,
            id,
            payload,
        })
    }

    fn decode(decoder: &mut Decoder, bytes: &[u8], piece: usize) -> Vec<Frame> {
        let mut frames = Vec::new();
        for piece in bytes.chunks(piece.max(1)) {
            decoder.push(piece);
            frames.extend(std::iter::from_fn(|| decoder.next_frame()));
        }
        frames
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_whatever_the_pieces(
            frames in prop::collection::vec(frame(), 0..5), piece in 1..100usize,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            prop_assert_eq!(decode(&mut Decoder::default(), &bytes, piece), frames);
        }

        /// The fear: after a cut in the middle of a frame the two never synchronise again.
        #[test]
        fn a_stream_that_was_cut_is_understood_again(
            lost in frame(), cut in any::<prop::sample::Index>(), noise in prop::collection::vec(any::<u8>(), 0..40),
            next in frame(), piece in 1..100usize,
        ) {
            let lost = lost.encode();
            let mut bytes = lost[..cut.index(lost.len())].to_vec();
            bytes.extend(noise);
            bytes.extend(next.encode());
            // A truncated frame may hide what follows until as many bytes have arrived as it announced.
            bytes.extend(std::iter::repeat_n(0, PAYLOAD_MAX + HEADER + TRAILER));
            let frames = decode(&mut Decoder::default(), &bytes, piece * 100);
            prop_assert!(frames.contains(&next), "{frames:?}");
        }

        #[test]
        fn a_changed_frame_is_none(frame in frame(), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = frame.encode();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            bytes.extend(std::iter::repeat_n(0, PAYLOAD_MAX + HEADER + TRAILER));
            prop_assert_eq!(decode(&mut Decoder::default(), &bytes, 1000), []);
        }

        #[test]
        fn noise_is_not_kept(noise in prop::collection::vec(any::<u8>(), 0..3000)) {
            let mut decoder = Decoder::default();
            for piece in noise.chunks(100) {
                decoder.push(piece);
                while decoder.next_frame().is_some() {}
                prop_assert!(decoder.bytes.len() <= PAYLOAD_MAX + HEADER + TRAILER + 100);
            }
        }
    }

    #[test]
    fn the_bytes_of_version_1() {
        let bytes = Frame { kind: 5, session: 0x0102_0304, id: 9, payload: vec![0xaa] }.encode();
        let expected = b"\x01wMb\x01\x05\0\0\x04\x03\x02\x01\x09\0\0\0\x01\0\0\0\xaa";
        assert_eq!(bytes[..21], expected[..]);
        assert_eq!(bytes.len(), 25);
    }

    #[test]
    fn a_frame_of_another_version_is_told_and_passed_over() {
        let frame = Frame { kind: 1, session: 1, id: 1, payload: vec![] };
        let mut bytes = frame.encode();
        bytes[4] = 2;
        let sum = checksum(&bytes[..HEADER]).to_le_bytes();
        bytes[HEADER..].copy_from_slice(&sum);
        bytes.extend(frame.encode());
        let mut decoder = Decoder::default();
        assert_eq!(decode(&mut decoder, &bytes, 7), [frame]);
        assert_eq!((decoder.other_version(), decoder.other_version()), (Some(2), None));
    }
}
