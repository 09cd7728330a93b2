//! Device state as one stream that any QEMU with the same command line loads.

mod device_stream;
mod generation_id;
mod ram_blocks;
mod reader;
mod stream_header;
mod stream_remainder;

pub(crate) use device_stream::device_sections;
pub use device_stream::{DeviceState, StateError, compose};
pub(crate) use generation_id::with_identity_first;
pub(crate) use ram_blocks::{ListedBlock, RamBlockAddresses, parse_ramblocks};
pub use stream_header::{MAX_STATE, RamBlock, StreamError, StreamHeader};
pub(crate) use stream_remainder::StreamRemainder;
