//! Where file pages lie on a disk, and how its bytes are cut into pages so that equal files give equal pages.
//!
//! [`inspect`] reads partition tables and superblocks and says for each region at which offset modulo 4096
//! file pages lie; [`PageAlignment`] is what an image keeps of that: how an array of bytes is cut into pages,
//! both ways. Nothing here opens a file or knows a block device; content is read through [`ReadAt`].
//!
//! What is read comes from a guest and may lie. A lie can only make cuts at places where no file lies, which
//! costs savings: [`PageAlignment`] checks itself and loses no byte wherever they are.

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

/// Bytes of a sector. Tables count in these, so everything on a disk starts at a multiple of it.
pub const SECTOR: u64 = 512;
/// Bytes of a page, as a number to reckon offsets with.
const PAGE: u64 = PAGE_SIZE as u64;
