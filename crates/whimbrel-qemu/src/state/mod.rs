//! The state of CPUs and devices as one stream that any QEMU with the same command line loads.

mod head;
mod identity;
mod places;
mod reader;
mod rest;
mod save;

pub use head::{Head, MAX_STATE, RamBlock, StreamError};
pub(crate) use identity::with_identity_first;
pub(crate) use places::{Places, ShownBlock, parse_ramblocks};
pub(crate) use rest::Rest;
pub(crate) use save::device_sections;
pub use save::{DeviceState, StateError, compose};
