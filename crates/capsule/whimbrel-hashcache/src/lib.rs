//! Hash cache: a table from digests of pages to locations in files of this host.
//!
//! One table file of fixed size. It has no content, only parts of digests and locations in *sources*: disk
//! images (raw, qcow2) and the memory files of running machines (section 4.4.1 of "Optimizing the migration
//! of virtual computers"). Sources may change, shrink and vanish at any time without notice, two processes
//! may write the table at once, and it may be damaged. None of that gives wrong bytes: a page is copied and
//! the digest of the copy is checked on every use, and a wrong entry is dropped. The worst outcome is a page
//! that is not found.
//!
//! This crate does not find the alignment of file pages in a disk image (the caller passes a
//! [`PageAlignment`](whimbrel_alignment::PageAlignment)), does not store content, and does not talk to other
//! hosts.

mod aligned_ranges;
mod cache;
mod error;
pub mod format;
mod location;
mod mapped_table;
mod page_reader;
mod prng;
pub mod qcow2;
mod registration;
mod scan;
mod scan_ranges;
mod source_files;
mod source_records;
mod stats;
mod table;

pub use cache::{HashCache, OnMissing};
pub use error::{CacheError, Result};
pub use format::Geometry;
pub use location::{Location, SourceId};
pub use page_reader::Reader;
pub use scan::{Added, Progress};
pub use source_files::SourceKind;
pub use stats::{SourceStats, Stats};
