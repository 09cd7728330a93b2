//! Compression of a transfer: a byte that names the codec, then one zstd frame, alone or against a prefix
//! that both sides have, or LZMA data.
//!
//! Decompressed data is never longer than the caller expects, whatever
//! the frame claims.

use crate::CompressionLevel;
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use std::io::{Read, Write};
use whimbrel_image::compression::{self, Settings};
use zstd::zstd_safe::CParameter;

/// Largest window of a frame: 32 MiB, the pages of a reply and their older versions.
const WINDOW_LOG_MAX: u32 = 25;
/// Largest hash table of a compressor, 16 MiB of memory.
const HASH_LOG_MAX: u32 = 22;
/// One table entry for four bytes of the span: more showed no gain, and clearing them costs time.
const HASH_LOG_LESS: u32 = 2;

/// Codecs, by the first byte.
const ZSTD: u8 = 0;
const LZMA: u8 = 1;
/// Largest dictionary of LZMA: replies on a slow link are hardly longer, and LZMA takes twelve times this in
/// memory.
const LZMA_WINDOW: u32 = 4 << 20;
const LZMA_WINDOW_MIN: u32 = 4 << 10;

/// Error of compressed data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompressionError {
    /// The codec reported an error.
    #[error("cannot decompress data: {reason}")]
    Codec {
        /// Text of the codec.
        reason: &'static str,
    },
    /// The data has another length than announced.
    #[error("decompressed data has {found} bytes instead of {expected}")]
    Length {
        /// Number of decompressed bytes.
        found: usize,
        /// Number of bytes announced.
        expected: usize,
    },
}

impl From<compression::CompressionError> for CompressionError {
    fn from(error: compression::CompressionError) -> Self {
        Self::Codec { reason: error.reason }
    }
}

/// Compresses `raw` at `level` against `prefix` (which may be empty).
pub(crate) fn compress(
    raw: &[u8],
    prefix: &[u8],
    level: CompressionLevel,
) -> Result<Vec<u8>, CompressionError> {
    match level {
        CompressionLevel::Lzma(preset) if prefix.is_empty() => pack_lzma(raw, preset),
        level => pack_zstd(raw, prefix, level.zstd()),
    }
}

/// Dictionary no larger than the data, because both sides clear it first.
fn lzma_window(raw: usize) -> u32 {
    u32::try_from(raw).map_or(LZMA_WINDOW, |raw| raw.clamp(LZMA_WINDOW_MIN, LZMA_WINDOW))
}

fn lzma_error(_: std::io::Error) -> CompressionError {
    CompressionError::Codec { reason: "invalid LZMA data" }
}

fn pack_lzma(raw: &[u8], preset: u32) -> Result<Vec<u8>, CompressionError> {
    let options = LzmaOptions { dict_size: lzma_window(raw.len()), ..LzmaOptions::with_preset(preset) };
    let mut writer = LzmaWriter::new_no_header(vec![LZMA], &options, false).map_err(lzma_error)?;
    writer.write_all(raw).and_then(|()| writer.finish()).map_err(lzma_error)
}

fn unpack_lzma(packed: &[u8], expected: usize) -> Result<Vec<u8>, CompressionError> {
    // The parameters are equal for all presets.
    let LzmaOptions { lc, lp, pb, .. } = LzmaOptions::with_preset(0);
    let reader = LzmaReader::new(packed, expected as u64, lc, lp, pb, lzma_window(expected), None);
    let mut raw = Vec::with_capacity(expected);
    reader.map_err(lzma_error)?.take(expected as u64).read_to_end(&mut raw).map_err(lzma_error)?;
    Ok(raw)
}

fn pack_zstd(raw: &[u8], prefix: &[u8], level: i32) -> Result<Vec<u8>, CompressionError> {
    // Otherwise the window of a low level ends before the older version begins.
    let span = (prefix.len() + raw.len()).next_power_of_two().trailing_zeros().max(17);
    // Low levels size the table for the raw bytes alone, in which most of the prefix would not be found.
    let table = (span - HASH_LOG_LESS).clamp(15, HASH_LOG_MAX);
    let wide = [CParameter::WindowLog(span.min(WINDOW_LOG_MAX)), CParameter::HashLog(table)];
    let more = wide.map(|setting| Some(setting).filter(|_| !prefix.is_empty()));
    Ok(compression::compress(raw, prefix, Settings { level, more }, vec![ZSTD])?)
}

/// Decompresses `packed` to `expected` bytes; the caller has bounded `expected`.
pub(crate) fn decompress(packed: &[u8], prefix: &[u8], expected: usize) -> Result<Vec<u8>, CompressionError> {
    let raw = match packed.split_first() {
        Some((&ZSTD, packed)) => compression::decompress_at_most(packed, prefix, expected)?,
        Some((&LZMA, packed)) if prefix.is_empty() => unpack_lzma(packed, expected)?,
        _ => return Err(CompressionError::Codec { reason: "unknown codec" }),
    };
    match raw.len() {
        found if found == expected => Ok(raw),
        found => Err(CompressionError::Length { found, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_survive_and_no_frame_gives_more_than_was_expected(
            raw in prop::collection::vec(0..4u8, 0..5000), prefix in prop::collection::vec(0..4u8, 0..5000), level in -3..25i8, less in 1..50usize,
        ) {
            let packed = compress(&raw, &prefix, level.into()).unwrap();
            prop_assert_eq!(&decompress(&packed, &prefix, raw.len()).unwrap(), &raw);
            prop_assert!(raw.len() < less || decompress(&packed, &prefix, raw.len() - less).is_err());
            prop_assert!(decompress(&packed, &prefix, raw.len() + less).is_err());
        }

        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), expected in 0..10_000usize) {
            if let Ok(raw) = decompress(&bytes, &[], expected) { prop_assert_eq!(raw.len(), expected); }
        }
    }

    #[test]
    fn an_older_version_beyond_the_window_of_the_level_is_found() {
        let old: Vec<u8> = (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let packed = compress(&old, &old, CompressionLevel::Zstd(1)).unwrap();
        assert!(packed.len() < 50_000, "{}", packed.len());
    }
}
