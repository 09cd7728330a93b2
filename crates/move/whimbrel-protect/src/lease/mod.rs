//! Leases: three pure state machines that decide which host may run a machine when hosts lose contact.
//!
//! Two things let the primary's machine be visible to the outside: the *lease* of the witness, and the
//! standby's *promise* not to take over yet. Each lasts for one term from when the primary asked for it, less
//! an eighth. The standby runs the machine only after its own promise has expired and the witness, once the
//! lease has expired too, has said yes; or after the primary has yielded for good.
//!
//! - Witness lost: primary and standby continue as long as they reach each other.
//! - Standby lost: the primary asks the witness to *close* the protection. Then the standby never gets a yes,
//!   and the primary needs no lease any more.
//! - Primary lost: the standby gets its yes one term later.
//! - One host cut off from the other two: the primary stops before its lease can pass on, the standby gets no
//!   yes.
//! - No witness configured: the standby never asks by itself. A person confirms that the primary is dead, and
//!   is responsible for that.
//!
//! A right is not a copy. The primary deletes its machine only once the standby has said that it loaded it
//! and recorded that, whatever the witness says. Until then it *yields*: it is not visible, keeps its copy,
//! and asks the standby to take over. A standby that cannot load the machine keeps its copy too, until the
//! primary takes the machine back. Only a primary that has a copy ends a protection or takes the machine
//! back.
//!
//! Each machine has one transition function for each event, and says by an action what its host must do next.
//! The daemon executes actions in one place for each side, by a `match` that names all of them.
//!
//! A clock is only compared with itself ([`BootTime`](crate::clock::BootTime)). The eighth covers how much
//! slower than the others the primary's clock may be (over a term; quartz is four orders of magnitude better,
//! and a clock that is being slewed two), and how long the primary takes to stop. `tests/it/lease_model`
//! checks the rules against every order of messages, losses, repetitions, restarts and clocks that drift by
//! as much.

mod primary;
mod standby;
mod witness;

pub use primary::{PrimaryLease, PrimaryLeaseAction, PrimaryState};
pub use standby::{StandbyLease, StandbyLeaseAction};
pub use witness::{WitnessAction, WitnessLease, WitnessState};

use serde::{Deserialize, Serialize};
use std::time::Duration;
use whimbrel_core::HostName;

/// The part of a term during which the primary may run.
pub fn usable(term: Duration) -> Duration {
    term - term / 8
}

/// Queries to a witness.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessQuery {
    /// A protection starts: the primary has the lease.
    Register {
        /// Host that may take over.
        standby: HostName,
        /// Term of the lease.
        term_ms: u32,
    },
    /// The primary renews its lease.
    Renew,
    /// The standby wants to run the machine.
    TakeOver {
        /// The primary has promised never to run it again.
        yielded: bool,
    },
    /// The primary wants to continue without a standby.
    Close,
    /// Both hosts know the outcome, so the witness may delete it.
    Forget,
}

/// Replies of a witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WitnessReply {
    /// The query is granted.
    Yes,
    /// Not yet: the primary's lease runs.
    Held,
    /// The standby has the machine.
    Taken,
    /// The primary continues alone.
    Closed,
    /// The protection is unknown here, or the host that asks has no part in it.
    Unknown,
    /// The witness has no space for another protection.
    Full,
}
