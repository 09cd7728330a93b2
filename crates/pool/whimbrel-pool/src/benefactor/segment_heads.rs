//! The record heads of a closed segment in a file of their own, `NNNNNNNN.heads`, so that a store with many
//! chunks opens without reading each record.
//!
//! The file is a cache: it has the heads in order, each with its checksum, and is believed only if they add
//! up to the length of the segment. Without it, or if it is wrong, the segment is read and the file is
//! written again. A closed segment never changes.

use super::{
    chunk_store::ChunkSlot,
    remote_segments::slots,
    segment::{self, RECORD, SegmentRecord},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};
use whimbrel_core::Digest;

fn path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("{number:08}.heads"))
}

/// The chunks of a closed segment of `length` bytes; none if its file is missing or wrong.
pub(super) fn read(
    dir: &Path,
    number: u32,
    length: u64,
    touched: Instant,
) -> Option<Vec<(Digest, ChunkSlot)>> {
    let bytes = fs::read(path(dir, number)).ok()?;
    let (found, end) = slots(number, &bytes, touched)?;
    (end == length).then_some(found)
}

/// Writes the heads of a closed segment. A failure costs only time at the next start.
pub(super) fn write(dir: &Path, number: u32, records: &[SegmentRecord]) {
    let mut bytes = Vec::with_capacity(records.len() * RECORD);
    for record in records {
        bytes.extend(segment::head(&record.digest, record.length as usize));
    }
    if let Err(error) = fs::write(path(dir, number), bytes) {
        tracing::debug!(%error, segment = number, "the heads of a segment are not stored");
    }
}

/// Removes the file with its segment.
pub(super) fn remove(dir: &Path, number: u32) {
    match fs::remove_file(path(dir, number)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(%error, segment = number, "the heads of a segment are not removed");
        }
        _ => {}
    }
}
