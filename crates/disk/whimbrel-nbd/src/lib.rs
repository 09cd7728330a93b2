//! NBD server for any block device, on Unix sockets, with plain threads.
//!
//! Implements the fixed newstyle handshake and the transmission phase of the NBD protocol (`doc/proto.md` of
//! the NetworkBlockDevice project), with structured replies, block status (`base:allocation`) and simple
//! replies for old clients. No TLS, no TCP, one export for each socket; docs/protocols/nbd.md has the table.
//! Layers: `handshake`, `request` and `reply` are pure (bytes in, bytes out); `input`, `output`,
//! `worker_pool`, `transmission`, `connection` and `server` do the I/O.
//!
//! A server can be suspended between two requests and go on in another process ([`Server::suspend`]): its
//! clients do not notice.
//!
//! Every length that a client sends is bounded before memory is allocated for it. A client that sends garbage
//! or stops reading costs its own connection and a bounded amount of memory.

mod connection;
mod constants;
mod execution;
mod handshake;
mod input;
mod output;
mod reply;
mod request;
mod server;
mod transmission;
mod worker_pool;

pub use connection::ConnectionState;
pub use server::{Options, Server, ServerParts, bind, bind_private, serve, serve_parts};
