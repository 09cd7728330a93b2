//! Page codec: encodes the pages of an epoch as changed blocks, each distinct block once and cheaply
//! compressed.
//!
//! After "Enhancing the Performance of High Availability Lightweight Live Migration" (FGBI), section 3:
//! [`block_hashes`] finds the blocks of a page that differ from what was sent before, by their hashes;
//! [`encoder`] shares identical blocks and picks a code for each: offsets and values ([`sparse`]), words of a
//! dictionary ([`wkdm`]), or zstd over all others. [`decoder`] does the reverse.
//! Pure functions over bytes; input from outside is bounded before it is allocated.
//!
//! Two versions of a block with equal hashes would leave an old block at the standby. Therefore a page that
//! is sent in blocks has a BLAKE3 digest of the whole page, and the standby requests the page again if its
//! own differs.

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

/// Most pages in a batch: 4 MiB of content, so that a batch fits one message even if nothing compresses.
pub const BATCH_PAGES_MAX: usize = 1024;
/// Bytes of a page's digest: the first half of its BLAKE3. 128 bits detect errors, not attacks: only the
/// guest could construct a collision, and it would damage only its own copy.
pub const DIGEST_BYTES: usize = 16;

/// The unit in which changes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockSize {
    /// Blocks of 64 bytes.
    B64,
    /// Blocks of 128 bytes.
    B128,
    /// Blocks of 256 bytes.
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

/// Settings of the codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Steps", into = "Steps")]
pub struct CodecOptions {
    /// The unit in which changes are found.
    pub block: BlockSize,
    /// Whether repeated blocks and pages are sent once, and the others encoded and compressed.
    pub compact: bool,
}

/// Settings on the wire: the unit, a flag for each cheap step, and 1 for zstd.
type Steps = (BlockSize, [bool; 3], u32);

impl From<Steps> for CodecOptions {
    fn from((block, steps, _): Steps) -> Self {
        Self { block, compact: steps[0] }
    }
}

impl From<CodecOptions> for Steps {
    fn from(CodecOptions { block, compact }: CodecOptions) -> Self {
        (block, [compact; 3], compact.into())
    }
}

impl CodecOptions {
    /// Whole pages without compression, as Remus: the reference for comparisons.
    pub const REMUS: Self = Self { block: BlockSize::Page, compact: false };

    /// All steps, in blocks of size `block`.
    pub const fn fine(block: BlockSize) -> Self {
        Self { block, compact: true }
    }
}

/// Digest of a page as it is sent.
pub fn page_digest(page: &[u8]) -> [u8; DIGEST_BYTES] {
    let digest = whimbrel_core::Digest::of(page);
    std::array::from_fn(|index| digest.as_bytes()[index])
}

/// Bytes that remain after each step of the codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteCounts {
    /// Number of pages.
    pub pages: u64,
    /// Bytes of the pages.
    pub dirty: u64,
    /// Bytes of the blocks that changed.
    pub changed: u64,
    /// Bytes of changed blocks that were not shared.
    pub unshared: u64,
    /// Bytes sent, including all metadata.
    pub sent: u64,
}

impl ByteCounts {
    /// Adds the counts of `other`.
    pub fn add(&mut self, other: ByteCounts) {
        self.pages += other.pages;
        self.dirty += other.dirty;
        self.changed += other.changed;
        self.unshared += other.unshared;
        self.sent += other.sent;
    }
}
