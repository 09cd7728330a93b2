//! Chunk lists as payload, with items of fixed or variable size. A list's length is checked before its use.

use super::{BenefactorId, MAX_CHUNK, MAX_COPIES, MAX_LIST};
use bytes::{BufMut, Bytes, BytesMut};
use whimbrel_core::Digest;

/// The next higher digest; none after the highest.
pub(crate) fn next_digest(digest: Digest) -> Option<Digest> {
    let mut bytes = digest.0;
    for byte in bytes.iter_mut().rev() {
        *byte = byte.wrapping_add(1);
        if *byte != 0 {
            return Some(Digest(bytes));
        }
    }
    None
}

/// Encodes a list of digests.
pub fn put_digests<'a>(digests: impl IntoIterator<Item = &'a Digest>) -> Bytes {
    let mut out = BytesMut::new();
    digests.into_iter().for_each(|digest| out.put_slice(&digest.0));
    out.freeze()
}

/// Splits a payload into items of `N` bytes; none if there are more than [`MAX_LIST`].
fn fixed_items<const N: usize>(payload: &[u8]) -> Option<Vec<[u8; N]>> {
    let (pieces, rest) = payload.as_chunks::<N>();
    (rest.is_empty() && pieces.len() <= MAX_LIST).then(|| pieces.to_vec())
}

/// Decodes the list of [`put_digests`].
pub fn get_digests(payload: &[u8]) -> Option<Vec<Digest>> {
    Some(fixed_items::<32>(payload)?.into_iter().map(Digest).collect())
}

/// Encodes numbers of eight bytes each.
pub fn put_numbers(numbers: impl IntoIterator<Item = u64>) -> Bytes {
    let mut out = BytesMut::new();
    numbers.into_iter().for_each(|number| out.put_u64_le(number));
    out.freeze()
}

/// Decodes the list of [`put_numbers`].
pub fn get_numbers(payload: &[u8]) -> Option<Vec<u64>> {
    Some(fixed_items::<8>(payload)?.into_iter().map(u64::from_le_bytes).collect())
}

/// Encodes one bit for each item.
pub fn put_bits(bits: &[bool]) -> Bytes {
    let mut out = vec![0_u8; bits.len().div_ceil(8)];
    bits.iter().enumerate().filter(|(_, bit)| **bit).for_each(|(at, _)| out[at / 8] |= 1 << (at % 8));
    out.into()
}

/// Decodes the first `count` bits of [`put_bits`]; missing bits are false.
pub fn get_bits(payload: &[u8], count: usize) -> Vec<bool> {
    (0..count).map(|at| payload.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)).collect()
}

/// Encodes digests with the seconds since each was last put.
pub fn put_aged(chunks: &[(Digest, u32)]) -> Bytes {
    let mut out = BytesMut::with_capacity(chunks.len() * 36);
    for (digest, age) in chunks {
        out.put_slice(&digest.0);
        out.put_u32_le(*age);
    }
    out.freeze()
}

/// Decodes the list of [`put_aged`].
pub fn get_aged(payload: &[u8]) -> Option<Vec<(Digest, u32)>> {
    let split = |piece: [u8; 36]| {
        let (digest, age) = piece.split_first_chunk::<32>()?;
        Some((Digest(*digest), u32::from_le_bytes(age.try_into().ok()?)))
    };
    fixed_items::<36>(payload)?.into_iter().map(split).collect()
}

/// A chunk that a client has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenChunk {
    /// Digest of the chunk.
    pub digest: Digest,
    /// Length in raw bytes.
    pub length: u32,
    /// Length in bytes as stored.
    pub stored: u32,
    /// Benefactors that have the chunk, at most eight.
    pub places: Vec<BenefactorId>,
}

/// Encodes a list of written chunks.
pub fn put_written(chunks: &[WrittenChunk]) -> Bytes {
    let mut out = BytesMut::new();
    for chunk in chunks {
        out.put_slice(&chunk.digest.0);
        out.put_u32_le(chunk.length);
        out.put_u32_le(chunk.stored);
        put_places(&mut out, &chunk.places);
    }
    out.freeze()
}

