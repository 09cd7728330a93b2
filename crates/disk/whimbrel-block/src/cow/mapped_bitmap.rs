//! Mapped bitmap: the words of a live bitmap in a shared mapping. One of the two modules of
//! this crate with `unsafe`.
//!
//! The file belongs to one process (the overlay is locked) and is in a directory that only the daemon writes.
//! It is never truncated, so an access past its end (SIGBUS) cannot happen.

use super::format::HEADER_SIZE;
use memmap2::{MmapOptions, MmapRaw};
use std::{fs::File, io, sync::atomic::AtomicU64};

const _: () =
    assert!(cfg!(target_endian = "little"), "the bitmap's words are mapped as they lie in the file");

#[derive(Debug)]
pub(super) struct MappedWords {
    map: MmapRaw,
    words: usize,
}

impl MappedWords {
    /// Maps the bitmap of `file`, which has at least `HEADER_SIZE + words * 8` bytes.
    pub(super) fn new(file: &File, words: usize) -> io::Result<Self> {
        let bytes = HEADER_SIZE + words * 8;
        if file.metadata()?.len() < bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)?, words })
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `HEADER_SIZE + words * 8` bytes long, page-aligned (so the words are aligned
        // to 8: `HEADER_SIZE` is a page) and lives as long as `self`, to which the slice is tied. It is
        // readable and writable, and all access to it in this process is through these atomics; another
        // mapping of the file would still only race on atomics of the same width.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(HEADER_SIZE).cast(), self.words) }
    }
}
