//! The words every other crate speaks: digests, page arithmetic, sets of pages, names, machine configuration.
//!
//! Nothing here does I/O, knows a clock or is async. Invariants: a [`PageSet`] never holds a page at or past
//! its length; a [`PageRun`] is never empty inside a set's iterator; a name that exists as a type is valid.

mod byte_size;
mod digest;
mod machine_config;
mod names;
mod page_set;
mod witness_address;
mod zero_page;

pub use byte_size::{ByteSize, ParseSizeError};
pub use digest::{Digest, ParseDigestError};
pub use machine_config::{Accel, Boot, DiskConfig, MachineConfig, NicConfig};
pub use names::{CapsuleId, HostName, MachineName, NameError, RefName};
pub use page_set::{PageRun, PageSet, Runs};
pub use witness_address::{WitnessAddress, WitnessAddressError};
pub use zero_page::is_zero;

/// Bytes in a page, the unit of everything Whimbrel tracks and stores.
pub const PAGE_SIZE: usize = 4096;
/// Pages in an extent, the span of one leaf of an image tree.
pub const EXTENT_PAGES: usize = 256;
/// Bytes in an extent (1 MiB).
pub const EXTENT_SIZE: usize = PAGE_SIZE * EXTENT_PAGES;
