//! Wide-area sessions: a directory of a server mounted elsewhere, with a cache on disk.
//!
//! `proto` has the messages, `server` serves exports, `cache` stores blocks and pending changes on the
//! client's disk, and `client` combines them into files and directories. `hint_file` is the format of hints.
//!
//! Invariants:
//! - The server resolves every name beneath the export and follows no symlink.
//! - Every request carries the key of its session.
//! - A block of the cache is checked before it is used.
//! - Data that was synced under write-back survives any crash of the client. It reaches the server or is
//!   reported, and is never merged.

pub mod cache;
pub mod client;
pub mod hint_file;
pub mod proto;
pub mod server;
