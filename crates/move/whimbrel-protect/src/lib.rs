//! Protection of a running machine by a standby: replicates epochs and decides which host may run it.
//!
//! ```text
//!   primary                                              standby                 witness
//!   pause, dirty set, copy pages, device state, unpause
//!   encode (`codec`) --- epoch pages --------------->  assemble, check, buffer
//!                    --- epoch end ----------------->  complete? apply, and only then:
//!   release output   <-- committed ------------------
//!   may it run?      --- heartbeat ----------------->  promise not to take over yet
//!                    --- renew -----------------------------------------------> lease
//!                                                      silence: may I take over? --> once only
//! ```
//!
//! Contents: the rules, pure and explored by tests ([`epoch`], [`epoch_length`], [`lease`],
//! [`register_witness`], [`consistency_group`], [`inherited_primary`]); the page codec ([`codec`]); the
//! capture of an epoch ([`epoch_capture`]); the sending side ([`primary`], [`seeding_policy`]); the receiving
//! side ([`standby`]) with its epoch snapshots ([`epoch_snapshot`]); and input replay ([`input_replay`]).
//! QEMU, disks, network ports, connections and threads are the daemon's. All calls block, on plain threads.
//!
//! Invariants: output of an epoch is released only when the standby has all of it, checked. The standby's
//! machine is at every instant that of one complete epoch. Of primary and standby, at most one machine is
//! visible to the outside.

pub mod clock;
pub mod codec;
pub mod consistency_group;
pub mod epoch;
pub mod epoch_capture;
pub mod epoch_length;
pub mod epoch_snapshot;
mod error;
pub mod inherited_primary;
pub mod input_replay;
pub mod lease;
pub mod primary;
pub mod protocol;
pub mod register_witness;
pub mod seeding_policy;
pub mod standby;
pub mod stats;

pub use error::{BoxError, PrimaryError, StandbyError};
