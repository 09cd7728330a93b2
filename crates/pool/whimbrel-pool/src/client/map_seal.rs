//! The seal of a chunk map: a tag under the secret over the name of the file and all its chunks in order.
//!
//! The manager has the chunk maps, so it could exchange, drop or reorder chunks, or give a file those of
//! another one or of another version. A client with a secret therefore seals each map that it commits, and
//! accepts a sealed map only as a whole. Chunks that it writes cannot be decrypted without a seal of the
//! map, so a seal cannot be removed either. What a seal cannot tell is whether a file, as it is shown, is
//! the newest.

use super::{Pool, PoolError, Result, Secret};
use crate::{
    chunk_map::ChunkRef,
    protocol::{ChunkId, Locate, MAX_NAME, get_located, put_numbers},
};
use whimbrel_core::Digest;

/// Version of the format: the first.
const FORMAT: u8 = 1;
/// Bytes before the name: format, time, tag.
const HEAD: usize = 1 + 8 + 32;
/// Chunks whose digests are requested in one call.
const LOCATED: usize = 16_384;

/// What a right seal says of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sealed {
    /// Name of the file when the version was written, without its folder.
    pub(super) name: String,
    /// Time of the content, in nanoseconds since 1970.
    pub(super) modified: i64,
}

/// The tag of a version with these chunks; none if the digest of one is unknown.
fn tag(secret: &Secret, sealed: &Sealed, pieces: &[ChunkRef]) -> Option<blake3::Hash> {
    let mut hash = blake3::Hasher::new_keyed(secret.map_key());
    hash.update(&[FORMAT]);
    hash.update(&sealed.modified.to_le_bytes());
    hash.update(&(sealed.name.len() as u64).to_le_bytes());
    hash.update(sealed.name.as_bytes());
    hash.update(&(pieces.len() as u64).to_le_bytes());
    let mut offset = 0_u64;
    for piece in pieces {
        hash.update(&offset.to_le_bytes());
        hash.update(&piece.length.to_le_bytes());
        hash.update(&[u8::from(piece.encrypted)]);
        hash.update(&piece.digest?.0);
        offset += u64::from(piece.length);
    }
    Some(hash.finalize())
}

/// Seals a map whose digests are all known; see `docs/formats/pool.md`.
pub(super) fn seal(secret: &Secret, sealed: &Sealed, pieces: &[ChunkRef]) -> Option<Vec<u8>> {
    let tag = tag(secret, sealed, pieces)?;
    let mut out = vec![FORMAT];
    out.extend(sealed.modified.to_le_bytes());
    out.extend(tag.as_bytes());
    out.extend(sealed.name.as_bytes());
    Some(out)
}

/// Checks a seal; none if it is not right for these chunks.
fn check(secret: &Secret, seal: &[u8], pieces: &[ChunkRef]) -> Option<Sealed> {
    let (head, name) = seal.split_first_chunk::<HEAD>()?;
    let (modified, found) = head[1..].split_first_chunk::<8>()?;
    let found = blake3::Hash::from_bytes(*found.first_chunk::<32>()?);
    if head[0] != FORMAT || name.len() > MAX_NAME {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?.to_owned();
    let sealed = Sealed { name, modified: i64::from_le_bytes(*modified) };
    // Compared in constant time.
    (tag(secret, &sealed, pieces)? == found).then_some(sealed)
}

impl Pool {
    /// Checks the seal of a map, if there is one and a secret. Then the chunks have their digests.
    pub(super) async fn check_seal(
        &self,
        version: u64,
        pieces: &mut [ChunkRef],
        seal: &[u8],
    ) -> Result<Option<Sealed>> {
        let Some(secret) = self.inner.options.secret.clone().filter(|_| !seal.is_empty()) else {
            return Ok(None);
        };
        for batch in pieces.chunks_mut(LOCATED) {
            let digests = self.digests(batch.iter().map(|piece| piece.chunk)).await?;
            if digests.len() != batch.len() {
                return Err(PoolError::Answer { what: "list of places" });
            }
            batch.iter_mut().zip(digests).for_each(|(piece, digest)| piece.digest = Some(digest));
        }
        let sealed = check(&secret, seal, pieces).ok_or(PoolError::WrongSeal { version })?;
        Ok(Some(sealed))
    }

    /// The digests of chunks, as the manager says.
    async fn digests(&self, chunks: impl Iterator<Item = ChunkId>) -> Result<Vec<Digest>> {
        let (places, payload) = self.call_manager::<Locate>(&(), put_numbers(chunks)).await?;
        self.record_addresses(&places);
        let located = get_located(&payload).ok_or(PoolError::Answer { what: "list of places" })?;
        Ok(located.into_iter().map(|chunk| chunk.digest).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(n: u8) -> ChunkRef {
        let digest = Some(Digest([n; 32]));
        ChunkRef { chunk: u64::from(n), length: u32::from(n) * 10, encrypted: true, digest }
    }

    fn sealed() -> Sealed {
        Sealed { name: "state".into(), modified: 7 }
    }

    #[test]
    fn a_seal_is_right_for_its_chunks_name_and_time_only() {
        let (ours, theirs) = (Secret::new(&[1; 32]).unwrap(), Secret::new(&[2; 32]).unwrap());
        let pieces = [1, 2, 3, 3].map(piece);
        let seal = seal(&ours, &sealed(), &pieces).unwrap();
        assert_eq!(check(&ours, &seal, &pieces), Some(sealed()));
        assert_eq!(check(&theirs, &seal, &pieces), None);
        for other in [&[1, 3, 2, 3][..], &[1, 2, 3], &[1, 2, 3, 3, 3], &[1, 2, 3, 4], &[]] {
            let other: Vec<ChunkRef> = other.iter().map(|n| piece(*n)).collect();
            assert_eq!(check(&ours, &seal, &other), None);
        }
        // Other numbers for the same chunks are the manager's affair.
        let mut renumbered = pieces;
        renumbered[0].chunk = 99;
        assert_eq!(check(&ours, &seal, &renumbered), Some(sealed()));
        for at in 0..seal.len() {
            let mut bent = seal.clone();
            bent[at] ^= 1;
            assert_eq!(check(&ours, &bent, &pieces), None, "{at}");
        }
        let mut unknown = pieces;
        unknown[2].digest = None;
        assert_eq!(super::seal(&ours, &sealed(), &unknown), None);
    }

    proptest! {
        #[test]
        fn no_other_bytes_are_a_seal(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let secret = Secret::new(&[1; 32]).unwrap();
            prop_assert_eq!(check(&secret, &bytes, &[piece(1)]), None);
        }
    }
}
