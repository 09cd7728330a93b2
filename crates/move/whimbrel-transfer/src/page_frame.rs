//! A frame of pages for the line, coded against older pages that both sides hold.
//!
//! The one place that decides how: `encode_pages` and `decode_pages` must agree and nobody else looks inside.
//! The older pages, one after the other, are the prefix of what is packed, so a page may use its own older
//! version, any other's, or the pages before it. Pure; what is decoded has the length that the caller
//! bounded.

use crate::{
    CompressionLevel,
    compression::{CompressionError, pack, unpack},
};
use whimbrel_core::PAGE_SIZE;

/// `pages` as one frame; `older` are pages that the receiver holds too, in an order that both know.
pub(crate) fn encode_pages(
    pages: &[u8],
    older: &[u8],
    level: CompressionLevel,
) -> Result<Vec<u8>, CompressionError> {
    debug_assert!(pages.len().is_multiple_of(PAGE_SIZE) && older.len().is_multiple_of(PAGE_SIZE));
    pack(pages, older, level)
}

/// The `count` pages of a frame.
pub(crate) fn decode_pages(frame: &[u8], older: &[u8], count: usize) -> Result<Vec<u8>, CompressionError> {
    unpack(frame, older, count * PAGE_SIZE)
}