fn put_places(out: &mut BytesMut, places: &[BenefactorId]) {
    let places = &places[..places.len().min(MAX_COPIES)];
    out.put_u8(places.len() as u8);
    places.iter().for_each(|place| out.put_u16_le(*place));
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn places(&mut self) -> Option<Vec<BenefactorId>> {
        let [count] = self.array::<1>()?;
        if usize::from(count) > MAX_COPIES {
            return None;
        }
        (0..count).map(|_| Some(u16::from_le_bytes(self.array()?))).collect()
    }
}

fn read_all<T>(payload: &[u8], mut one: impl FnMut(&mut Cursor<'_>) -> Option<T>) -> Option<Vec<T>> {
    let mut cursor = Cursor(payload);
    let mut out = Vec::new();
    while !cursor.0.is_empty() {
        if out.len() >= MAX_LIST {
            return None;
        }
        out.push(one(&mut cursor)?);
    }
    Some(out)
}

/// Decodes the list of [`put_written`].
pub fn get_written(payload: &[u8]) -> Option<Vec<WrittenChunk>> {
    read_all(payload, |cursor| {
        let digest = Digest(cursor.array()?);
        let length = u32::from_le_bytes(cursor.array()?);
        let stored = u32::from_le_bytes(cursor.array()?);
        let places = cursor.places()?;
        (length > 0 && length as usize <= MAX_CHUNK).then_some(WrittenChunk {
            digest,
            length,
            stored,
            places,
        })
    })
}

/// A chunk and the benefactors that have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedChunk {
    /// Digest of the chunk.
    pub digest: Digest,
    /// Benefactors that have the chunk.
    pub places: Vec<BenefactorId>,
}

/// Encodes the places of chunks. An unknown chunk has a digest of zeros and no place.
pub fn put_located(chunks: &[LocatedChunk]) -> Bytes {
    let mut out = BytesMut::new();
    for chunk in chunks {
        out.put_slice(&chunk.digest.0);
        put_places(&mut out, &chunk.places);
    }
    out.freeze()
}

/// Decodes the list of [`put_located`].
pub fn get_located(payload: &[u8]) -> Option<Vec<LocatedChunk>> {
    read_all(payload, |cursor| {
        let digest = Digest(cursor.array()?);
        Some(LocatedChunk { digest, places: cursor.places()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_back_and_torn_ones_are_refused() {
        let digests = [Digest::of(b"a"), Digest::of(b"b")];
        assert_eq!(get_digests(&put_digests(&digests)).unwrap(), digests);
        assert!(get_digests(&put_digests(&digests)[1..]).is_none());
        assert_eq!(get_numbers(&put_numbers([1, 1 << 40])).unwrap(), [1, 1 << 40]);
        let aged = [(digests[0], 7), (digests[1], u32::MAX)];
        assert_eq!(get_aged(&put_aged(&aged)).unwrap(), aged);
        let written = [WrittenChunk { digest: digests[0], length: 9, stored: 7, places: vec![1, 300] }];
        let payload = put_written(&written);
        assert_eq!(get_written(&payload).unwrap(), written);
        assert!((1..payload.len()).all(|end| get_written(&payload[..end]).is_none()));
        let located = [LocatedChunk { digest: digests[1], places: vec![] }];
        assert_eq!(get_located(&put_located(&located)).unwrap(), located);
    }

    #[test]
    fn a_chunk_without_length_or_with_too_much_of_it_is_refused() {
        for length in [0, MAX_CHUNK as u32 + 1] {
            let chunk = WrittenChunk { digest: Digest::of(b""), length, stored: 1, places: vec![] };
            assert!(get_written(&put_written(&[chunk])).is_none(), "{length}");
        }
    }

    #[test]
    fn bits_come_back() {
        let bits: Vec<bool> = (0..29).map(|n| n % 3 == 0).collect();
        assert_eq!(get_bits(&put_bits(&bits), 29), bits);
        assert_eq!(get_bits(&[], 3), [false; 3]);
    }
}
