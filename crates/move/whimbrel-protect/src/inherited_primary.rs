//! Inherited primary: the rules of a postcopy migration with a backup host, whose protection the target
//! inherits.
//!
//! ```text
//!   source: seeds, then is the witness  target: the inheriting primary     backup host: the standby
//!   START naming the target, EPOCH_PAGES, at the pause EPOCH_END 0 ----->  complete, as of the pause
//!   FINISH --------------------------->  loaded, paused; the record names the backup host
//!   COMMIT POINT; from here on it is the witness
//!   COMMIT --------------------------->  runs, output buffered
//!                                        HEARTBEAT, EPOCH_PAGES,
//!                                        EPOCH_END 1, 2, ... ------------>  the target's epochs
//! ```
//!
//! No right passes from one host to another. There is one protection, the target's, by the rules of
//! [`crate::lease`]; the source only seeds its standby. Before the commit the standby cannot take over, for
//! it would have to ask the witness, which is the source and knows of no protection. After it the source
//! never runs the machine, and decides between the other two.
//!
//! - The target dies: the backup host hears nothing, the source says yes when the lease has expired, and the
//!   backup host takes over.
//! - The source dies: the target yields the machine to the backup host, which has all of it ([`yields`]).
//! - The backup host dies: the source closes the protection, and the target runs on unprotected.
//! - The target's daemon restarts: it no longer knows which pages were written, and yields the machine to the
//!   backup host, once it owns it.
//! - The source aborts before the commit: it runs on, and informs both others.
//!
//! `tests/it/inherit/` checks this together with [`whimbrel_migrate::handover`]. No I/O and no clock here.

use crate::{clock::BootTime, lease, lease::PrimaryState};
use whimbrel_migrate::handover::SourceRecord;

/// The host from which a standby accepts messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AcceptedPrimary {
    /// The source, which started the protection and seeds the standby.
    Source,
    /// The target, which inherits the protection. It has sent a message, so the machine was committed to it,
    /// and the source's messages no longer count.
    Target,
}

impl AcceptedPrimary {
    /// Handles a message from the inheriting primary or the source. Returns whether it is accepted.
    pub fn accept(self, is_heir: bool) -> (AcceptedPrimary, bool) {
        match (self, is_heir) {
            (_, true) => (AcceptedPrimary::Target, true),
            (AcceptedPrimary::Source, false) => (AcceptedPrimary::Source, true),
            (AcceptedPrimary::Target, false) => (AcceptedPrimary::Target, false),
        }
    }
}

/// Whether the source is the witness of the protection, according to its record.
pub fn is_witness(record: SourceRecord) -> bool {
    record == SourceRecord::HandedOver
}

/// Whether an inheriting primary whose missing pages cannot be fetched yields the machine to the standby. The
/// standby must have answered within the term, or both copies would be lost.
pub fn yields(rules: &lease::PrimaryLease, now: BootTime) -> bool {
    rules.state() == PrimaryState::Protected && now < rules.promise_until()
}
