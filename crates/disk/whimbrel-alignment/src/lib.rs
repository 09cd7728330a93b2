//! Page alignment of disks: finds where file pages are on a disk and groups its bytes into pages, so that
//! equal files give equal pages.
//!
//! [`inspect`] reads partition tables and superblocks and returns, for each region, the offset modulo 4096 of
//! its file pages. [`PageAlignment`] is the part that an image stores: the mapping between disk bytes and
//! pages, in both directions. Nothing here opens a file or knows a block device; content is read through
//! [`ReadAt`].
//!
//! The content comes from a guest and may be forged. A forged layout can only move page borders, which costs
//! savings: [`PageAlignment`] validates itself and loses no byte with any borders.

mod alignment;
mod bounded_reader;
mod file_system;
mod format;
mod layout;
mod page_sets;
mod partition_table;

pub use alignment::{
    AlignedBytes, AlignmentChange, AlignmentError, MAX_SEGMENTS, MAX_SIZE, MappedRange, PageAlignment,
};
pub use bounded_reader::{MAX_SECTORS, ReadAt};
pub use file_system::FileSystem;
pub use format::AlignmentFormatError;
pub use layout::{Layout, MAX_REGIONS, Region, inspect};
pub use partition_table::RegionKind;

use whimbrel_core::PAGE_SIZE;

/// Bytes of a sector. Tables count in sectors, so everything on a disk starts at a multiple of it.
pub const SECTOR: u64 = 512;
/// Bytes of a page, as `u64` for offsets.
const PAGE: u64 = PAGE_SIZE as u64;
