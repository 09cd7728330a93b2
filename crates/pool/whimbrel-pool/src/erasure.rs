//! Erasure coding of chunks: k pieces of data and m of parity, any k of which give the chunk back. Pure.
//!
//! The frame of a chunk, as benefactors store it, is cut into k parts of equal length, and m more are
//! computed (Reed-Solomon). Each part gets a head and is a *piece*, which is stored like a chunk, under the
//! digest of its bytes. The head makes equal parts of two chunks different, and tells what a piece belongs
//! to. What comes back is the frame, whose content is compared with the digest of the chunk as after any
//! read; so pieces of encrypted chunks stay encrypted. The bytes are in `docs/formats/pool.md`.

use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_core::Digest;

use crate::{policy::PolicyError, protocol::MAX_CHUNK};

/// Bytes of a piece before its part of the frame.
const HEAD: usize = 48;
const MAGIC: [u8; 4] = *b"WHEP";
const FORMAT: u8 = 1;
/// Longest frame that is coded.
const MAX_FRAME: usize = MAX_CHUNK + (64 << 10);
/// Shortest frame that is coded; below, pieces cost more than they save.
pub(crate) const MIN_FRAME: u64 = 16 << 10;

/// How many pieces a chunk is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceCounts {
    /// Pieces of data; as many are needed to read.
    pub data: u8,
    /// Pieces of parity; as many may be lost.
    pub parity: u8,
}

/// Rule of a folder or file: what is older than a set age is kept in pieces in place of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coding {
    /// Number of pieces.
    pub pieces: PieceCounts,
    /// Age in seconds from which versions are kept in pieces.
    pub after: u64,
}

impl Coding {
    /// When a version that was committed at `created` is old enough, in milliseconds.
    pub(crate) fn due(&self, created: i64) -> i64 {
        created.saturating_add_unsigned(self.after.saturating_mul(1000))
    }
}

/// Error for a text that is not `DATA+PARITY`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not DATA+PARITY, like 4+2 or 8+3")]
pub struct PieceCountsError {
    /// The rejected text.
    pub text: String,
}

impl fmt::Display for PieceCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for PieceCounts {
    type Err = PieceCountsError;

    fn from_str(text: &str) -> Result<Self, PieceCountsError> {
        let bad = || PieceCountsError { text: text.chars().take(40).collect() };
        let (data, parity) = text.split_once('+').ok_or_else(bad)?;
        let counts =
            Self { data: data.parse().map_err(|_| bad())?, parity: parity.parse().map_err(|_| bad())? };
        counts.check().map(|()| counts).map_err(|_| bad())
    }
}

impl PieceCounts {
    /// Refuses counts outside their limits.
    pub fn check(self) -> Result<(), PolicyError> {
        let bad = |field, limits, found: u8| Err(PolicyError { field, limits, found: found.to_string() });
        if !(2..=16).contains(&self.data) {
            return bad("the number of pieces of data", "2 to 16", self.data);
        }
        if !(1..=8).contains(&self.parity) {
            return bad("the number of pieces of parity", "1 to 8", self.parity);
        }
        Ok(())
    }

    /// Pieces of a chunk.
    pub(crate) fn all(self) -> usize {
        usize::from(self.data) + usize::from(self.parity)
    }

    /// Number in the database; positive.
    pub(crate) fn code(self) -> i64 {
        i64::from(self.data) << 8 | i64::from(self.parity)
    }

    /// Counts of such a number.
    pub(crate) fn of_code(code: i64) -> Option<Self> {
        let counts = Self { data: u8::try_from(code >> 8).ok()?, parity: (code & 0xff) as u8 };
        counts.check().ok().map(|()| counts)
    }
}

/// Failure to make pieces, or to put a chunk together.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CodingError {
    /// The frame of the chunk is too long or empty.
    #[error("a frame of {length} bytes cannot be coded")]
    Length {
        /// Length of the frame.
        length: usize,
    },
    /// A piece has no head, or belongs to another chunk.
    #[error("a piece does not belong to the chunk")]
    Foreign,
    /// There are fewer different pieces than the chunk has of data.
    #[error("{found} pieces are too few")]
    TooFew {
        /// Number of different pieces.
        found: usize,
    },
    /// The code failed.
    #[error("the code failed")]
    Code {
        /// Cause reported by the library.
        #[from]
        source: reed_solomon_simd::Error,
    },
}

