//! Compressed frame of pages, coded against older pages that both sides have.
//!
//! Only this module knows the coding, on which `encode_pages` and `decode_pages` must agree. The older pages,
//! concatenated, are the compression prefix, so a page may refer to its own older version, to that of another
//! page, or to the pages before it. Pure; the decoded length is bounded by the caller.

use crate::{
    CompressionLevel,
    compression::{CompressionError, compress, decompress},
};
use whimbrel_core::PAGE_SIZE;

/// Encodes `pages` as one frame; `older` are pages that the receiver has too, in an order that both know.
pub(crate) fn encode_pages(
    pages: &[u8],
    older: &[u8],
    level: CompressionLevel,
) -> Result<Vec<u8>, CompressionError> {
    assert!(pages.len().is_multiple_of(PAGE_SIZE) && older.len().is_multiple_of(PAGE_SIZE));
    compress(pages, older, level)
}

pub(crate) fn decode_pages(frame: &[u8], older: &[u8], count: usize) -> Result<Vec<u8>, CompressionError> {
    decompress(frame, older, count * PAGE_SIZE)
}
