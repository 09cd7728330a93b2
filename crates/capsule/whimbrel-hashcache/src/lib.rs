//! The hash cache: for the digest of a page, where such a page already lies in the files of this host.
//!
//! One table file of fixed size that holds no content, only tags of digests and places in *sources*: disk
//! images (raw, qcow2) and the memory files of running machines (section 4.4.1 of "Optimizing the migration
//! of virtual computers"). Sources may change, shrink and vanish at any time and nobody tells the cache; two
//! processes may write the table at once; it may be damaged. None of that can give wrong bytes, because a
//! page is read into memory of ours and its digest is checked on every use, and an entry that was wrong is
//! dropped. The price of everything that goes wrong is a page not found.
//!
//! What this crate does not do: find the alignment of file pages in a disk image (it is told, as
//! [`Cuts`](whimbrel_alignment::Cuts)); hold content; talk to other hosts.

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
