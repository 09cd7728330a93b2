//! Source and target of a live migration: pre-copy of memory and disks, then a handover with one commit point.
//!
//! What is here: the messages ([`protocol`]), how pages are encoded ([`codec`]), what of them the
//! target has already ([`base`]), whether a machine fits a host ([`fit`]), who may run ([`handover`],
//! pure and explored by a test), the sending side ([`source`]) and the receiving side ([`target`]). What is
//! not: QEMU, disks, the network port: the host brings them through [`target::Landing`] and the traits of
//! `whimbrel-machine`. Blocking calls on plain threads.
//!
//! Invariant: at every instant at most one side may run the machine, and after any failure exactly one can.

mod asking;
pub mod base;
pub mod boot;
mod choice;
pub mod codec;
mod error;
pub mod fit;
pub mod handover;
mod known;
pub mod link;
mod mirroring;
pub mod pause;
pub mod postcopy;
pub mod protocol;
mod sender;
mod sent;
pub mod source;
pub mod strays;
pub mod target;

pub use error::TargetError;
pub use source::{Commit, HandedOver, MigrateError, Move, abort, confirm, migrate};
