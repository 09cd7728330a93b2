//! The words every other crate speaks: digests, page arithmetic, sets of pages, names, machine configuration.
//!
//! Nothing here does I/O, knows a clock or is async. Invariants: a [`PageSet`] never holds a page at or past
//! its length; a [`PageRun`] is never empty inside a set's iterator; a name that exists as a type is valid.

mod config;
mod digest;
mod name;
mod pages;
mod size;
mod witness;
mod zero;

pub use config::{Accel, Boot, DiskConfig, MachineConfig, NicConfig};
pub use digest::{Digest, ParseDigestError};
pub use name::{CapsuleId, HostName, MachineName, NameError, RefName};
pub use pages::{PageRun, PageSet, Runs};
pub use size::{ByteSize, ParseSizeError};
pub use witness::{WitnessName, WitnessNameError};
pub use zero::is_zero;

/// Bytes in a page, the unit of everything Whimbrel tracks and stores.
pub const PAGE_SIZE: usize = 4096;
/// Pages in an extent, the span of one leaf of an image tree.
pub const EXTENT_PAGES: usize = 256;
/// Bytes in an extent (1 MiB).
pub const EXTENT_SIZE: usize = PAGE_SIZE * EXTENT_PAGES;
