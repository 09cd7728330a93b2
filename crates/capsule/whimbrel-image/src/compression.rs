//! zstd in one call, alone or against a prefix that both sides have: the one compressor of frames, deltas,
//! page batches and transfers.
//!
//! Each thread keeps its contexts, because creating one costs a third of coding a frame. Decompression writes
//! into a buffer of the caller alone: no data can make it allocate more.

use std::{
    cell::RefCell,
    io::{self, Cursor},
};
use zstd::zstd_safe::{
    CCtx, CParameter, DCtx, ErrorCode, ResetDirective, WriteBuf, compress_bound, get_error_name,
};

thread_local! {
    static PACKER: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    static UNPACKER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// Error of compressed data, in the words of zstd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct CompressionError {
    /// Name of the error.
    pub reason: &'static str,
}

impl From<CompressionError> for io::Error {
    fn from(error: CompressionError) -> Self {
        Self::other(error)
    }
}

fn failed(code: ErrorCode) -> CompressionError {
    CompressionError { reason: get_error_name(code) }
}

/// Settings of a compression.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// Level of zstd; negative ones are faster.
    pub level: i32,
    /// Window, hash table and shortest match, where the level's own are not meant.
    pub more: [Option<CParameter>; 2],
}

impl Settings {
    /// The settings of a level.
    pub fn level(level: i32) -> Self {
        Self { level, more: [None; 2] }
    }

    fn apply(&self, context: &mut CCtx<'_>) -> Result<(), CompressionError> {
        context.set_parameter(CParameter::CompressionLevel(self.level)).map_err(failed)?;
        self.more.iter().flatten().try_for_each(|more| context.set_parameter(*more).map(drop).map_err(failed))
    }
}

/// Appends `raw`, compressed against `prefix` (which may be empty), to `out`.
pub fn compress(
    raw: &[u8],
    prefix: &[u8],
    settings: Settings,
    mut out: Vec<u8>,
) -> Result<Vec<u8>, CompressionError> {
    out.reserve(compress_bound(raw.len()));
    let end = out.len() as u64;
    let mut out = Cursor::new(out);
    out.set_position(end);
    if prefix.is_empty() {
        PACKER.with_borrow_mut(|context| {
            context.reset(ResetDirective::SessionAndParameters).map_err(failed)?;
            settings.apply(context)?;
            context.compress2(&mut out, raw).map_err(failed)
        })?;
    } else {
        // A context that borrows the prefix cannot be reused.
        let mut context = CCtx::create();
        settings.apply(&mut context)?;
        context.ref_prefix(prefix).map_err(failed)?;
        context.compress2(&mut out, raw).map_err(failed)?;
    }
    Ok(out.into_inner())
}

/// Decompresses `packed` against `prefix` into `out`; returns the number of bytes.
pub fn decompress(
    packed: &[u8],
    prefix: &[u8],
    out: &mut (impl WriteBuf + ?Sized),
) -> Result<usize, CompressionError> {
    if prefix.is_empty() {
        return UNPACKER.with_borrow_mut(|context| {
            context.reset(ResetDirective::SessionAndParameters).map_err(failed)?;
            context.decompress(out, packed).map_err(failed)
        });
    }
    let mut context = DCtx::create();
    context.ref_prefix(prefix).map_err(failed)?;
    context.decompress(out, packed).map_err(failed)
}

/// Decompresses `packed` against `prefix` to at most `most` bytes, which the caller has bounded.
pub fn decompress_at_most(packed: &[u8], prefix: &[u8], most: usize) -> Result<Vec<u8>, CompressionError> {
    let mut raw = Vec::with_capacity(most);
    decompress(packed, prefix, &mut raw)?;
    Ok(raw)
}
