//! Mapped table: the table file as words of a shared mapping. The only unsafe code of this crate.
//!
//! An access past the end of a mapped file kills the process (SIGBUS), and so does a write that needs a block
//! on a full disk. So the file is private (mode 0600), its blocks are allocated before it gets its name, its
//! length is checked before it is mapped, and nothing ever truncates it: a new table replaces it by rename,
//! and processes that map the old file keep that one.

use memmap2::{MmapOptions, MmapRaw};
use std::{fs::File, io, sync::atomic::AtomicU64};

const _: () = assert!(cfg!(target_endian = "little"), "words are mapped as they lie in the file");

/// A mapped table file.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: MmapRaw,
    words: usize,
}

impl Mapped {
    /// Maps the first `bytes` bytes of `file`, a multiple of eight; the file must have that length.
    pub(crate) fn new(file: &File, bytes: usize) -> io::Result<Self> {
        if file.metadata()?.len() < bytes as u64 || !bytes.is_multiple_of(8) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { map: MmapOptions::new().len(bytes).map_raw(file)?, words: bytes / 8 })
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `words * 8` bytes long, aligned to a page, readable and writable, and lives
        // as long as `self`, to which the slice is tied. All access in this process is through these atomics;
        // other processes that map the file race on atomics of the same width only.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.words) }
    }

    /// Writes changed pages to the disk now; otherwise the kernel writes them later.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.map.flush()
    }
}

/// Prefetches the cache line of `word` without waiting for it.
#[inline(always)]
pub(crate) fn prefetch(word: &AtomicU64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint that reads nothing into the program and never faults; the pointer is a
    // live reference's.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(word.as_ptr().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
