//! Two real hosts on loopback, and everything that may go wrong between them.

mod calls;
mod flow;
mod handshake;
mod hosts;
mod ssh;
