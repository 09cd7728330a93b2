//! The cache on the client's disk: blocks of files, what has yet to reach the server, and the order of it.
//!
//! `index` decides (which frame, what is copied, what may be reused when) and does no I/O; `record` is the bytes of the
//! journal; `journal`, `medium` and `memory` store them; `frames` and `store` put them together. The format is described in
//! `docs/formats/session-cache.md`.
//!
//! Invariants: a page is checked against its sum before it is given out. A frame that a durable record promises to hold
//! dirty pages is not written again until a later durable record no longer does. After a failed write or sync of the
//! journal the cache takes nothing more that is dirty.

mod durable;
mod frames;
mod holes;
mod index;
mod journal;
mod medium;
mod memory;
mod names;
mod places;
mod record;
mod recover;
mod store;
mod write;

pub use index::Geometry;
pub use medium::{Folder, Medium, Part};
pub use memory::Memory;
pub use record::{FileId, FileRecord, Folded, Record, RecordError, decode_record, encode_record};
pub use recover::owes;
pub use store::{Cache, CacheError, CacheStats, DirtyBlock, Lost, Mark, Read, Recovered};
