//! Wire frames: a fixed head, a small header and a raw payload. Pure: bytes in, wire frames out.
//!
//! Invariants: a length is checked before memory is allocated for it; a payload is received directly into its
//! final buffer; the decoder returns the same wire frames however the stream is split. There is no checksum,
//! because both transports authenticate every byte. The magic detects a program that prints into the stream,
//! such as a login script behind ssh. After an error the stream is out of sync and must be closed.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first two bytes of every wire frame: `Wf` as a little-endian number.
const MAGIC: u16 = u16::from_le_bytes(*b"Wf");
/// Bytes of a wire frame's head.
pub const HEAD_SIZE: usize = 24;
/// Longest header in bytes. Headers are typed and small; bulk data belongs in the payload.
pub const MAX_HEADER: u32 = 64 << 10;
/// Longest payload in bytes: two 4 MiB batches of pages. A longer frame would block a slow line for long.
pub const MAX_PAYLOAD: u32 = 8 << 20;
/// Bytes that the decoder reads ahead: hundreds of small frames in a system call, little copying for large.
const READ_AHEAD: usize = 32 << 10;

/// Flag bits of a wire frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(u16);

impl Flags {
    /// An unordered request.
    pub const NONE: Flags = Flags(0);
    /// The wire frame answers a request.
    pub const REPLY: Flags = Flags(1);
    /// With `REPLY`: the answer is a refusal.
    pub(crate) const REFUSAL: Flags = Flags(1 | 2);
    /// The request is handled in order of arrival in its stream.
    pub const ORDERED: Flags = Flags(4);

    /// The flags of `bits`, if the combination is defined.
    pub(crate) fn from_bits(bits: u16) -> Option<Self> {
        matches!(bits, 0 | 1 | 3 | 4).then_some(Self(bits))
    }

    /// The bits as sent.
    pub fn bits(self) -> u16 {
        self.0
    }
}

/// The decoded head of a wire frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHead {
    /// Whether it is a request, a reply or a refusal.
    pub flags: Flags,
    /// Message kind of the request.
    pub kind: u16,
    /// With `ORDERED`: the stream in which the request is ordered.
    pub stream: u16,
    /// Id of the request, counted by the requesting side.
    pub request: u64,
    /// Length of the header in bytes.
    pub header_len: u32,
    /// Length of the payload in bytes.
    pub payload_len: u32,
}

/// One wire frame. The lengths in its head are those of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireFrame {
    /// The decoded head.
    pub head: FrameHead,
    /// Small typed header.
    pub header: Bytes,
    /// Raw payload bytes.
    pub payload: Bytes,
    /// Further bytes of the payload, which a sender need not copy together; none in what is received.
    pub(crate) rest: Vec<Bytes>,
}

/// A violation of the protocol by the peer's bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireFrameError {
    /// The bytes do not start a wire frame.
    #[error("the stream is out of sync: {found:#06x} where a frame should begin")]
    Magic {
        /// The bytes found instead of the magic.
        found: u16,
    },
    /// An undefined combination of flags.
    #[error("frame with unknown flags {flags:#06x}")]
    Flags {
        /// The flag bits.
        flags: u16,
    },
    /// A header over [`MAX_HEADER`].
    #[error("frame header of {len} bytes, the limit is {MAX_HEADER}")]
    HeaderTooLong {
        /// Length in the head.
        len: u64,
    },
    /// A payload over [`MAX_PAYLOAD`].
    #[error("frame payload of {len} bytes, the limit is {MAX_PAYLOAD}")]
    PayloadTooLong {
        /// Length in the head.
        len: u64,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended inside a frame")]
    Truncated,
    /// The peer sent more bytes than its credit.
    #[error("the peer sent {over} bytes more than it has credit for")]
    CreditExceeded {
        /// Bytes above the credit.
        over: u64,
    },
    /// The peer returned more credit than was used.
    #[error("the peer returned {over} bytes of credit more than were used")]
    GrantExceeded {
        /// Bytes above the used credit.
        over: u64,
    },
    /// A reply to an unknown request.
    #[error("reply to request {request}, which was never sent")]
    UnknownReply {
        /// The request id in the reply.
        request: u64,
    },
    /// A malformed connection frame.
    #[error("malformed connection frame of kind {kind:#06x}")]
    Malformed {
        /// Kind of the connection frame.
        kind: u16,
    },
}

/// The head's layout on the wire: little-endian, no padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHead {
    magic: U16,
    flags: U16,
    kind: U16,
    stream: U16,
    request: U64,
    header_len: U32,
    payload_len: U32,
}

const _: () = assert!(size_of::<RawHead>() == HEAD_SIZE);

