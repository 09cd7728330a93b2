//! How pages of an epoch travel: only the blocks that changed, each distinct one once, each as small as is
//! cheap.
//!
//! After "Enhancing the Performance of High Availability Lightweight Live Migration" (FGBI), section 3:
//! [`changes`] finds the blocks of a page that differ from what was sent before, by hashes kept from then;
//! [`encode`] shares identical blocks and picks a code for each: offsets and values ([`sparse`]), words of a
//! dictionary ([`wkdm`]), or zstd (or gzip, as in the paper) over all others. [`decode`] is the way back.
//! Pure functions over bytes; what comes from outside is bounded before it is allocated.
//!
//! A hash that stayed the same although the block did not would leave an old block at the standby. So a page
//! that travels in blocks carries a BLAKE3 digest of all of it, and the standby asks for the page again if
//! its own differs.

mod bit_io;
pub mod block_hashes;
pub mod decoder;
pub mod encoder;
mod page_references;
pub mod sections;
pub mod shared_pages;
pub mod sparse;
pub mod wkdm;

use serde::{Deserialize, Serialize};
use whimbrel_core::PAGE_SIZE;

/// Most pages in a piece: 4 MiB of content, so that a piece fits one message even if nothing about it can be
/// made smaller.
pub const PIECE_PAGES_MAX: usize = 1024;
/// Bytes of a page's digest: the first half of its BLAKE3. 128 bits, for errors and not for enemies: whoever
/// could aim at it owns the guest already and would damage only its own copy.
pub const CHECK_BYTES: usize = 16;

/// The unit in which changes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockSize {
    /// 64 bytes.
    B64,
    /// 128 bytes.
    B128,
    /// 256 bytes.
    B256,
    /// The whole page.
    Page,
}

impl BlockSize {
    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::B64 => 64,
            Self::B128 => 128,
            Self::B256 => 256,
            Self::Page => PAGE_SIZE,
        }
    }

    /// Blocks of a page.
    pub const fn in_page(self) -> usize {
        PAGE_SIZE / self.bytes()
    }
}

/// What is done to pages on their way. Each step can be left out, to see what it brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CodecOptions {
    /// The unit in which changes are found.
    pub block: BlockSize,
    /// Blocks that are in the piece already are named instead of sent, and whole pages that the standby has.
    pub share: bool,
    /// Blocks of few nonzero bytes travel as offsets and values.
    pub sparse: bool,
    /// Blocks of similar words travel as words of a dictionary.
    pub wkdm: bool,
    /// What all other blocks go through together.
    pub general: FallbackCompressor,
}

/// What blocks go through that nothing cheaper has shrunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FallbackCompressor {
    /// Nothing.
    None,
    /// zstd at its fastest ordinary level.
    Zstd,
    /// gzip at its usual level, as in the paper.
    Gzip,
}

impl CodecOptions {
    /// Whole pages as they are: Remus, the base line.
    pub const REMUS: Self = Self {
        block: BlockSize::Page,
        share: false,
        sparse: false,
        wkdm: false,
        general: FallbackCompressor::None,
    };

    /// Everything, in blocks of `block`.
    pub const fn fine(block: BlockSize) -> Self {
        Self { block, share: true, sparse: true, wkdm: true, general: FallbackCompressor::Zstd }
    }
}

/// A page's digest as it travels.
pub fn check_of(page: &[u8]) -> [u8; CHECK_BYTES] {
    let digest = whimbrel_core::Digest::of(page);
    std::array::from_fn(|index| digest.as_bytes()[index])
}

/// What became of the bytes, a step after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteCounts {
    /// Pages.
    pub pages: u64,
    /// Bytes of them.
    pub dirty: u64,
    /// Bytes of the blocks that changed.
    pub changed: u64,
    /// Of these, bytes of blocks that were not shared.
    pub unshared: u64,
    /// Bytes that left, of blocks as well as of everything that says where they belong.
    pub sent: u64,
}

impl ByteCounts {
    /// Adds another one.
    pub fn add(&mut self, other: ByteCounts) {
        self.pages += other.pages;
        self.dirty += other.dirty;
        self.changed += other.changed;
        self.unshared += other.unshared;
        self.sent += other.sent;
    }
}
