//! The client: finds the manager, writes files to several benefactors at once, reads them back and checks every chunk.
//!
//! [`Pool`] is a handle on a pool, [`WriteFile`] a file being written, [`ReadFile`] a version being read. Methods that block
//! are for plain threads; what talks to the network runs on the runtime the pool was opened with.

mod budget;
mod calls;
mod error;
mod feed;
mod file;
mod left_out;
mod ranges;
mod read;
mod seal;
mod series;
mod session;
mod stripe;

pub use calls::{Pool, PoolOptions};
pub use error::{PoolError, Result};
pub use file::{Protocol, WriteFile, WriteOptions};
pub use read::ReadFile;
pub(crate) use seal::OVERHEAD;
pub use seal::Secret;
