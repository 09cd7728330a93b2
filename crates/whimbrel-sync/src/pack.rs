//! Bytes compressed for the line: one zstd frame, alone or against a prefix that both sides hold.
//!
//! Contexts are kept by thread. What is unpacked is never longer than the caller says, whatever the frame claims.

use std::cell::RefCell;
use zstd::zstd_safe::{CCtx, CParameter, DCtx, ErrorCode, ResetDirective, compress_bound, get_error_name};

/// Largest window of a frame: 32 MiB, an answer's pages and their older versions.
const WINDOW_LOG_MAX: u32 = 25;
/// Largest table of a compressor, 16 MiB of memory.
const HASH_LOG_MAX: u32 = 22;
/// An entry for four bytes of the span loses nothing that could be measured; clearing more of them costs time.
const HASH_LOG_LESS: u32 = 2;

thread_local! {
    static PACKER: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    static UNPACKER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// Bytes that do not unpack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The codec refuses.
    #[error("compressed bytes do not decompress: {reason}")]
    Codec {
        /// What it says.
        reason: &'static str,
    },
    /// Another length than announced.
    #[error("compressed bytes give {found} bytes instead of {expected}")]
    Length {
        /// Bytes they give.
        found: usize,
        /// Bytes announced.
        expected: usize,
    },
}

fn codec(code: ErrorCode) -> PackError {
    PackError::Codec { reason: get_error_name(code) }
}

/// `raw` compressed at `level` against `prefix` (which may be empty).
pub(crate) fn pack(raw: &[u8], prefix: &[u8], level: i32) -> Result<Vec<u8>, PackError> {
    let mut packed = Vec::with_capacity(compress_bound(raw.len()));
    if prefix.is_empty() {
        PACKER.with_borrow_mut(|context| {
            context.reset(ResetDirective::SessionAndParameters).map_err(codec)?;
            context.set_parameter(CParameter::CompressionLevel(level)).map_err(codec)?;
            context.compress2(&mut packed, raw).map_err(codec)
        })?;
        return Ok(packed);
    }
    // Borrows the prefix, so it cannot be one that is kept.
    let mut context = CCtx::create();
    // Else the window of a low level ends before the older version begins.
    let span = (prefix.len() + raw.len()).next_power_of_two().trailing_zeros().max(17);
    context.set_parameter(CParameter::CompressionLevel(level)).map_err(codec)?;
    context.set_parameter(CParameter::WindowLog(span.min(WINDOW_LOG_MAX))).map_err(codec)?;
    // Low levels have a table for the raw bytes alone, in which most of the prefix would not be found again.
    context
        .set_parameter(CParameter::HashLog((span - HASH_LOG_LESS).clamp(15, HASH_LOG_MAX)))
        .map_err(codec)?;
    context.ref_prefix(prefix).map_err(codec)?;
    context.compress2(&mut packed, raw).map_err(codec)?;
    Ok(packed)
}

/// The `expected` bytes that `packed` stands for; the caller has bounded `expected`.
pub(crate) fn unpack(packed: &[u8], prefix: &[u8], expected: usize) -> Result<Vec<u8>, PackError> {
    // Decompression in one piece writes into this buffer alone: no frame can make it take more.
    let mut raw = Vec::with_capacity(expected);
    if prefix.is_empty() {
        UNPACKER.with_borrow_mut(|context| {
            context.reset(ResetDirective::SessionAndParameters).map_err(codec)?;
            context.decompress(&mut raw, packed).map_err(codec)
        })?;
    } else {
        let mut context = DCtx::create();
        context.ref_prefix(prefix).map_err(codec)?;
        context.decompress(&mut raw, packed).map_err(codec)?;
    }
    match raw.len() {
        found if found == expected => Ok(raw),
        found => Err(PackError::Length { found, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_survive_and_no_frame_gives_more_than_was_expected(
            raw in prop::collection::vec(0..4u8, 0..5000), prefix in prop::collection::vec(0..4u8, 0..5000), level in -3..9i32, less in 1..50usize,
        ) {
            let packed = pack(&raw, &prefix, level).unwrap();
            prop_assert_eq!(&unpack(&packed, &prefix, raw.len()).unwrap(), &raw);
            prop_assert!(raw.len() < less || unpack(&packed, &prefix, raw.len() - less).is_err());
            prop_assert!(unpack(&packed, &prefix, raw.len() + less).is_err());
        }

        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), expected in 0..10_000usize) {
            if let Ok(raw) = unpack(&bytes, &[], expected) { prop_assert_eq!(raw.len(), expected); }
        }
    }

    #[test]
    fn an_older_version_beyond_the_window_of_the_level_is_found() {
        let old: Vec<u8> = (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let packed = pack(&old, &old, 1).unwrap();
        assert!(packed.len() < 50_000, "{}", packed.len());
    }
}
