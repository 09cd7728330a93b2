//! Pack frames: several objects of one kind, compressed together, alone or as a delta against older versions.
//!
//! ```text
//! 0   magic "WHFR"            12  length of the payload, u32    28  object lengths, u32 each (not for pages)
//! 4   kind, u8                16  bases, u16                    ..  short digests of bases, 16 bytes each
//! 5   codec, u8               18  depth, u8                     ..  payload
//! 6   objects, u16            19  zero, u8
//! 8   raw length, u32         20  xxh3 of all other bytes, u64      integers little-endian
//! ```
//!
//! A delta is compressed with the concatenation of its bases as prefix (zstd `refPrefix`); its depth is one
//! more than that of its deepest base. Frames have no digests: they follow from the content, so an index can
//! always be rebuilt, and 32 bytes an object are saved. The checksum finds damage cheaply; readers check the
//! digests.

use crate::{
    ShortDigest,
    compression::{CompressionError, Settings, compress},
    delta,
};
use std::ops::Range;
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::Xxh3;
use zstd::zstd_safe::compress_bound;

/// Bytes of the fixed header.
pub const HEAD: usize = 28;
/// Most objects of a frame.
pub(crate) const MAX_OBJECTS: usize = 256;
/// Most raw bytes of a frame of pages or nodes, and of all bases of a delta.
pub const MAX_RAW: usize = MAX_OBJECTS * (PAGE_SIZE + 4096 + 64);
/// Most raw bytes of a blob; kernels and initial RAM disks are one blob each.
pub const MAX_BLOB: usize = 256 << 20;
const MAGIC: [u8; 4] = *b"WHFR";

/// Kind of the objects in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Pages of 4 KiB.
    Pages = 1,
    /// Nodes of image trees.
    Nodes = 2,
    /// Exactly one blob.
    Blob = 3,
    /// Exactly one capsule manifest.
    Manifest = 4,
}

impl Kind {
    /// Kind with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Pages, Self::Nodes, Self::Blob, Self::Manifest].into_iter().find(|kind| *kind as u8 == number)
    }

    /// Greatest depth of deltas on deltas. Reading one page undoes every step. Nodes are few, small and
    /// cached, and a node stored in full costs as much as its differences in eight versions.
    pub fn max_depth(self) -> u8 {
        match self {
            Self::Nodes => 8,
            _ => 2,
        }
    }

    fn limit(self) -> usize {
        match self {
            Self::Pages | Self::Nodes => MAX_RAW,
            Self::Blob => MAX_BLOB,
            Self::Manifest => crate::MAX_MANIFEST,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Codec {
    Stored = 0,
    Zstd = 1,
    Delta = 2,
}

/// Errors of encoding and decoding a pack frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackFrameError {
    /// The bytes end before the frame does.
    #[error("a pack frame has {found} bytes instead of {expected}")]
    Short {
        /// Length found, in bytes.
        found: usize,
        /// Bytes that the frame should have.
        expected: usize,
    },
    /// A header field has an impossible value.
    #[error("the pack frame header has an invalid {field}")]
    Head {
        /// Name of the field.
        field: &'static str,
    },
    /// The bytes changed after they were written.
    #[error("the pack frame checksum does not match")]
    Checksum,
    /// The payload does not decompress.
    #[error("the payload does not decompress: {reason}")]
    Payload {
        /// Error text of the codec.
        reason: &'static str,
    },
    /// The payload decompresses to another length.
    #[error("the payload decompresses to {found} bytes instead of {expected}")]
    Length {
        /// Bytes after decompression.
        found: usize,
        /// Bytes that the header calls for.
        expected: usize,
    },
    /// The objects exceed the limits of a frame.
    #[error("{objects} objects of {bytes} bytes do not fit into a pack frame")]
    TooLarge {
        /// Number of objects.
        objects: usize,
        /// Raw bytes of the objects.
        bytes: usize,
    },
}

/// Fixed header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackFrameHeader {
    /// Kind of the objects.
    pub kind: Kind,
    /// Number of objects.
    pub objects: usize,
    /// Raw bytes of the objects.
    pub raw: usize,
    /// Number of bases.
    pub bases: usize,
    /// Depth of a delta, otherwise 0.
    pub depth: u8,
    codec: Codec,
    payload: usize,
}

