//! Source and target of a live migration: precopy of memory and disks, then a handover with one commit point.
//!
//! Contents: the messages ([`protocol`]), the encoding of pages ([`page_batch`]), the content that arrays
//! start from ([`baseline`]), the check whether a machine fits a host ([`compatibility`]), the right to run
//! ([`handover`], pure and explored by a test), the source ([`source`]), the target ([`target`]) and
//! [`postcopy`]. QEMU, disks and network ports belong to the daemon, which passes them in through
//! [`target::TargetHost`] and the traits of `whimbrel-machine`. All calls block; threads are plain.
//!
//! Invariant: at every instant at most one side may run the machine, and after any failure exactly one can.

mod attempt;
pub mod baseline;
pub mod boot_files;
pub mod compatibility;
pub mod downtime;
mod effort_control;
mod error;
pub mod handover;
mod hit_estimate;
mod incoming;
pub mod late_frames;
pub mod link;
mod mirrored_writes;
mod offered_config;
pub mod outcome;
pub mod page_batch;
mod page_sender;
pub mod postcopy;
pub mod protocol;
mod sent_hashes;
pub mod source;
pub mod target;
mod target_contents;
mod watchdog;

pub use attempt::HandoverRecord;
pub use error::TargetError;
pub use outcome::{CommittedHost, Confirmed, PendingCommit, abort, confirm};
pub use source::{HandedOver, MigrateError, MigrationJob, migrate};
pub use watchdog::Budget;
