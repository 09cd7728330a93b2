//! Content on the wire: a map of the pages that are not all zeros, and those pages, compressed where that
//! saves bytes.
//!
//! Zeros are never sent. Pure functions over bytes; lengths are checked before anything is allocated for
//! them.

use serde::{Deserialize, Serialize};

/// Size of a page in bytes, the unit of zero maps and of the cache's masks.
pub const PAGE: usize = 4096;

/// Content without its zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedPages {
    /// Length of the content in bytes; its last page may be short.
    pub len: u32,
    /// One bit per page, the lowest first, set if the page is not all zeros.
    pub map: Vec<u8>,
    /// Whether the payload is compressed with zstd.
    pub packed: bool,
}

/// Reasons why bytes are not valid packed content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// The content is longer than requested or allowed.
    #[error("content of {len} bytes is longer than {limit} bytes")]
    TooLong {
        /// Declared length in bytes.
        len: u64,
        /// Largest length in bytes.
        limit: u64,
    },
    /// Map, length and payload contradict each other.
    #[error("content does not match its declared shape")]
    Shape,
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compare whole words: every byte that is served is checked.
    let (words, tail) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && tail.iter().all(|byte| *byte == 0)
}

/// Whether a page is in a map with one bit per page, the lowest first.
pub fn is_in(map: &[u8], number: usize) -> bool {
    map.get(number / 8).is_some_and(|byte| byte >> (number % 8) & 1 == 1)
}

/// Leaves the zeros out of `content`, and compresses the rest at `level` if that saves an eighth.
pub fn pack_pages(content: &[u8], level: Option<i32>) -> (PackedPages, Vec<u8>) {
    pack_some(content, level, |_| true)
}

/// Packs the `wanted` pages only; the others are left out like zeros.
pub fn pack_some(
    content: &[u8],
    level: Option<i32>,
    wanted: impl Fn(usize) -> bool,
) -> (PackedPages, Vec<u8>) {
    let pages = content.len().div_ceil(PAGE);
    let mut map = vec![0u8; pages.div_ceil(8)];
    let mut rest = Vec::with_capacity(content.len());
    for (number, page) in content.chunks(PAGE).enumerate() {
        if wanted(number) && !is_zero(page) {
            map[number / 8] |= 1 << (number % 8);
            rest.extend_from_slice(page);
        }
    }
    let packed =
        level.filter(|_| rest.len() >= 512).and_then(|level| zstd::bulk::compress(&rest, level).ok());
    let packed = packed.filter(|packed| packed.len() < rest.len() - rest.len() / 8);
    let shape = PackedPages { len: content.len() as u32, map, packed: packed.is_some() };
    (shape, packed.unwrap_or(rest))
}

/// Decodes content of at most `limit` bytes.
pub fn unpack_pages(shape: &PackedPages, bytes: &[u8], limit: usize) -> Result<Vec<u8>, PagesError> {
    let len = shape.len as usize;
    if len > limit {
        return Err(PagesError::TooLong { len: len as u64, limit: limit as u64 });
    }
    let pages = len.div_ceil(PAGE);
    if shape.map.len() != pages.div_ceil(8) {
        return Err(PagesError::Shape);
    }
    let unpacked;
    let mut rest = bytes;
    if shape.packed {
        unpacked = zstd::bulk::decompress(bytes, len).map_err(|_| PagesError::Shape)?;
        rest = &unpacked;
    }
    let mut content = vec![0; len];
    for (number, page) in content.chunks_mut(PAGE).enumerate() {
        if is_in(&shape.map, number) {
            let (given, more) = rest.split_at_checked(page.len()).ok_or(PagesError::Shape)?;
            page.copy_from_slice(given);
            rest = more;
        }
    }
    if rest.is_empty() { Ok(content) } else { Err(PagesError::Shape) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_packed_comes_out_and_zeros_do_not_travel(
            pages in proptest::collection::vec(prop_oneof![Just(0u8), 1u8..=255], 0..20), tail in 0usize..PAGE, level in proptest::option::of(1i32..4)) {
            let mut content: Vec<u8> = pages.iter().flat_map(|byte| [*byte; PAGE]).collect();
            content.truncate(content.len().saturating_sub(tail));
            let (shape, bytes) = pack_pages(&content, level);
            let full = pages.iter().filter(|byte| **byte != 0).count();
            prop_assert!(bytes.len() <= full * PAGE);
            prop_assert_eq!(unpack_pages(&shape, &bytes, content.len()).unwrap(), content);
        }

        #[test]
        fn hostile_shapes_are_refused_without_a_panic(len in 0u32..100_000, map in proptest::collection::vec(any::<u8>(), 0..6), packed: bool, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let shape = PackedPages { len, map, packed };
            if let Ok(content) = unpack_pages(&shape, &bytes, 65536) { prop_assert!(content.len() <= 65536); }
        }
    }
}