impl PackFrameHeader {
    /// Decodes the header at the start of `bytes` and checks each field; the checksum needs the complete
    /// frame.
    pub fn parse(bytes: &[u8]) -> Result<Self, PackFrameError> {
        let head = bytes.get(..HEAD).ok_or(PackFrameError::Short { found: bytes.len(), expected: HEAD })?;
        let impossible = |field| PackFrameError::Head { field };
        if head[..4] != MAGIC {
            return Err(impossible("magic"));
        }
        let kind = Kind::from_number(head[4]).ok_or(impossible("kind"))?;
        let codecs = [Codec::Stored, Codec::Zstd, Codec::Delta];
        let codec = *codecs.get(usize::from(head[5])).ok_or(impossible("codec"))?;
        let long =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let short = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
        let it = Self {
            kind,
            codec,
            objects: short(6),
            raw: long(8),
            payload: long(12),
            bases: short(16),
            depth: head[18],
        };
        it.check(head[19]).map(|()| it)
    }

    fn check(&self, spare: u8) -> Result<(), PackFrameError> {
        let one = matches!(self.kind, Kind::Blob | Kind::Manifest);
        let delta = self.codec == Codec::Delta;
        let rules = [
            ("object count", (1..=MAX_OBJECTS).contains(&self.objects) && (!one || self.objects == 1)),
            ("raw length", self.raw <= self.kind.limit()),
            ("page length", self.kind != Kind::Pages || self.raw == self.objects * PAGE_SIZE),
            ("payload length", self.payload <= compress_bound(self.raw)),
            ("stored length", self.codec != Codec::Stored || self.payload == self.raw),
            ("base count", self.bases <= MAX_OBJECTS && delta == (self.bases > 0)),
            ("depth", self.depth <= self.kind.max_depth() && delta == (self.depth > 0)),
            ("spare byte", spare == 0),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((field, _)) => Err(PackFrameError::Head { field }),
            None => Ok(()),
        }
    }

    fn tables(&self) -> usize {
        let lengths = if self.kind == Kind::Pages { 0 } else { self.objects * 4 };
        lengths + self.bases * ShortDigest::LEN
    }

    /// Bytes of the complete frame.
    pub fn total(&self) -> usize {
        HEAD + self.tables() + self.payload
    }
}

/// A frame whose checksum was checked.
#[derive(Debug)]
pub struct PackFrame<'a> {
    /// Fixed header of the frame.
    pub head: PackFrameHeader,
    bytes: &'a [u8],
}

impl<'a> PackFrame<'a> {
    /// Decodes the frame at the start of `bytes` and checks its checksum.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PackFrameError> {
        let head = PackFrameHeader::parse(bytes)?;
        let total = head.total();
        let bytes =
            bytes.get(..total).ok_or(PackFrameError::Short { found: bytes.len(), expected: total })?;
        if checksum(&bytes[..20], &[&bytes[HEAD..]]).to_le_bytes() != bytes[20..HEAD] {
            return Err(PackFrameError::Checksum);
        }
        let frame = Self { head, bytes };
        match frame.head.kind == Kind::Pages || frame.lengths().sum::<usize>() == head.raw {
            true => Ok(frame),
            false => Err(PackFrameError::Head { field: "object length" }),
        }
    }

    fn lengths(&self) -> impl Iterator<Item = usize> {
        let table = &self.bytes[HEAD..HEAD + self.head.tables() - self.head.bases * ShortDigest::LEN];
        table.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize)
    }

    /// Position of each object in the raw bytes.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        if self.head.kind == Kind::Pages {
            return (0..self.head.objects).map(|i| i * PAGE_SIZE..(i + 1) * PAGE_SIZE).collect();
        }
        let ends = self.lengths().scan(0, |end, len| {
            *end += len;
            Some(*end - len..*end)
        });
        ends.collect()
    }

    /// Short digests of the bases, whose concatenation [`PackFrame::decode`] needs.
    pub fn bases(&self) -> impl Iterator<Item = ShortDigest> {
        let end = HEAD + self.head.tables();
        self.bytes[end - self.head.bases * ShortDigest::LEN..end]
            .as_chunks()
            .0
            .iter()
            .map(|bytes| ShortDigest(*bytes))
    }

    /// The raw bytes of all objects, if they are in the frame as they are.
    pub fn stored(&self) -> Option<&'a [u8]> {
        (self.head.codec == Codec::Stored).then(|| &self.bytes[HEAD + self.head.tables()..])
    }

    /// Decompresses all objects; `base` is the concatenation of the bases, empty without any.
    pub fn decode(&self, base: &[u8]) -> Result<Vec<u8>, PackFrameError> {
        let mut raw = vec![0; self.head.raw];
        self.decode_into(base, &mut raw)?;
        Ok(raw)
    }

    /// Decompresses all objects into `raw`, whose length is that in the header.
    pub fn decode_into(&self, base: &[u8], raw: &mut [u8]) -> Result<(), PackFrameError> {
        assert_eq!(raw.len(), self.head.raw, "a buffer of the length in the head");
        let payload = &self.bytes[HEAD + self.head.tables()..];
        match self.head.codec {
            Codec::Delta => delta::decode(payload, base, raw),
            Codec::Zstd => delta::decode(payload, &[], raw),
            Codec::Stored => {
                raw.copy_from_slice(payload);
                Ok(())
            }
        }
    }
}