/// Head of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    counts: PieceCounts,
    number: u8,
    /// Length of the frame.
    length: u32,
    digest: Digest,
}

impl Head {
    fn bytes(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        out[..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&[FORMAT, self.counts.data, self.counts.parity, self.number]);
        out[8..12].copy_from_slice(&self.length.to_le_bytes());
        out[12..44].copy_from_slice(&self.digest.0);
        out
    }

    fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, part) = bytes.split_first_chunk::<HEAD>()?;
        let counts = PieceCounts { data: head[5], parity: head[6] };
        let length = u32::from_le_bytes(head[8..12].try_into().ok()?);
        let found = Self { counts, number: head[7], length, digest: Digest(head[12..44].try_into().ok()?) };
        let right = found.bytes() == *head
            && counts.check().is_ok()
            && usize::from(found.number) < counts.all()
            && part.len() == part_length(counts, length as usize);
        right.then_some((found, part))
    }
}

/// Bytes of a part, which the library wants even.
fn part_length(counts: PieceCounts, frame: usize) -> usize {
    frame.div_ceil(usize::from(counts.data)).next_multiple_of(2)
}

fn piece(head: Head, part: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + part.len());
    out.extend(head.bytes());
    out.extend_from_slice(part);
    out.resize(HEAD + part_length(head.counts, head.length as usize), 0);
    out
}

/// The pieces of the chunk `digest` with this frame, first those of data.
pub fn encode(digest: &Digest, frame: &[u8], counts: PieceCounts) -> Result<Vec<Vec<u8>>, CodingError> {
    if frame.is_empty() || frame.len() > MAX_FRAME {
        return Err(CodingError::Length { length: frame.len() });
    }
    let part = part_length(counts, frame.len());
    let head = |number| Head { counts, number, length: frame.len() as u32, digest: *digest };
    let begin = |number: u8| (usize::from(number) * part).min(frame.len());
    let data = |number: u8| piece(head(number), &frame[begin(number)..begin(number + 1)]);
    let mut pieces: Vec<Vec<u8>> = (0..counts.data).map(data).collect();
    let mut encoder = ReedSolomonEncoder::new(counts.data.into(), counts.parity.into(), part)?;
    pieces.iter().try_for_each(|piece| encoder.add_original_shard(&piece[HEAD..]))?;
    let coded = encoder.encode()?;
    for (number, part) in (counts.data..).zip(coded.recovery_iter()) {
        pieces.push(piece(head(number), part));
    }
    Ok(pieces)
}

/// The frame of the chunk `digest` from any pieces of it, as many as it has of data. More are not looked at.
pub fn decode<T: AsRef<[u8]>>(digest: &Digest, pieces: &[T]) -> Result<Vec<u8>, CodingError> {
    let mut parts: Vec<(Head, &[u8])> = Vec::new();
    for piece in pieces {
        let (head, part) = Head::parse(piece.as_ref()).ok_or(CodingError::Foreign)?;
        let known = parts.first().map_or(head, |(first, _)| *first);
        if head.digest != *digest || head.length != known.length || head.counts != known.counts {
            return Err(CodingError::Foreign);
        }
        if parts.len() < usize::from(head.counts.data) && parts.iter().all(|(at, _)| at.number != head.number)
        {
            parts.push((head, part));
        }
    }
    let first = parts.first().map(|(head, _)| *head).ok_or(CodingError::TooFew { found: 0 })?;
    let Head { counts, length, .. } = first;
    if parts.len() < usize::from(counts.data) {
        return Err(CodingError::TooFew { found: parts.len() });
    }
    let size = part_length(counts, length as usize);
    let mut frame = vec![0; size * usize::from(counts.data)];
    let is_data = |head: &Head| head.number < counts.data;
    for (head, part) in parts.iter().filter(|(head, _)| is_data(head)) {
        let at = usize::from(head.number) * size;
        frame[at..at + size].copy_from_slice(part);
    }
    if !parts.iter().all(|(head, _)| is_data(head)) {
        let mut decoder = ReedSolomonDecoder::new(counts.data.into(), counts.parity.into(), size)?;
        for (head, part) in &parts {
            match is_data(head) {
                true => decoder.add_original_shard(head.number.into(), part)?,
                false => decoder.add_recovery_shard(usize::from(head.number - counts.data), part)?,
            }
        }
        for (number, part) in decoder.decode()?.restored_original_iter() {
            frame[number * size..(number + 1) * size].copy_from_slice(part);
        }
    }
    frame.truncate(length as usize);
    Ok(frame)
}

