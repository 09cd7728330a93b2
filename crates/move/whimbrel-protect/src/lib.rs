//! Protection by a hot standby: epochs of a running machine, replicated whole or not at all, and who may run
//! it.
//!
//! ```text
//!   primary                                              standby                 witness
//!   pause, dirty set, pages aside, device blob, resume
//!   encode (`code`) ---- pieces -------------------->  assemble, check, hold
//!                   ---- seal ---------------------->  whole? apply, and only then:
//!   release output  <--- committed -----------------
//!   may it run?     ---- heartbeat ----------------->  promise not to take over yet
//!                   ---- renew ------------------------------------------------> lease
//!                                                      silence: may I take over? --> once only
//! ```
//!
//! What is here: the rules, pure and explored by tests ([`epoch`], [`stretch`], [`lease`], [`ballot`],
//! [`group`]), the code of pages ([`code`]), the cut of an epoch ([`cut`]), the sending side ([`primary`]),
//! the receiving side ([`standby`]) and copies that it makes of epochs ([`keep`]), and what a machine is told
//! once more that is protected by its inputs ([`replay`]). What is not: QEMU, disks, the network port,
//! connections and threads: the host brings them. Blocking calls on plain threads.
//!
//! Invariants: output of an epoch is released only when the standby holds all of it, checked; the standby's
//! machine is at every instant that of one whole epoch; of primary and standby at most one may be seen to
//! run.

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
pub mod standby;
pub mod stats;

pub use error::{BoxError, PrimaryError, StandbyError};
