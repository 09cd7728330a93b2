//! NBD server for any block device, on unix sockets, with plain threads.
//!
//! Speaks the fixed newstyle handshake and the transmission phase of the NBD protocol (`doc/proto.md` of the
//! NetworkBlockDevice project), with structured replies, block status (`base:allocation`) and simple replies
//! for old clients. No TLS, no TCP, one export a socket; docs/protocols/nbd.md has the table of what is
//! served. Layers: `handshake`, `request` and `reply` are pure (bytes in, bytes out); `input`, `output`,
//! `pool`, `transmission`, `connection` and `server` do the I/O.
//!
//! Every length a client names is bounded before memory is set aside for it; a client that sends garbage or
//! stops reading costs its own connection and a bounded amount of memory.

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

pub use server::{Options, Server, bind, bind_private, serve};