impl WireFrame {
    /// Builds a wire frame; parts over the limits are refused.
    pub fn new(
        flags: Flags,
        kind: u16,
        stream: u16,
        request: u64,
        header: Bytes,
        payload: Bytes,
    ) -> Result<Self, WireFrameError> {
        let header_len = bounded(header.len() as u64, MAX_HEADER)
            .ok_or(WireFrameError::HeaderTooLong { len: header.len() as u64 })?;
        let payload_len = bounded(payload.len() as u64, MAX_PAYLOAD)
            .ok_or(WireFrameError::PayloadTooLong { len: payload.len() as u64 })?;
        let head = FrameHead { flags, kind, stream, request, header_len, payload_len };
        Ok(Self { head, header, payload, rest: Vec::new() })
    }

    /// Adds further bytes to the payload; refused above the limit.
    pub(crate) fn with_rest(mut self, rest: Vec<Bytes>) -> Result<Self, WireFrameError> {
        let len = (self.payload.len() + rest.iter().map(Bytes::len).sum::<usize>()) as u64;
        self.head.payload_len = bounded(len, MAX_PAYLOAD).ok_or(WireFrameError::PayloadTooLong { len })?;
        self.rest = rest;
        Ok(self)
    }
}

fn bounded(len: u64, limit: u32) -> Option<u32> {
    u32::try_from(len).ok().filter(|len| *len <= limit)
}

impl FrameHead {
    /// Length of the whole wire frame in bytes.
    pub(crate) fn frame_len(&self) -> u32 {
        HEAD_SIZE as u32 + self.header_len + self.payload_len
    }

    fn parse(raw: &RawHead) -> Result<Self, WireFrameError> {
        if raw.magic.get() != MAGIC {
            return Err(WireFrameError::Magic { found: raw.magic.get() });
        }
        let flags = raw.flags.get();
        let flags = Flags::from_bits(flags).ok_or(WireFrameError::Flags { flags })?;
        let (header, payload) = (u64::from(raw.header_len.get()), u64::from(raw.payload_len.get()));
        Ok(Self {
            flags,
            kind: raw.kind.get(),
            stream: raw.stream.get(),
            request: raw.request.get(),
            header_len: bounded(header, MAX_HEADER).ok_or(WireFrameError::HeaderTooLong { len: header })?,
            payload_len: bounded(payload, MAX_PAYLOAD)
                .ok_or(WireFrameError::PayloadTooLong { len: payload })?,
        })
    }
}

/// Appends the bytes of `head` to `out`. Header and payload follow it on the wire.
pub fn encode_head(head: &FrameHead, out: &mut BytesMut) {
    let raw = RawHead {
        magic: MAGIC.into(),
        flags: head.flags.0.into(),
        kind: head.kind.into(),
        stream: head.stream.into(),
        request: head.request.into(),
        header_len: head.header_len.into(),
        payload_len: head.payload_len.into(),
    };
    out.extend_from_slice(raw.as_bytes());
}

#[derive(Debug)]
struct PartialFrame {
    head: FrameHead,
    header: Bytes,
    payload: BytesMut,
}

impl PartialFrame {
    fn missing(&self) -> usize {
        self.head.payload_len as usize - self.payload.len()
    }
}

/// Splits a byte stream into wire frames. Callers fill [`Decoder::space`] and take frames until none is left.
///
/// The decoder holds at most one frame and 32 KiB.
#[derive(Debug, Default)]
pub struct Decoder {
    read_ahead: BytesMut,
    partial: Option<PartialFrame>,
}

