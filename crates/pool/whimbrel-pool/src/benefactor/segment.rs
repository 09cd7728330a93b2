//! Segment files: their format, one record for each chunk, and how a file is read after a crash.
//!
//! ```text
//! 0   magic "WHCK"     4  length of the frame, u32     8  digest of the chunk, 32 bytes
//! 40  xxh3 of the 40 bytes before, u64                 48 the frame (docs/formats/image.md)
//! integers little-endian
//! ```
//!
//! Records follow each other without gaps. Reading stops at the first torn record. Chunks behind it are not
//! in the index, so the next inventory reports them missing and the manager has them re-replicated.

use crate::{client::OVERHEAD, protocol::MAX_CHUNK};
use bytes::Bytes;
use std::{cell::RefCell, fs::File, io, os::unix::fs::FileExt};
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{HEAD, PackFrame, PackFrameError, PackFrameHeader};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a record before the frame.
pub(super) const RECORD: usize = 48;
const MAGIC: [u8; 4] = *b"WHCK";
/// Longest frame: the longest chunk with space for growth of its head.
pub(super) const MAX_FRAME: usize = MAX_CHUNK + HEAD + 4096;

pub(super) fn head(digest: &Digest, frame: usize) -> [u8; RECORD] {
    let mut out = [0; RECORD];
    out[..4].copy_from_slice(&MAGIC);
    out[4..8].copy_from_slice(&(frame as u32).to_le_bytes());
    out[8..40].copy_from_slice(&digest.0);
    let sum = xxh3_64(&out[..40]);
    out[40..].copy_from_slice(&sum.to_le_bytes());
    out
}

pub(super) fn parse(head: &[u8; RECORD]) -> Option<(Digest, u32)> {
    let (body, sum) = head.split_at(40);
    let length = u32::from_le_bytes(body[4..8].try_into().ok()?);
    let digest = Digest(body[8..].try_into().ok()?);
    let right = body[..4] == MAGIC && sum == xxh3_64(body).to_le_bytes() && length as usize <= MAX_FRAME;
    right.then_some((digest, length))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentRecord {
    pub(super) digest: Digest,
    pub(super) offset: u64,
    pub(super) length: u32,
}

/// The records of a file, and the offset of the first torn one. With `whole`, frames are checked too.
pub(super) fn scan(file: &File, whole: bool) -> io::Result<(Vec<SegmentRecord>, u64)> {
    let size = file.metadata()?.len();
    let (mut out, mut at) = (Vec::new(), 0);
    let mut frame = Vec::new();
    while at + RECORD as u64 <= size {
        let mut bytes = [0; RECORD];
        file.read_exact_at(&mut bytes, at)?;
        let Some((digest, length)) = parse(&bytes) else { break };
        let offset = at + RECORD as u64;
        let end = offset + u64::from(length);
        if end > size {
            break;
        }
        if whole {
            frame.resize(length as usize, 0);
            file.read_exact_at(&mut frame, offset)?;
            if PackFrame::parse(&frame).is_err() {
                break;
            }
        }
        out.push(SegmentRecord { digest, offset, length });
        at = end;
    }
    Ok((out, at))
}

/// Error for a frame that does not have the expected chunk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// The bytes are not the frame of a chunk.
    #[error("the bytes are not the frame of a chunk")]
    NoFrame {
        /// Cause reported by the frame parser.
        source: PackFrameError,
    },
    /// The length is too large or differs from the head.
    #[error("the frame has an invalid length")]
    Length,
    /// The content has another digest.
    #[error("the bytes have the digest {found}")]
    Digest {
        /// Digest of the content.
        found: Digest,
    },
}

/// Decodes a frame and checks that its content has the digest `digest`.
pub fn open_frame(digest: &Digest, bytes: &[u8]) -> Result<Vec<u8>, FrameFault> {
    let frame = parse_chunk(bytes)?;
    let mut raw = vec![0; frame.head.raw];
    frame.decode_into(&[], &mut raw).map_err(no_frame)?;
    compare(digest, &raw)?;
    Ok(raw)
}

/// Does what [`open_frame`] does, without a copy of content that is in the frame as it is.
pub(crate) fn open_shared(digest: &Digest, bytes: &Bytes) -> Result<Bytes, FrameFault> {
    match parse_chunk(bytes)?.stored() {
        Some(raw) => compare(digest, raw).map(|()| bytes.slice_ref(raw)),
        None => open_frame(digest, bytes).map(Bytes::from),
    }
}

/// Checks that a frame has the chunk `digest`.
pub(crate) fn check_frame(digest: &Digest, bytes: &[u8]) -> Result<(), FrameFault> {
    thread_local! {
        /// Reused, because page faults of fresh megabytes for every chunk would cost more than the check.
        static RAW: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    let frame = parse_chunk(bytes)?;
    if let Some(raw) = frame.stored() {
        return compare(digest, raw);
    }
    RAW.with_borrow_mut(|raw| {
        raw.resize(frame.head.raw, 0);
        frame.decode_into(&[], raw).map_err(no_frame)?;
        compare(digest, raw)
    })
}

fn no_frame(source: PackFrameError) -> FrameFault {
    FrameFault::NoFrame { source }
}

/// The frame of a chunk, with a right checksum.
fn parse_chunk(bytes: &[u8]) -> Result<PackFrame<'_>, FrameFault> {
    // Checked before anything is allocated.
    let head = PackFrameHeader::parse(bytes).map_err(no_frame)?;
    if head.raw > MAX_CHUNK + OVERHEAD || head.total() != bytes.len() || head.bases > 0 {
        return Err(FrameFault::Length);
    }
    PackFrame::parse(bytes).map_err(no_frame)
}

fn compare(digest: &Digest, raw: &[u8]) -> Result<(), FrameFault> {
    let found = Digest::of(raw);
    if found == *digest { Ok(()) } else { Err(FrameFault::Digest { found }) }
}
