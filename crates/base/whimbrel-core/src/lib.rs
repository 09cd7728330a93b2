//! Basic types of every crate: digests, page sets, names, sizes and the machine configuration.
//!
//! Nothing here does I/O, reads a clock or is async. Invariants: a [`PageSet`] never holds a page at or past
//! its length; an iterator over a set never returns an empty [`PageRun`]; a value of a name type is a valid
//! name.

mod byte_size;
mod cpu_model;
mod digest;
mod error_chain;
mod file_key;
mod firmware;
pub mod glob;
mod guest_devices;
pub mod hex_id;
mod lock;
pub mod loss;
mod machine_config;
mod names;
mod page_set;
mod text_form;
mod utc;
pub mod varint;
mod witness_address;
mod zero_page;

pub use byte_size::{ByteSize, ParseSizeError};
pub use cpu_model::{CpuModelError, cpu_model};
pub use digest::{Digest, ParseDigestError};
pub use error_chain::{causes, error_chain, is_shortage};
pub use file_key::{FileKey, FileKeyError};
pub use firmware::{Firmware, Uefi};
pub use guest_devices::{CdromDrives, DeviceModel, HotplugBridge};
pub use lock::lock;
pub use machine_config::{Accel, Boot, DiskConfig, MachineConfig, NicConfig};
pub use names::{CapsuleId, HostName, MachineName, NameError, RefName};
pub use page_set::{PageRun, PageSet, Runs};
pub use utc::Utc;
pub use witness_address::{WitnessAddress, WitnessAddressError};
pub use zero_page::is_zero;

/// Bytes in a page, the unit that Whimbrel tracks and stores.
pub const PAGE_SIZE: usize = 4096;
/// Pages in an extent, the range of one leaf of an image tree.
pub const EXTENT_PAGES: usize = 256;
/// Bytes in an extent (1 MiB).
pub const EXTENT_SIZE: usize = PAGE_SIZE * EXTENT_PAGES;
