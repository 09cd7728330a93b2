//! Source and target of a live migration: pre-copy of memory and disks, then a handover with one commit
//! point.
//!
//! What is here: the messages ([`protocol`]), how pages are encoded ([`codec`]), what of them the
//! target has already ([`base`]), whether a machine fits a host ([`fit`]), who may run ([`handover`],
//! pure and explored by a test), the sending side ([`source`]) and the receiving side ([`target`]). What is
//! not: QEMU, disks, the network port: the host brings them through [`target::Landing`] and the traits of
//! `whimbrel-machine`. Blocking calls on plain threads.
//!
//! Invariant: at every instant at most one side may run the machine, and after any failure exactly one can.

pub mod baseline;
pub mod boot_files;
pub mod compatibility;
pub mod downtime;
mod effort_control;
mod error;
pub mod handover;
mod hit_estimate;
pub mod late_frames;
pub mod link;
mod mirrored_writes;
pub mod page_batch;
mod page_sender;
pub mod postcopy;
pub mod protocol;
mod sent_hashes;
pub mod source;
pub mod target;
mod target_contents;

pub use error::TargetError;
pub use source::{HandedOver, MigrateError, MigrationJob, PendingCommit, abort, confirm, migrate};
