//! Possession of a machine while it passes from one process to another. Pure: event in, action out.
//!
//! ```text
//!   old                                          new
//!   offers copies of the descriptors   ->        prepares: maps, opens, checks
//!                                      <-        ready
//!   stops the guest, drains, scans
//!   sends what no descriptor has       ->        builds disks, arrays, dirty logs; uses none of them
//!                                      <-        prepared
//!   yours                              ->        serves, continues the guest
//!   ends                               <-        running
//! ```
//!
//! The machine is the old one's until it says *yours*, and again if the new one has ended for certain
//! before it said *running*. It is the new one's from *yours* on, or from the certain end of the old one.
//! Silence alone never moves it. Before *yours* the old one says *withdrawn* to a new one that is late, and
//! goes on: what was sent is read before the end of its sender is noticed. A new one that refuses touches
//! nothing either. After *yours* the old one ends one that is late, and waits for its end; the new one only
//! waits. A process whose end is certain has neither CPU nor descriptor left, so there is no third party to
//! ask.
//!
//! The tests walk through every order of messages that arrive or do not, deaths, failures and delays.

mod new;
mod old;

pub use new::{NewAction, NewEvent, NewSide};
pub use old::{OldAction, OldEvent, OldSide};

/// What whoever goes on with the machine knows of the pages written so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Knowledge {
    /// The dirty sets that it has are complete.
    Complete,
    /// Another process may have had pages written, or taken dirty sets, of which it knows nothing.
    Lost,
}

#[cfg(test)]
mod model_tests;
