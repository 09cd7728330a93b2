//! The cache on the client's disk: blocks of files, what has yet to reach the server, and the order of it.
//!
//! `index` decides (which frame, what is copied, what may be reused when) and does no I/O; `record` is the
//! bytes of the journal; `journal`, `medium` and `memory` store them; `frames` and `store` put them together.
//! The format is described in `docs/formats/session-cache.md`.
//!
//! Invariants: a page is checked against its sum before it is given out. A frame that a durable record
//! promises to hold dirty pages is not written again until a later durable record no longer does. After a
//! failed write or sync of the journal the cache takes nothing more that is dirty.

mod barrier;
mod block_cache;
mod block_frames;
mod block_index;
mod content_index;
mod file_updates;
mod holes;
mod journal;
mod journal_record;
mod memory_storage;
mod pending_changes;
mod recovery;
mod storage;

pub use block_cache::{
    BlockCache, CacheError, CacheRead, CacheStats, ContentMark, DirtyBlock, LostWrite, Recovered,
};
pub use block_index::Geometry;
pub use journal_record::{
    FileId, FileRecord, JournalRecord, MergedChanges, RecordError, decode_record, encode_record,
};
pub use memory_storage::MemoryStorage;
pub use recovery::has_unsent;
pub use storage::{DiskStorage, Storage, StoragePart};
