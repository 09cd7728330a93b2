//! The hash cache: for the digest of a page, where such a page already lies in the files of this host.
//!
//! One table file of fixed size that holds no content, only tags of digests and places in *sources*: disk images (raw,
//! qcow2) and the memory files of running machines (section 4.4.1 of "Optimizing the migration of virtual computers"). Sources
//! may change, shrink and vanish at any time and nobody tells the cache; two processes may write the table at once; it may be
//! damaged. None of that can give wrong bytes, because a page is read into memory of ours and its digest is checked
//! on every use, and an entry that was wrong is dropped. The price of everything that goes wrong is a page not found.
//!
//! What this crate does not do: find the alignment of file pages in a disk image (it is told, as [`Cuts`](whimbrel_align::Cuts)); hold content; talk
//! to other hosts.

mod add;
mod cache;
mod error;
mod files;
pub mod format;
mod grid;
mod mapped;
mod pieces;
mod place;
pub mod qcow2;
mod random;
mod reader;
mod scan;
mod sources;
mod stats;
mod table;

pub use cache::{HashCache, Missing};
pub use error::{CacheError, Result};
pub use files::SourceKind;
pub use format::Geometry;
pub use place::{Location, SourceId};
pub use reader::Reader;
pub use scan::{Added, Progress};
pub use stats::{SourceStats, Stats};
