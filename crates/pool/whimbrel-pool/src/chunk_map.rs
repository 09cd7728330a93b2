//! The chunk map of a version: a compact list of its chunks in order, with number and length.
//!
//! A chunk is two varints. The first is the zigzag code of its number minus the previous number plus one.
//! The second is twice its length, plus one if the chunk is encrypted. Chunks that were written together
//! have consecutive numbers, so most take one byte, and three or four for the length. A map of a client
//! with a secret ends with a seal, by which holders of the secret tell that nobody else changed it. See
//! `docs/formats/pool.md`.

use crate::protocol::{ChunkId, MAX_CHUNK};
use whimbrel_core::{
    Digest,
    varint::{self, VarintError},
};

/// Most chunks of one file. The maps of most files reach [`MAX_MAP`] long before.
pub(crate) const MAX_CHUNKS: usize = 1 << 24;
/// Longest map in bytes, because a commit sends it in one message: half a terabyte in chunks of the default
/// size, 11 GiB in single pages.
pub(crate) const MAX_MAP: u64 = whimbrel_wire::MAX_PAYLOAD as u64;
/// Longest seal of a map in bytes.
pub(crate) const MAX_SEAL: usize = 512;

/// A chunk in a chunk map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRef {
    /// Number of the chunk.
    pub chunk: ChunkId,
    /// Length in bytes.
    pub length: u32,
    /// Whether the chunk is encrypted, so that only holders of the secret can read it.
    pub encrypted: bool,
    /// Digest of the stored chunk, if this client wrote it or found it in a map with a right seal. Not a part
    /// of the encoded map.
    pub digest: Option<Digest>,
}

/// Error for bytes that are not a chunk map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChunkMapError {
    /// The map ends inside a chunk.
    #[error("the map ends inside a chunk")]
    Short,
    /// A value outside its limits.
    #[error("the map has an invalid {0}")]
    Value(&'static str),
}

fn number(bytes: &mut &[u8]) -> Result<u64, ChunkMapError> {
    varint::take(bytes).map_err(|error| match error {
        VarintError::Short => ChunkMapError::Short,
        VarintError::Malformed => ChunkMapError::Value("number"),
    })
}

/// Encodes a chunk map.
pub fn encode(pieces: &[ChunkRef]) -> Vec<u8> {
    let mut out = Vec::with_capacity(pieces.len() * 4);
    let mut expected = 1_u64;
    for piece in pieces {
        let step = piece.chunk.wrapping_sub(expected) as i64;
        varint::put(&mut out, ((step << 1) ^ (step >> 63)) as u64);
        varint::put(&mut out, u64::from(piece.length) << 1 | u64::from(piece.encrypted));
        expected = piece.chunk.wrapping_add(1);
    }
    out
}

/// Encodes a chunk map that ends with a seal, unless that is empty. A seal is opaque here and for the
/// manager.
pub fn encode_sealed(pieces: &[ChunkRef], seal: &[u8]) -> Vec<u8> {
    let mut out = encode(pieces);
    if !seal.is_empty() {
        // A chunk without bytes, which no map has otherwise.
        out.extend([0, 0]);
        out.extend_from_slice(seal);
    }
    out
}

/// Bytes that a chunk of this length takes in a map at least: its number may take more than one.
pub(crate) fn least_bytes(length: u32) -> u64 {
    let coded = u64::from(length) << 1 | 1;
    1 + u64::from((u64::BITS - coded.leading_zeros()).div_ceil(7))
}

/// Decodes a chunk map, without its seal.
pub fn decode(bytes: &[u8]) -> Result<Vec<ChunkRef>, ChunkMapError> {
    Ok(decode_sealed(bytes)?.0)
}

/// Decodes a chunk map and returns its seal, which is empty if there is none.
pub fn decode_sealed(mut bytes: &[u8]) -> Result<(Vec<ChunkRef>, &[u8]), ChunkMapError> {
    let mut out = Vec::new();
    let mut expected = 1_u64;
    while !bytes.is_empty() {
        if out.len() >= MAX_CHUNKS {
            return Err(ChunkMapError::Value("number of chunks"));
        }
        let zigzag = number(&mut bytes)?;
        let step = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        let chunk = expected.wrapping_add(step as u64);
        let coded = number(&mut bytes)?;
        let (length, sealed) = (coded >> 1, coded & 1 == 1);
        if (zigzag, coded) == (0, 0) && (1..=MAX_SEAL).contains(&bytes.len()) {
            return Ok((out, bytes));
        }
        if !(1..=MAX_CHUNK as u64).contains(&length) {
            return Err(ChunkMapError::Value("length of a chunk"));
        }
        if chunk == 0 || chunk > i64::MAX as u64 {
            return Err(ChunkMapError::Value("chunk number"));
        }
        out.push(ChunkRef { chunk, length: length as u32, encrypted: sealed, digest: None });
        expected = chunk.wrapping_add(1);
    }
    Ok((out, &[]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece() -> impl Strategy<Value = ChunkRef> {
        let one = (1..=i64::MAX as u64, 1..=MAX_CHUNK as u32, any::<bool>());
        one.prop_map(|(chunk, length, sealed)| ChunkRef { chunk, length, encrypted: sealed, digest: None })
    }

    proptest! {
        #[test]
        fn a_map_comes_back(pieces in prop::collection::vec(piece(), 0..200)) {
            let map = encode(&pieces);
            let least = pieces.iter().map(|piece| least_bytes(piece.length)).sum::<u64>();
            prop_assert!(least <= map.len() as u64 && map.len() as u64 <= least + 9 * pieces.len() as u64);
            prop_assert_eq!(decode(&map).unwrap(), pieces);
        }

        #[test]
        fn a_seal_comes_back_with_its_map(
            pieces in prop::collection::vec(piece(), 0..50), seal in prop::collection::vec(any::<u8>(), 0..=MAX_SEAL),
        ) {
            let map = encode_sealed(&pieces, &seal);
            prop_assert_eq!(decode_sealed(&map).unwrap(), (pieces, &seal[..]));
            let longer = [&map[..], &[0; MAX_SEAL + 3]].concat();
            prop_assert!(decode(&longer).is_err());
        }

        #[test]
        fn any_bytes_are_a_map_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(pieces) = decode(&bytes) {
                prop_assert!(pieces.iter().all(|piece| piece.chunk > 0 && piece.length > 0));
            }
        }
    }

    #[test]
    fn chunks_written_together_take_four_bytes() {
        let piece =
            |n: u64| ChunkRef { chunk: 70_000 + n, length: (1 << 20) - 1, encrypted: true, digest: None };
        let pieces: Vec<ChunkRef> = (0..1000).map(piece).collect();
        assert!(encode(&pieces).len() <= 1000 * 4 + 4, "{}", encode(&pieces).len());
    }
}
