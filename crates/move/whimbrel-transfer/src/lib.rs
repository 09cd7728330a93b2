//! Transfer of capsules between stores, tree by tree: objects that both sides have are not sent.
//!
//! [`protocol`] has the messages, and [`Server`] answers them from a store. [`Holders`] is the list of
//! holders to ask, nearest first. [`DemandFetcher`] fetches what a running machine needs at once, and
//! [`pull()`] copies a complete capsule. Callers supply the connections ([`Link`]), the place for objects
//! ([`LocalObjects`]) and the permissions ([`Access`]).
//!
//! Invariants: nothing that a peer sent is stored under a digest other than its own, and nothing counts as
//! part of a capsule before its digest was compared. Every length is bounded before memory is allocated for
//! it, decompressed lengths included. The server keeps no state between two calls that a reply depends on.
//! Calls block; threads are plain.

mod answer_decoder;
mod base_images;
mod child_set;
mod compression;
mod compression_level;
mod demand_fetcher;
mod error;
mod fuzz_entry;
mod holders;
mod link;
mod link_meter;
mod local_objects;
pub mod node_delta;
mod page_answers;
mod page_frame;
pub mod protocol;
mod pull;
mod pull_driver;
pub mod pull_plan;
mod request_builder;
mod server;
mod short_leaf;
mod similar_pages;
mod sketch;
mod tree_walk;

pub use base_images::{BASES_MAX, BaseImage};
pub use child_set::ChildSet;
pub use compression::CompressionError;
pub use compression_level::CompressionLevel;
pub use demand_fetcher::DemandFetcher;
pub use error::TransferError;
pub use fuzz_entry::decode_any;
pub use holders::{Demand, HOLDERS_MAX, Holder, Holders};
pub use link::{Answer, Link, LinkError, WireLink, call};
pub use link_meter::{Content, LinkMeter, level};
pub use local_objects::{BoxError, LocalObjects, PageLookup};
pub use pull::{Options, Progress, Report, fetch_capsule, pull};
pub use server::{Access, Server};
pub use tree_walk::PageCounts;
