//! The pool: a fast, deduplicating, replicated file system made of the spare disk of ordinary hosts.
//!
//! S. Al Kiswany et al., "stdchk: A Checkpoint Storage System for Desktop Grid Computing" (ICDCS 2008). The
//! [`manager`] has all metadata in a transactional database. [`benefactor`]s store chunks by digest. A
//! [`client`] splits a file into chunks ([`chunk`]), sends the new ones to several benefactors at once, and
//! makes the file visible at close by committing its chunk map ([`chunk_map`]). [`mount`] is the client as a
//! file system.
//!
//! Invariants: a file is visible completely or not at all; no chunk is used before its digest was compared;
//! no chunk that a live write session may rely on is collected; committed data survives the death of any one
//! process at any instant. The exchange is in `docs/protocols/pool.md`, operation in
//! `docs/operations/pool.md`.

mod address;
pub mod backup;
pub mod benefactor;
pub mod chunk;
pub mod chunk_map;
pub mod client;
pub mod connections;
mod domains;
pub mod erasure;
pub mod manager;
mod member_listener;
mod meta;
pub mod mount;
pub mod policy;
pub mod protocol;

pub use address::{ManagerAddress, ManagerAddressError};
pub use member_listener::ListenerError;
pub use meta::MetaError;
