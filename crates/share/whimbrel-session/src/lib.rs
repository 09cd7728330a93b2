//! Wide-area sessions: a directory of a server mounted elsewhere, with a cache on disk.
//!
//! `proto` is what travels, `server` answers it from named directories, `cache` keeps blocks and promises on
//! the client's disk, `client` puts the three together as files and directories. `beside` is what a note
//! beside a file says.
//!
//! Invariants: the server resolves every name beneath the exported directory and follows no symlink; every
//! request carries the key of its session; a block of the cache is checked before it is used; what was
//! written under write-back and synced is found again after any crash of the client, and reaches the server
//! or is reported, never merged.

pub mod cache;
pub mod client;
pub mod hint_file;
pub mod proto;
pub mod server;
