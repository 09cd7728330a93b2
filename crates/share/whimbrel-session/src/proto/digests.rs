//! Digests on the wire: a map of the pages that are not all zeros, and the BLAKE3 digest of each of them.
//!
//! 32 bytes stand for 4,096, so a client that likely has the content requests these first. Pure functions
//! over bytes; lengths are checked before anything is allocated for them.

use super::pages::{PAGE, PagesError, is_in, is_zero};
use serde::{Deserialize, Serialize};
use whimbrel_core::Digest;

/// Size of a digest in bytes.
const DIGEST: usize = 32;

/// Pages to which the digests belong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestedPages {
    /// Length of the content in bytes; its last page may be short.
    pub len: u32,
    /// One bit per page, the lowest first, set if the page is not all zeros.
    pub map: Vec<u8>,
}

/// The digest of a page; a short one is filled up with zeros, as in a cache.
pub fn digest_of_page(page: &[u8]) -> Digest {
    if page.len() == PAGE {
        return Digest::of(page);
    }
    let mut whole = [0; PAGE];
    let len = page.len().min(PAGE);
    whole[..len].copy_from_slice(&page[..len]);
    Digest::of(&whole)
}

/// The digests of all pages of `content` that are not zeros.
pub fn pack_digests(content: &[u8]) -> (DigestedPages, Vec<u8>) {
    let pages = content.len().div_ceil(PAGE);
    let mut map = vec![0u8; pages.div_ceil(8)];
    let mut digests = Vec::with_capacity(pages * DIGEST);
    for (number, page) in content.chunks(PAGE).enumerate() {
        if !is_zero(page) {
            map[number / 8] |= 1 << (number % 8);
            digests.extend_from_slice(digest_of_page(page).as_bytes());
        }
    }
    (DigestedPages { len: content.len() as u32, map }, digests)
}

/// Decodes the digest of each page, `None` for zeros, of at most `limit` bytes of content.
pub fn unpack_digests(
    shape: &DigestedPages,
    bytes: &[u8],
    limit: usize,
) -> Result<Vec<Option<Digest>>, PagesError> {
    let len = shape.len as usize;
    if len > limit {
        return Err(PagesError::TooLong { len: len as u64, limit: limit as u64 });
    }
    let pages = len.div_ceil(PAGE);
    let (digests, odd) = bytes.as_chunks::<DIGEST>();
    let full = (0..pages).filter(|number| is_in(&shape.map, *number)).count();
    if shape.map.len() != pages.div_ceil(8) || !odd.is_empty() || digests.len() != full {
        return Err(PagesError::Shape);
    }
    let mut digests = digests.iter();
    let digest = |number| is_in(&shape.map, number).then(|| digests.next().map(|bytes| Digest(*bytes)))?;
    Ok((0..pages).map(digest).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_page_has_its_digest_and_zeros_have_none(
            pages in proptest::collection::vec(prop_oneof![Just(0u8), 1u8..=255], 0..20), tail in 0usize..PAGE) {
            let mut content: Vec<u8> = pages.iter().flat_map(|byte| [*byte; PAGE]).collect();
            content.truncate(content.len().saturating_sub(tail));
            let (shape, bytes) = pack_digests(&content);
            let digests = unpack_digests(&shape, &bytes, content.len()).unwrap();
            prop_assert_eq!(digests.len(), content.len().div_ceil(PAGE));
            for (page, digest) in content.chunks(PAGE).zip(digests) {
                prop_assert_eq!(digest, (!is_zero(page)).then(|| digest_of_page(page)));
            }
        }

        #[test]
        fn hostile_shapes_are_refused_without_a_panic(len in 0u32..100_000, map in proptest::collection::vec(any::<u8>(), 0..6), bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(digests) = unpack_digests(&DigestedPages { len, map }, &bytes, 65_536) { prop_assert!(digests.len() <= 16); }
        }
    }
}
