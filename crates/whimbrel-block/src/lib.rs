//! Block devices and thin layers over them: one small contract, every layer implements it and calls the next.
//!
//! What is here: the [`Device`] contract, files, copy-on-write, write tracking, switching. What is not: any
//! protocol (see `whimbrel-nbd`) and anything that knows a capsule (a stored image is a `Device` of
//! `whimbrel-store`). All calls are plain blocking calls from any thread; a layer never holds a lock while the
//! layer below works on another range.

mod device;

pub use device::{BlockError, Device, Extent, ExtentKind};
