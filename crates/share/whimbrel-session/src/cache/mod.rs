//! The cache on the client's disk: blocks of files, and the changes that have yet to reach the server in
//! their order.
//!
//! `block_index` decides which frame to use, what to copy and what to reuse, and does no I/O.
//! `journal_record` has the bytes of the journal; `journal`, `storage` and `memory_storage` store them;
//! `block_frames` and `block_cache` combine the parts. The format is described in
//! `docs/formats/session-cache.md`.
//!
//! Invariants: a page is checked against its checksum before it is returned. A frame that a durable record
//! promises to hold dirty pages is not written again until a later durable record replaces the promise. After
//! a failed write or sync of the journal the cache accepts no more dirty pages.

mod barrier;
mod block_cache;
mod block_frames;
mod block_index;
mod cache_dir;
mod cache_file;
mod cache_key;
mod content_index;
mod file_updates;
mod holes;
mod journal;
mod journal_record;
mod memory_storage;
mod pending_changes;
mod pinned_files;
mod recovery;
mod storage;

pub use block_cache::{
    BlockCache, CacheError, CacheRead, CacheStats, ContentMark, DirtyBlock, LostWrite, Recovered,
};
pub use block_index::Geometry;
pub use cache_dir::CacheDir;
pub(crate) use cache_file::{CacheFile, fill};
pub use cache_key::CacheKeyError;
pub use journal_record::{
    FileId, FileRecord, JournalRecord, MergedChanges, RecordError, decode_record, encode_record,
};
pub use memory_storage::MemoryStorage;
pub use recovery::has_unsent;
pub use storage::{DiskStorage, Storage, StoragePart};
