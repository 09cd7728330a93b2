//! The checkpoint pool: a fast, deduplicating, replicated file system made of spare disk on ordinary
//! machines.
//!
//! S. Al Kiswany et al., "stdchk: A Checkpoint Storage System for Desktop Grid Computing" (ICDCS 2008). A
//! [`manager`] has all metadata in a transactional database; [`benefactor`]s keep chunks under their digests;
//! a [`client`] cuts a file into chunks ([`chunk`]), sends those that are new to several benefactors at once,
//! and makes the file visible by one commit of its map ([`map`]) at close; [`mount`] is the client as a file
//! system.
//!
//! Invariants: a file is visible whole or not at all; no chunk is used without its digest having been
//! compared; nothing that a living session may rely on is collected; what was committed survives any one
//! process being killed at any instant. `docs/protocols/pool.md` has the exchange, `docs/operations/pool.md`
//! how to run one.

mod address;
pub mod benefactor;
pub mod chunk;
pub mod chunk_map;
pub mod client;
pub mod connections;
pub mod manager;
mod member_listener;
mod meta;
pub mod mount;
pub mod policy;
pub mod protocol;

pub use address::{ManagerAddress, ManagerAddressError};
pub use member_listener::FrontError;
pub use meta::MetaError;