impl From<CompressionError> for PackFrameError {
    fn from(CompressionError { reason }: CompressionError) -> Self {
        Self::Payload { reason }
    }
}

/// The checksum of a frame: of its fixed header up to the checksum, and of the parts behind it.
fn checksum(header: &[u8], parts: &[&[u8]]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(header);
    parts.iter().for_each(|part| hash.update(part));
    hash.digest()
}

/// Older versions that a delta is encoded against.
#[derive(Debug, Clone, Copy)]
pub struct Bases<'a> {
    /// Short digests of the bases, in the order of `raw`.
    pub keys: &'a [ShortDigest],
    /// Concatenation of the bases.
    pub raw: &'a [u8],
    /// Depth of the deepest base.
    pub depth: u8,
}

/// Encodes frames at one level.
#[derive(Debug)]
pub struct Encoder {
    level: i32,
}

impl Encoder {
    /// Creates an encoder of zstd `level` (negative levels are faster).
    pub fn new(level: i32) -> Self {
        Self { level }
    }

    /// Encodes objects, passed as their concatenation and lengths, as a frame without bases. They are stored
    /// uncompressed if compression does not help.
    pub fn encode(&mut self, kind: Kind, raw: &[u8], lengths: &[usize]) -> Result<Vec<u8>, PackFrameError> {
        let head = new_head(kind, raw, lengths)?;
        let payload = compress(raw, &[], Settings::level(self.level), Vec::new())?;
        Ok(match payload.len() + payload.len() / 32 < raw.len() {
            true => finish(PackFrameHeader { codec: Codec::Zstd, ..head }, lengths, &[], &payload),
            false => finish(head, lengths, &[], raw),
        })
    }

    /// Appends the start of a frame of objects without bases to `out`; `raw` as it is must follow: for what
    /// does not compress.
    pub fn store_head(
        kind: Kind,
        raw: &[u8],
        lengths: &[usize],
        out: &mut Vec<u8>,
    ) -> Result<(), PackFrameError> {
        append_head(new_head(kind, raw, lengths)?, lengths, &[], raw, out);
        Ok(())
    }

    /// Encodes objects as a delta against `bases`, at zstd `level`.
    pub fn encode_delta(
        kind: Kind,
        raw: &[u8],
        lengths: &[usize],
        bases: Bases<'_>,
        level: i32,
    ) -> Result<Vec<u8>, PackFrameError> {
        let head = new_head(kind, raw, lengths)?;
        let too_large = PackFrameError::TooLarge { objects: bases.keys.len(), bytes: bases.raw.len() };
        if !(1..=MAX_OBJECTS).contains(&bases.keys.len())
            || bases.raw.len() > MAX_RAW
            || bases.depth >= kind.max_depth()
        {
            return Err(too_large);
        }
        let payload = delta::encode(raw, bases.raw, level)?;
        let head =
            PackFrameHeader { codec: Codec::Delta, bases: bases.keys.len(), depth: bases.depth + 1, ..head };
        Ok(finish(head, lengths, bases.keys, &payload))
    }
}

fn new_head(kind: Kind, raw: &[u8], lengths: &[usize]) -> Result<PackFrameHeader, PackFrameError> {
    let head = PackFrameHeader {
        kind,
        codec: Codec::Stored,
        objects: lengths.len(),
        raw: raw.len(),
        payload: raw.len(),
        bases: 0,
        depth: 0,
    };
    match head.check(0).is_ok() && lengths.iter().sum::<usize>() == raw.len() {
        true => Ok(head),
        false => Err(PackFrameError::TooLarge { objects: lengths.len(), bytes: raw.len() }),
    }
}

fn finish(head: PackFrameHeader, lengths: &[usize], bases: &[ShortDigest], payload: &[u8]) -> Vec<u8> {
    let head = PackFrameHeader { payload: payload.len(), ..head };
    let mut bytes = Vec::with_capacity(head.total());
    append_head(head, lengths, bases, payload, &mut bytes);
    bytes.extend(payload);
    bytes
}

