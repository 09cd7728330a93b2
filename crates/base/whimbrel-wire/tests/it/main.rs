//! Tests with two real hosts on loopback, and everything that may fail between them.

mod calls;
mod flow;
mod handshake;
mod hosts;
mod ssh;
