//! Image trees, capsule manifests and the pack frame codec: pure functions over bytes, no I/O.
//!
//! An image is a page array named by the root digest of its tree ([`tree`]). A capsule is named by the digest
//! of its [`Manifest`]. A [`pack_frame`] is several objects compressed together, the unit that stores write
//! and read. A [`delta`] encodes pages as the difference from older ones. docs/formats/image.md has every
//! byte.
//!
//! Invariants: trees, manifests and prefetch lists have exactly one encoding for each content. A frame may be
//! compressed in any way, because digests name raw content. Every decoder bounds what it allocates by the
//! length of its input or by a constant of this crate.

pub mod compression;
pub mod delta;
pub mod delta_blocks;
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
