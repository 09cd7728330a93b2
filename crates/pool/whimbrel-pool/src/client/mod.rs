//! The client: finds the manager, writes files to several benefactors at once, reads them back and checks
//! every chunk.
//!
//! [`Pool`] is a handle on a pool, [`WriteFile`] a file being written, [`ReadFile`] a version being read.
//! Methods that block are for plain threads; what talks to the network runs on the runtime the pool was
//! opened with.

mod byte_ranges;
mod chunk_pipeline;
mod encryption;
mod error;
mod exclusions;
mod manager_calls;
mod memory_budget;
mod previous_versions;
mod read_file;
mod stripe;
mod write_file;
mod write_session;

pub(crate) use encryption::OVERHEAD;
pub use encryption::Secret;
pub use error::{PoolError, Result};
pub use manager_calls::{Pool, PoolOptions};
pub use read_file::ReadFile;
pub use write_file::{WriteFile, WriteMode, WriteOptions};
