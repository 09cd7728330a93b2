//! The process of one machine. What there is so far: a running machine passes from one process to another.
//!
//! The old process offers copies of the machine's descriptors while the guest runs, and the new one
//! prepares all that it can. Then the old one stops the guest and sends the state that no descriptor has;
//! the new one says that it could go on, gets the machine, and continues the guest. [`swap`] is the
//! decision who has the machine, pure and for every death and every message that does not arrive; [`give`]
//! and [`take`] do what it says. [`channel`] carries packets and descriptors between two processes of one
//! user.
//!
//! Invariants: at every instant at most one process acts on the guest, its memory, its disks and its
//! control connection. One that lives can always have it. A dirty page is known to whoever has the machine,
//! or every page counts as dirty.

pub mod channel;
mod exchange;
mod machine;
mod message;
pub mod swap;

pub use exchange::{Given, PassError, Step, SwapLimits, Taken, give, take};
pub use machine::{Disk, PartError, RunningMachine};
