//! Block devices and thin layers over them: one small contract, every layer implements it and calls the next.
//!
//! What is here: the [`Device`] contract, files, copy-on-write, write tracking, switching, cut pages. What is not: any
//! protocol (see `whimbrel-nbd`) and anything that knows a capsule (a stored image is a `Device` of
//! `whimbrel-store`). All calls are plain blocking calls from any thread; a layer never holds a lock while the
//! layer below works on another range.

mod atomic_pages;
mod bits;
mod brake;
mod cow;
mod cut_pages;
mod device;
mod disk_pages;
mod fault;
mod file;
mod flush_group;
mod latch;
mod layer;
mod memory;
mod mirror;
mod mirrored;
mod padded;
mod range_lock;
mod recut;
mod switch;
mod tracked;
mod zero;

pub use brake::Brake;
pub use cow::{Cow, HeaderError, OverlayError, OverlayPlace};
pub use cut_pages::{CutPages, CutView};
pub use device::{BlockError, Device, Extent, ExtentKind};
pub use disk_pages::DiskPages;
pub use fault::{Fault, FaultPlan};
pub use file::FileDevice;
pub use memory::MemDevice;
pub use mirror::{Mirror, MirrorCost, Piece, Taken};
pub use mirrored::Mirrored;
pub use padded::Padded;
pub use recut::{CutsMismatch, Recut, Uncut, layout_of};
pub use switch::{BeforeSet, Switch, SwitchError};
pub use tracked::Tracked;
pub use zero::ZeroDevice;