impl Decoder {
    /// The buffer for the next bytes of the stream: the incomplete payload or the read-ahead buffer. It has
    /// room once [`Decoder::next_frame`] has returned `None`.
    pub fn space(&mut self) -> impl BufMut + '_ {
        match &mut self.partial {
            Some(filling) => {
                let missing = filling.missing();
                (&mut filling.payload).limit(missing)
            }
            None => {
                self.read_ahead.reserve(READ_AHEAD);
                (&mut self.read_ahead).limit(READ_AHEAD)
            }
        }
    }

    /// The head of the next frame as soon as it has arrived, so that a receiver can refuse a frame before
    /// memory is allocated for it.
    pub fn peek(&self) -> Result<Option<FrameHead>, WireFrameError> {
        match &self.partial {
            Some(filling) => Ok(Some(filling.head)),
            None => RawHead::ref_from_prefix(&self.read_ahead)
                .ok()
                .map(|(raw, _)| FrameHead::parse(raw))
                .transpose(),
        }
    }

    /// The next complete wire frame.
    pub fn next_frame(&mut self) -> Result<Option<WireFrame>, WireFrameError> {
        if self.partial.is_none() {
            let Some(head) = self.peek()? else { return Ok(None) };
            let before_payload = HEAD_SIZE + head.header_len as usize;
            if self.read_ahead.len() < before_payload {
                return Ok(None);
            }
            self.read_ahead.advance(HEAD_SIZE);
            // Copied, because a slice of ten bytes would keep 32 KiB allocated.
            let header = Bytes::copy_from_slice(&self.read_ahead[..head.header_len as usize]);
            self.read_ahead.advance(head.header_len as usize);
            let mut payload = BytesMut::with_capacity(head.payload_len as usize);
            let here = self.read_ahead.len().min(head.payload_len as usize);
            payload.extend_from_slice(&self.read_ahead[..here]);
            self.read_ahead.advance(here);
            self.partial = Some(PartialFrame { head, header, payload });
        }
        let complete = self.partial.take_if(|filling| filling.missing() == 0);
        Ok(complete.map(|done| WireFrame {
            head: done.head,
            header: done.header,
            payload: done.payload.freeze(),
            rest: Vec::new(),
        }))
    }

    /// Fails if the stream may not end here.
    pub fn finish(&self) -> Result<(), WireFrameError> {
        if self.partial.is_none() && self.read_ahead.is_empty() {
            Ok(())
        } else {
            Err(WireFrameError::Truncated)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Vec<WireFrame>> {
        let flags = prop::sample::select(vec![Flags::NONE, Flags::REPLY, Flags::REFUSAL, Flags::ORDERED]);
        let bytes = |max| prop::collection::vec(any::<u8>(), 0..max).prop_map(Bytes::from);
        let frame = (flags, any::<u16>(), any::<u16>(), any::<u64>(), bytes(300), bytes(70_000));
        let frame = frame.prop_map(|(f, k, s, r, h, p)| WireFrame::new(f, k, s, r, h, p).unwrap());
        prop::collection::vec(frame, 0..6)
    }

    fn encode(frames: &[WireFrame]) -> BytesMut {
        let mut out = BytesMut::new();
        for frame in frames {
            encode_head(&frame.head, &mut out);
            out.extend_from_slice(&frame.header);
            out.extend_from_slice(&frame.payload);
        }
        out
    }

    fn feed(decoder: &mut Decoder, mut bytes: &[u8], cut: usize) -> Result<Vec<WireFrame>, WireFrameError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let mut space = decoder.space();
            let take = cut.min(space.remaining_mut()).min(bytes.len());
            assert!(take > 0, "the decoder always has room");
            space.put_slice(&bytes[..take]);
            drop(space);
            bytes = &bytes[take..];
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_same_frames_come_out_however_the_stream_is_cut(frames in frames(), cut in 1usize..40_000) {
            let mut decoder = Decoder::default();
            prop_assert_eq!(feed(&mut decoder, &encode(&frames), cut).unwrap(), frames);
            prop_assert_eq!(decoder.finish(), Ok(()));
        }

        #[test]
        fn a_stream_cut_short_is_torn_unless_between_frames(frames in frames(), at: prop::sample::Index) {
            let bytes = encode(&frames);
            let at = at.index(bytes.len() + 1);
            let mut decoder = Decoder::default();
            let whole = feed(&mut decoder, &bytes[..at], 4096).unwrap();
            let sound = encode(&frames[..whole.len()]).len() == at;
            prop_assert_eq!(decoder.finish().is_ok(), sound);
        }

        #[test]
        fn garbage_never_panics_nor_allocates_what_it_claims(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            let _ = feed(&mut decoder, &bytes, 7);
        }
    }

    #[test]
    fn a_head_is_these_bytes_for_ever() {
        let frame = WireFrame::new(
            Flags::ORDERED,
            0x0102,
            0x0304,
            0x1122_3344_5566_7788,
            Bytes::from_static(b"h"),
            Bytes::from_static(b"pp"),
        );
        let expected = b"Wf\x04\x00\x02\x01\x04\x03\x88\x77\x66\x55\x44\x33\x22\x11\x01\0\0\0\x02\0\0\0hpp";
        assert_eq!(&encode(&[frame.unwrap()])[..], expected);
    }

    #[test]
    fn hostile_lengths_are_refused_before_allocation() {
        let mut head = [0; HEAD_SIZE];
        head[..2].copy_from_slice(b"Wf");
        head[16..20].copy_from_slice(&(MAX_HEADER + 1).to_le_bytes());
        let long = WireFrameError::HeaderTooLong { len: u64::from(MAX_HEADER) + 1 };
        assert_eq!(feed(&mut Decoder::default(), &head, 64), Err(long));
        head[16..20].copy_from_slice(&0u32.to_le_bytes());
        head[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        let long = WireFrameError::PayloadTooLong { len: u64::from(u32::MAX) };
        assert_eq!(feed(&mut Decoder::default(), &head, 64), Err(long));
        let over = Bytes::from(vec![0; MAX_PAYLOAD as usize + 1]);
        assert!(WireFrame::new(Flags::NONE, 1, 0, 1, Bytes::new(), over).is_err());
    }
}
