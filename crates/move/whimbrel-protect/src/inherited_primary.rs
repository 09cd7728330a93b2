//! A standby that one host fills and another one inherits: who may do what while a machine moves and pages of
//! it are missing.
//!
//! ```text
//!   source: fills, then witness              target: the heir                         third host: the standby
//!   BEGIN with the heir's name, PIECE, at the pause SEAL 0 ------------------------>  whole, as of the pause
//!   FINISH ------------------------------->  loaded, paused; written down whose heir it is
//!   COMMIT POINT; from here on it is the witness
//!   COMMIT ------------------------------->  runs, output held
//!                                            HEARTBEAT, PIECE, SEAL 1, 2, ... ----->  the heir's machine, epoch after epoch
//! ```
//!
//! No right passes from one host to another. There is one protection, the target's, by the rules of
//! [`crate::lease`]; the source only fills its standby. Before the commit the standby cannot take over, for
//! it would have to ask the witness, which is the source and knows of no protection. After it the source
//! never runs the machine, and decides between the other two.
//!
//! - The target dies: the third host hears nothing, the source says yes when the lease has run out, and the
//!   third host takes over.
//! - The source dies: the target gives the machine to the third host, which has all of it ([`yields`]).
//! - The third host dies: the source closes the protection, and the target goes on unprotected.
//! - The target's daemon restarts: it has lost count of what was written, and gives the machine to the third
//!   host, once it is its own.
//! - The source gives up before the commit: it goes on, and tells both others.
//!
//! `tests/inherit/` checks this together with [`whimbrel_migrate::handover`]. No I/O and no clock here.

use crate::{clock::BootTime, lease, lease::PrimaryState};
use whimbrel_migrate::handover::SourceRecord;

/// Whom a standby listens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AcceptedPrimary {
    /// Who began the protection, and fills the standby.
    Filler,
    /// Who inherits it. It has spoken, so the machine was committed to it, and whoever filled has no say any
    /// more.
    Heir,
}

impl AcceptedPrimary {
    /// Somebody who is the heir or not speaks: whether it is listened to.
    pub fn accept(self, is_heir: bool) -> (AcceptedPrimary, bool) {
        match (self, is_heir) {
            (_, true) => (AcceptedPrimary::Heir, true),
            (AcceptedPrimary::Filler, false) => (AcceptedPrimary::Filler, true),
            (AcceptedPrimary::Heir, false) => (AcceptedPrimary::Heir, false),
        }
    }
}

/// Whether the source is the witness of the protection, as far as its disk says.
pub fn is_witness(record: SourceRecord) -> bool {
    record == SourceRecord::HandedOver
}

/// Whether a heir whose missing pages cannot be had gives the machine to the standby: only to one that was
/// heard of within the term, or both would be lost.
pub fn yields(rules: &lease::PrimaryLease, now: BootTime) -> bool {
    rules.state() == PrimaryState::Guarded && now < rules.promise_until()
}
