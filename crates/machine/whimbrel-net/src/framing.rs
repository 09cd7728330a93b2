//! Framing of QEMU's stream socket: four bytes of length, big-endian, then the frame (QEMU `net/stream.c`).
//!
//! Pure. A length of zero or above [`FRAME_MAX`] breaks the stream for good, because the next frame cannot be
//! found.

use crate::FRAME_MAX;

/// Bytes of the length before a frame.
pub(crate) const LENGTH: usize = 4;
/// Bytes of the buffer: one incomplete frame, and a large read.
const ROOM: usize = 4 * (FRAME_MAX + LENGTH);

/// The stream has an invalid length where a frame must begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the stream announces a frame of {length} bytes; 1 to {FRAME_MAX} are allowed")]
pub(crate) struct BrokenStream {
    pub(crate) length: u32,
}

/// Splits a stream into frames. Buffers at most [`ROOM`] bytes.
pub(crate) struct Decoder {
    room: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Decoder {
    pub(crate) fn new() -> Self {
        Self { room: vec![0; ROOM].into_boxed_slice(), begin: 0, end: 0 }
    }

    /// Splitter that has these bytes already; none if there are more than a port leaves.
    pub(crate) fn begun(bytes: &[u8]) -> Option<Self> {
        let mut decoder = Self::new();
        decoder.room.get_mut(..bytes.len())?.copy_from_slice(bytes);
        decoder.end = bytes.len();
        Some(decoder)
    }

    /// Bytes that were received and not taken.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.room[self.begin..self.end]
    }

    /// Space for the next bytes of the stream; never empty once all complete frames were taken. `filled`
    /// reports how many arrived.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        // The remainder is less than one frame, so moving it is cheap, and done once for each large read.
        if self.begin > 0 {
            self.room.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        &mut self.room[self.end..]
    }

    /// Reports that `count` bytes were put into `space`.
    pub(crate) fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.room.len());
    }

    /// Next frame if it is complete; it remains the next one until `taken`.
    pub(crate) fn frame(&self) -> Result<Option<&[u8]>, BrokenStream> {
        let bytes = &self.room[self.begin..self.end];
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length);
        match length as usize {
            1..=FRAME_MAX => Ok(rest.get(..length as usize)),
            _ => Err(BrokenStream { length }),
        }
    }

    /// Removes the frame that `frame` returned, `length` bytes long.
    pub(crate) fn taken(&mut self, length: usize) {
        self.begin = (self.begin + LENGTH + length).min(self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(decoder: &mut Decoder) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while let Some(frame) = decoder.frame().unwrap().map(<[u8]>::to_vec) {
            decoder.taken(frame.len());
            frames.push(frame);
        }
        frames
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting_of_the_stream(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..40),
            cuts in prop::collection::vec(1..700usize, 1..40),
        ) {
            let mut stream: Vec<u8> = Vec::new();
            for frame in &frames {
                stream.extend((frame.len() as u32).to_be_bytes());
                stream.extend(frame);
            }
            let (mut decoder, mut found, mut rest) = (Decoder::new(), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                decoder.space()[..piece.len()].copy_from_slice(piece);
                decoder.filled(piece.len());
                found.extend(drain(&mut decoder));
                rest = after;
            }
            prop_assert_eq!(found, frames);
        }
    }

    #[test]
    fn an_impossible_length_breaks_the_stream() {
        for length in [0, FRAME_MAX as u32 + 1, u32::MAX] {
            let mut decoder = Decoder::new();
            decoder.space()[..4].copy_from_slice(&length.to_be_bytes());
            decoder.filled(4);
            assert_eq!(decoder.frame(), Err(BrokenStream { length }));
        }
    }
}