/// A lost piece of the chunk `digest`, from as many others as the chunk has of data.
pub(crate) fn rebuild<T: AsRef<[u8]>>(
    digest: &Digest,
    counts: PieceCounts,
    pieces: &[T],
    number: u8,
) -> Result<Vec<u8>, CodingError> {
    let frame = decode(digest, pieces)?;
    let mut all = encode(digest, &frame, counts)?;
    if usize::from(number) >= all.len() {
        Err(CodingError::Foreign)
    } else {
        Ok(all.swap_remove(number.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COUNTS: [PieceCounts; 3] = [
        PieceCounts { data: 4, parity: 2 },
        PieceCounts { data: 8, parity: 3 },
        PieceCounts { data: 2, parity: 1 },
    ];

    proptest! {
        #[test]
        fn any_so_many_pieces_give_the_chunk_back_and_each_lost_one(
            frame in prop::collection::vec(any::<u8>(), 1..5000), counts in prop::sample::select(&COUNTS[..]),
            order in any::<u64>(),
        ) {
            let digest = Digest::of(&frame);
            let pieces = encode(&digest, &frame, counts).unwrap();
            prop_assert_eq!(pieces.len(), counts.all());
            let mut kept: Vec<usize> = (0..pieces.len()).collect();
            kept.sort_by_key(|at| Digest::of(&[order, *at as u64].map(u64::to_le_bytes).concat()));
            let lost = kept.split_off(counts.data.into());
            let kept: Vec<&Vec<u8>> = kept.into_iter().map(|at| &pieces[at]).collect();
            prop_assert!(decode(&digest, &kept).unwrap() == frame);
            for number in lost {
                prop_assert!(rebuild(&digest, counts, &kept, number as u8).unwrap() == pieces[number]);
            }
            let few = decode(&digest, &kept[1..]);
            prop_assert_eq!(few, Err(CodingError::TooFew { found: kept.len() - 1 }));
            let twice: Vec<&Vec<u8>> = kept[1..].iter().chain(&kept[1..]).copied().collect();
            prop_assert!(decode(&digest, &twice).is_err(), "a piece counts once");
        }

        #[test]
        fn any_bytes_are_a_piece_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(decode(&Digest([0; 32]), &[bytes]), Err(CodingError::Foreign));
        }
    }

    #[test]
    fn the_bytes_of_pieces_never_change() {
        let frame: Vec<u8> = (0..10_000_u32).map(|n| ((n * 7) >> 3) as u8).collect();
        let pieces = encode(&Digest::of(&frame), &frame, COUNTS[0]).unwrap();
        assert_eq!(Digest::of(&pieces.concat()).short(), "c6595b13dd74");
        assert_eq!(pieces[0].len(), HEAD + 2500);
    }

    #[test]
    fn a_piece_of_another_chunk_is_refused_and_so_are_absurd_counts() {
        let (one, two) = (vec![1; 1000], vec![2; 1000]);
        let mut pieces = encode(&Digest::of(&one), &one, COUNTS[0]).unwrap();
        pieces[2] = encode(&Digest::of(&two), &two, COUNTS[0]).unwrap().swap_remove(2);
        assert_eq!(decode(&Digest::of(&one), &pieces[..4]), Err(CodingError::Foreign));
        for bad in ["", "4", "4+", "1+1", "17+2", "4+0", "4+9", "-4+2"] {
            assert!(bad.parse::<PieceCounts>().is_err(), "{bad}");
        }
        let counts: PieceCounts = "8+3".parse().unwrap();
        assert_eq!(
            (counts.to_string(), PieceCounts::of_code(counts.code())),
            ("8+3".to_owned(), Some(counts))
        );
        assert_eq!([0, -1, i64::MAX].map(PieceCounts::of_code), [None; 3]);
    }
}