/// Appends a frame up to its payload to `out`; `head` has the length of the payload.
fn append_head(
    head: PackFrameHeader,
    lengths: &[usize],
    bases: &[ShortDigest],
    payload: &[u8],
    out: &mut Vec<u8>,
) {
    let start = out.len();
    out.extend(MAGIC);
    out.extend([head.kind as u8, head.codec as u8]);
    out.extend((head.objects as u16).to_le_bytes());
    out.extend((head.raw as u32).to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend((bases.len() as u16).to_le_bytes());
    out.extend([head.depth, 0]);
    out.extend([0; 8]);
    if head.kind != Kind::Pages {
        lengths.iter().for_each(|len| out.extend((*len as u32).to_le_bytes()));
    }
    bases.iter().for_each(|key| out.extend(key.0));
    let sum = checksum(&out[start..start + 20], &[&out[start + HEAD..], payload]);
    out[start + 20..start + HEAD].copy_from_slice(&sum.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_core::Digest;

    #[test]
    fn the_head_of_a_frame_is_pinned() {
        let bytes = Encoder::new(1).encode(Kind::Blob, b"abc", &[3]).unwrap();
        let head = [b'W', b'H', b'F', b'R', 3, 0, 1, 0, 3, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(bytes[..20], head);
        assert_eq!(bytes[HEAD..], [3, 0, 0, 0, b'a', b'b', b'c']);
    }

    #[test]
    fn objects_that_are_stored_as_they_are_have_the_frame_that_compression_gives_when_it_does_not_help() {
        let noise = (0..157_u32).flat_map(|number| Digest::of(&number.to_le_bytes()).0);
        let raw: Vec<u8> = noise.take(5000).collect();
        let mut out = b"before".to_vec();
        Encoder::store_head(Kind::Nodes, &raw, &[2000, 3000], &mut out).unwrap();
        out.extend(&raw);
        assert_eq!(out[6..], Encoder::new(1).encode(Kind::Nodes, &raw, &[2000, 3000]).unwrap());
        assert_eq!(PackFrame::parse(&out[6..]).unwrap().stored(), Some(&raw[..]));
        let zeros = Encoder::new(1).encode(Kind::Blob, &[0; 5000], &[5000]).unwrap();
        assert_eq!(PackFrame::parse(&zeros).unwrap().stored(), None);
        assert!(Encoder::store_head(Kind::Blob, &raw, &[1], &mut out).is_err());
    }

    #[test]
    fn a_delta_needs_its_bases_and_is_small() {
        let old: Vec<u8> =
            (0..PAGE_SIZE * 4).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let mut new = old.clone();
        new[5000] ^= 1;
        let keys = [ShortDigest([1; 16]), ShortDigest([2; 16]), ShortDigest([3; 16]), ShortDigest([4; 16])];
        let bases = Bases { keys: &keys, raw: &old, depth: 1 };
        let bytes = Encoder::encode_delta(Kind::Pages, &new, &[PAGE_SIZE; 4], bases, 3).unwrap();
        assert!(bytes.len() < 2000, "{}", bytes.len());
        let frame = PackFrame::parse(&bytes).unwrap();
        assert_eq!((frame.head.depth, frame.bases().collect::<Vec<_>>()), (2, keys.to_vec()));
        assert_eq!(frame.decode(&old).unwrap(), new);
        assert!(frame.decode(&[]).map_or(true, |raw| raw != new));
        assert!(
            Encoder::encode_delta(Kind::Pages, &new, &[PAGE_SIZE; 4], Bases { depth: 3, ..bases }, 3)
                .is_err()
        );
    }

    proptest! {
        #[test]
        fn frames_round_trip(lengths in prop::collection::vec(0..3000usize, 1..40), seed in any::<u8>()) {
            let raw: Vec<u8> = (0..lengths.iter().sum()).map(|i: usize| (i / 7) as u8 ^ seed).collect();
            let bytes = Encoder::new(1).encode(Kind::Nodes, &raw, &lengths).unwrap();
            let frame = PackFrame::parse(&bytes).unwrap();
            prop_assert_eq!(frame.head.total(), bytes.len());
            prop_assert_eq!(frame.ranges().iter().map(|r| r.len()).collect::<Vec<_>>(), lengths);
            prop_assert_eq!(frame.decode(&[]).unwrap(), raw);
        }

        #[test]
        fn every_flipped_bit_is_found(at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = Encoder::new(1).encode(Kind::Pages, &[7; PAGE_SIZE * 2], &[PAGE_SIZE; 2]).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(PackFrame::parse(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_refused_or_bounded(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if bytes.len() >= HEAD {
                bytes[..6].copy_from_slice(b"WHFR\x03\x01");
                bytes[7] = 0;
                bytes[11] = 0;
                bytes[16..20].fill(0);
                let sum = checksum(&bytes[..20], &[&bytes[HEAD..]]).to_le_bytes();
                bytes[20..HEAD].copy_from_slice(&sum);
            }
            if let Ok(frame) = PackFrame::parse(&bytes) { let _ = frame.decode(&[]); }
        }
    }
}
