//! Image trees, capsule manifests and the frame codec: pure functions over bytes, no I/O.
//!
//! An image is a page array named by the root digest of its tree ([`tree`]); a capsule is named by the digest
//! of its [`Manifest`]; a [`frame`] is several objects compressed together, the unit that stores write and
//! read; a [`delta`] is pages as what they differ by from older ones. docs/formats/image.md has every byte.
//!
//! Invariant of all three encodings: one content has exactly one encoding (frames excepted: a digest names
//! raw content, so a frame may be compressed in any way), and every decoder bounds what it allocates by the
//! length it was given or by a constant of this crate.

pub mod delta;
mod digests;
mod manifest;
mod node;
pub mod pack_frame;
mod prefetch_list;
mod short_digest;
pub mod similarity;
pub mod tree;

pub use digests::page_digests;
pub use manifest::{FORMAT, ImageRef, MAX_MANIFEST, Manifest, ManifestError};
pub use node::{FAN_OUT, MAX_NODE, Node, NodeError};
pub use prefetch_list::{PrefetchList, PrefetchListError};
pub use short_digest::ShortDigest;
