//! The client of a pool: finds the manager, writes to several benefactors at once, reads and checks chunks.
//!
//! [`Pool`] is a handle on a pool, [`WriteFile`] a file being written, [`ReadFile`] a version being read.
//! Blocking methods are for threads outside a runtime; network calls run on the runtime of the handle.

mod byte_ranges;
mod chunk_pipeline;
mod encryption;
mod error;
mod exclusions;
mod fetch_group;
mod manager_calls;
mod map_seal;
mod memory_budget;
mod previous_versions;
mod read_file;
mod reader_session;
mod rename;
mod shards;
mod spool;
mod stream_memory;
mod stripe;
mod write_file;
mod write_session;

pub(crate) use encryption::OVERHEAD;
pub use encryption::Secret;
pub use error::{PoolError, Result};
pub use manager_calls::{Pool, PoolOptions};
pub use read_file::ReadFile;
pub(crate) use spool::{LeftFile, left};
pub use write_file::{WriteFile, WriteMode, WriteOptions};
