//! Block devices and layers over them: one small contract that every layer implements and calls.
//!
//! This crate has the [`Device`] contract, files, copy-on-write, write tracking, swapping and page alignment.
//! It has no protocol (see `whimbrel-nbd`) and knows no capsules (a stored image is a `Device` of
//! `whimbrel-store`). All calls are blocking calls from any thread; a layer never holds a lock while the
//! layer below works on another range.

mod aligned_disk;
mod aligned_pages;
mod atomic_page_set;
mod bitmap;
mod cow;
mod device;
mod disk_pages;
mod fault_injection;
mod file_device;
mod group_commit;
mod latch;
mod layer;
mod memory_device;
mod mirror;
mod mirror_layer;
mod padded_device;
mod range_lock;
mod swappable_device;
mod tracked_device;
mod write_throttle;
mod zero_device;

pub use aligned_disk::{AlignedDisk, AlignmentMismatch, RawDisk, layout_of};
pub use aligned_pages::{AlignedPageView, AlignedPages};
pub use cow::{
    CipherError, Cow, HeaderError, OverlayDir, OverlayError, OverlayFiles, OverlayKey, OverlayState,
    SectorCipher,
};
pub use device::{BlockError, Device, Extent, ExtentKind, ReadOnlyDevice};
pub use disk_pages::DiskPages;
pub use fault_injection::{FaultInjector, FaultPlan};
pub use file_device::FileDevice;
pub use memory_device::MemDevice;
pub use mirror::{Mirror, MirrorCost, MirroredWrite, NextWrites};
pub use mirror_layer::MirrorLayer;
pub use padded_device::Padded;
pub use swappable_device::{BeforeSet, SwapError, SwappableDevice};
pub use tracked_device::TrackedDevice;
pub use write_throttle::WriteThrottle;
pub use zero_device::ZeroDevice;
