//! Copies capsules between stores by tree: what both sides have never travels.
//!
//! [`protocol`] has the messages, [`Server`] answers them out of a store, [`Sources`] is the list of holders that are asked,
//! nearest first, [`Remote`] fetches what a running machine needs at once, [`pull()`] copies a whole capsule. What is not here:
//! connections (a [`Link`] is brought), where objects are kept (a [`Shelf`]), whom to trust ([`Access`]).
//!
//! Invariants: nothing that a peer sent is kept under a digest that is not its own, and nothing counts as part of a capsule before
//! its digest was compared; every length is bounded before
//! it is allocated, decompression included; the server keeps nothing between two calls
//! that an answer depends on. Calls block; threads are plain.

mod base_images;
mod driver;
mod error;
mod glob;
mod holdings;
mod level;
mod link;
mod meter;
pub mod node_delta;
mod pack;
mod page_frame;
pub mod plan;
pub mod protocol;
mod pull;
mod receive;
mod remote;
mod request;
mod serve_pages;
mod server;
mod shelf;
mod short_leaf;
mod similar_pages;
mod sketch;
mod slots;
mod sources;
mod untrusted;
mod walk;

pub use base_images::{BASES_MAX, BaseImage};
pub use error::SyncError;
pub use holdings::{Holdings, announcements};
pub use level::Level;
pub use link::{Answer, Link, LinkError, WireLink, call};
pub use meter::{Content, Meter, level};
pub use pack::PackError;
pub use pull::{Options, Progress, Report, fetch_capsule, pull};
pub use remote::Remote;
pub use server::{Access, Server};
pub use shelf::{BoxError, Holder, Shelf};
pub use slots::Slots;
pub use sources::{Demand, PEERS_MAX, Peer, Sources};
pub use untrusted::open_anything;
pub use walk::PageCounts;
